"""Attention over a KV cache as flash-attn documents it, sequence by sequence on the host: the oracle of these tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa_serve.backends.reference import attention_reference


@dataclass
class Oracle:
    """What a call must return and leave in the cache.

    out: (batch, seqlen_q, heads, dim_v) or packed, float64; lse: a list of (heads, seqlen_q), one for each sequence
    """

    outs: list[Tensor]
    lses: list[Tensor]
    k_rows: list[Tensor]
    v_rows: list[Tensor]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """x (rows, heads, dim), each pair of elements turned by its angle as a complex number, without the product's code."""
    x = x.double().clone()
    half = cos.shape[1]
    for row, position in enumerate(positions):
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            turn = complex(cos[position, pair].item(), sin[position, pair].item())
            value = torch.complex(x[row, :, a], x[row, :, b]) * turn
            x[row, :, a] = value.real
            x[row, :, b] = value.imag
    return x


def cached_attention(
    q: list[Tensor],
    old_k: list[Tensor],
    old_v: list[Tensor],
    new_k: list[Tensor] | None = None,
    new_v: list[Tensor] | None = None,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = True,
    rotary_starts: list[int] | None = None,
    leftpad: list[int] | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Oracle:
    """One entry per sequence: q (seqlen_q, heads, dim), keys and values in the cache (length, kv_heads, dim), and new ones."""
    found = Oracle([], [], [], [])
    for b in range(len(q)):
        queries = q[b].double()
        keys = old_k[b].double()
        values = old_v[b].double()
        start = len(keys) if rotary_starts is None else rotary_starts[b]
        if new_k is not None and new_v is not None:
            added = new_k[b].double()
            if rotary is not None:
                added = rotated(added, *rotary, [start + i for i in range(len(added))], interleaved).to(dtype).double()
            keys = torch.cat([keys, added])
            values = torch.cat([values, new_v[b].double()])
        if rotary is not None:
            moves = causal or window_size != (-1, -1)
            places = [start + (i if moves else 0) for i in range(len(queries))]
            queries = rotated(queries, *rotary, places, interleaved).to(dtype).double()
        found.k_rows.append(keys)
        found.v_rows.append(values)
        first = 0 if leftpad is None else leftpad[b]
        left, right = window_size
        out, lse = attention_reference(
            queries[None],
            keys[None, first:],
            values[None, first:],
            softmax_scale=queries.shape[-1] ** -0.5,
            window_size=(left, 0 if causal else right),
            softcap=softcap,
        )
        found.outs.append(out[0])
        found.lses.append(lse[0])
    return found
