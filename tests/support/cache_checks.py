"""Checks of flash_attn_with_kvcache, on the default device: an oracle that works sequence by sequence, and a grid of calls."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends.reference import attention_reference
from fa_serve.flash_attn import flash_attn_with_kvcache, interface

HEADS = 4
KV_HEADS = 2
DIM = 16
ROTARY = 8
CAPACITY = 24
LENGTHS = [5, 0, 16]


@dataclass(frozen=True)
class Case:
    """One call: `page_size` 0 is a contiguous cache, `new` the number of new keys per sequence."""

    seqlen_q: int = 3
    new: int = 0
    page_size: int = 0
    rotary: bool = False
    interleaved: bool = True
    leftpad: bool = False
    rows: bool = False
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def rotary_table() -> tuple[Tensor, Tensor]:
    """cos and sin (positions, rotary_dim / 2)."""
    angle = draw(CAPACITY + 8, ROTARY // 2, seed=9) * 3
    return angle.cos(), angle.sin()


def paged(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """A contiguous cache (batch, seqlen, heads, dim) as pages in random order, and its block table."""
    pages = cache.unflatten(1, (-1, page_size)).flatten(0, 1)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(3), device="cpu").to(cache.device)
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    return shuffled, order.view(len(cache), -1).to(torch.int32)


def contiguous(cache: Tensor, table: Tensor) -> Tensor:
    """Undo `paged`."""
    return cache[table.long()].flatten(1, 2)


GRID = [
    Case(seqlen_q, new, page_size, rotary, interleaved, leftpad, rows, causal)
    for seqlen_q, new, page_size, rotary, interleaved, leftpad, rows, causal in itertools.product(
        (1, 3), (0, 1, 3), (0, 4, 8), (False, True), (False, True), (False, True), (False, True), (False, True)
    )
    if not (rotary and not new) and (rotary or interleaved)
]
OTHERS = [
    Case(window_size=(4, 0)),
    Case(new=3, rotary=True, causal=False, window_size=(4, 2)),
    Case(new=2, rotary=True, interleaved=False, page_size=8, causal=False, window_size=(-1, 1)),
    Case(new=3, softcap=5.0, page_size=4),
    Case(new=1, seqlen_q=1, softcap=5.0, leftpad=True),
    Case(seqlen_q=20, new=8, causal=True),
]


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


def check(case: Case, fa3: bool, dtype: torch.dtype = torch.float32, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    """One call of `flash_attn_with_kvcache`, FlashAttention-3's with `fa3`: its results, and what it leaves in the cache."""
    batch = len(LENGTHS)
    q = draw(batch, case.seqlen_q, HEADS, DIM, seed=1).to(dtype)
    rows = [3, 0, 4] if case.rows else list(range(batch))
    pads = [2, 0, 7] if case.leftpad else [0] * batch
    k_cache, v_cache = (draw(5, CAPACITY, KV_HEADS, DIM, seed=seed).to(dtype) for seed in (4, 5))
    if not case.rows:
        k_cache, v_cache = (x[:batch].clone() for x in (k_cache, v_cache))
    k, v = (draw(batch, case.new, KV_HEADS, DIM, seed=seed).to(dtype) if case.new else None for seed in (6, 7))
    rotary = rotary_table() if case.rotary else None
    oracle = cached_attention(
        list(q),
        [k_cache[row, :length] for row, length in zip(rows, LENGTHS, strict=True)],
        [v_cache[row, :length] for row, length in zip(rows, LENGTHS, strict=True)],
        None if k is None else list(k),
        None if v is None else list(v),
        rotary=rotary,
        interleaved=case.interleaved,
        leftpad=pads,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
        dtype=dtype,
    )
    words: dict[str, Any] = {"causal": case.causal, "window_size": case.window_size, "softcap": case.softcap}
    words |= {"rotary_interleaved": case.interleaved, "return_softmax_lse": True}
    words |= {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    if case.leftpad:
        words["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if case.rows:
        words["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    if rotary is not None:
        words |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1]}
    given = (k_cache, v_cache)
    table = None
    if case.page_size:
        k_pages, table = paged(k_cache, case.page_size)
        given = (k_pages, paged(v_cache, case.page_size)[0])
        words["page_table" if fa3 else "block_table"] = table
    before = [x.clone() for x in given]
    function = interface.flash_attn_with_kvcache if fa3 else flash_attn_with_kvcache
    out, lse = function(q, *given, k, v, **words)
    assert out.shape == q.shape
    assert lse.shape == (batch, HEADS, case.seqlen_q)
    torch.testing.assert_close(out.float(), torch.stack(oracle.outs).float(), rtol=rtol, atol=atol)
    torch.testing.assert_close(lse, torch.stack(oracle.lses).float(), rtol=rtol, atol=atol)
    for cache, old, expected in zip(given, before, (oracle.k_rows, oracle.v_rows), strict=True):
        now, then = (cache, old) if table is None else (contiguous(cache, table), contiguous(old, table))
        for row, length, keys in zip(rows, LENGTHS, expected, strict=True):
            torch.testing.assert_close(now[row, : len(keys)].float(), keys.float(), rtol=rtol, atol=atol)
            assert torch.equal(now[row, length + case.new :], then[row, length + case.new :])
