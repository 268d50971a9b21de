"""The oracle: attention exactly as its equation says, in plain PyTorch, on any device.

    S = softmax_scale * Q K^T            softcap * tanh(S / softcap) where softcap is on
    S = S + mask - slope * |i - j|,      -inf where a key is hidden
    P = exp(S - lse),  lse = log(sum_j exp(S_j) [+ exp(sink)])
    O = P V

It computes in at least float32, and in float64 for float64 input. It is slow and holds the whole score matrix on purpose. Tests
compare the other backends with it; the other backends never import it. It leaves out every optimisation.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors, StoreTensors
from fa_serve.backends.recompute import plan_recomputed
from fa_serve.launching.plans import Run
from fa_serve.spec import AttentionSpec


def positions(seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of queries (seqlen_q, 1) and keys (1, seqlen_k) in the sequence.

    seqlen_k - seqlen_q aligns the last query with the last key (the bottom-right corner).
    """
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return i, torch.arange(seqlen_k, device=device)[None, :]


def visible_keys(
    seqlen_q: int, seqlen_k: int, window_size: tuple[int, int], device: torch.device, attention_chunk: int = 0
) -> Tensor:
    """(seqlen_q, seqlen_k) bool: the key at position j is visible to the query at position i if i - left <= j <= i + right,
    and both are in the same chunk."""
    left, right = window_size
    i, j = positions(seqlen_q, seqlen_k, device)
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        keep &= j >= i - left
    if right >= 0:
        keep &= j <= i + right
    if attention_chunk:
        keep &= i // attention_chunk == j // attention_chunk
    return keep


def modified_scores(
    s: Tensor,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk: int = 0,
) -> Tensor:
    """Apply the options to the scaled scores (batch, heads, seqlen_q, seqlen_k), in their dtype; -inf hides a key."""
    seqlen_q, seqlen_k = s.shape[-2:]
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
        # no gradient passes through a score that is filled; for a row without any key, the derivative of logsumexp is NaN
        s = (s if mask.dtype == torch.bool else s + mask.to(s.dtype)).masked_fill(hidden, float("-inf"))
    if alibi_slopes is not None:
        i, j = positions(seqlen_q, seqlen_k, s.device)
        slopes = alibi_slopes.to(torch.promote_types(s.dtype, alibi_slopes.dtype))
        s = s - (slopes[..., None, None] * (i - j).abs()).to(s.dtype)
    return s.masked_fill(~visible_keys(seqlen_q, seqlen_k, window_size, s.device, attention_chunk), float("-inf"))


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """q (batch, seqlen_q, heads, head_dim), k and v with num_kv_heads -> out (batch, seqlen_q, heads, head_dim_v) and lse
    (batch, heads, seqlen_q), both in the dtype of the computation.

    options: as `modified_scores` takes them
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    s = modified_scores(softmax_scale * (q @ k.transpose(-1, -2)), **options)
    lse = torch.logsumexp(s, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[None, :, None].expand_as(lse))
    # a row that sees no key has lse -inf and P = exp(-inf - -inf), which is defined to be 0
    p = torch.exp(s - lse[..., None]).masked_fill(s == float("-inf"), 0.0)
    # Some masks hide keys with finfo.min instead of -inf. In a row of nothing but finfo.min, the logarithm of the sum is too
    # small to change lse, so P is 1 for each key; the division makes the output the mean of the values.
    p = p / p.sum(dim=-1, keepdim=True).round().clamp(min=1.0)
    return (p @ v).transpose(1, 2), lse


_COMPUTED = frozenset({"softcap", "sinks", "alibi", "attention_chunk", "block_mask"})


class ReferenceBackend:
    """The oracle as a backend, chosen only by name. It serves every spec."""

    name = "reference"
    mixed_rows: int | None = None
    differentiable = True

    def supports(self, spec: AttentionSpec) -> str | None:
        options = spec.options_beyond(_COMPUTED)
        return f"does not support {options}, which the call uses" if options else None

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions | None) -> Run:
        if spec.op == "store_kv":
            return store_kv_reference
        assert options is not None
        if spec.op == "backward":
            return plan_recomputed(partial(_ATTENTION[spec.layout], replace(options, return_lse=True)))
        return partial(_ATTENTION[spec.layout], options)


def _attend(
    options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor, t: AttentionTensors, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    mask = t.mask if t.blocks is None else t.blocks.expanded(q.shape[1], k.shape[1], q.shape[2])
    return attention_reference(
        q,
        k,
        v,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=options.softcap,
        sinks=t.sinks,
        mask=mask,
        alibi_slopes=slopes,
        attention_chunk=options.attention_chunk,
    )


def _dense(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    result, lse = _attend(options, t.q, t.k, t.v, t, t.alibi_slopes)
    return _deliver(result, t), lse if options.return_lse else None


def _varlen(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    assert t.keys is not None
    sequences = [(t.k[a:b], t.v[a:b]) for a, b in itertools.pairwise(t.keys.tolist())]
    return _each_sequence(options, t, sequences)


def _paged(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    assert t.keys is not None
    assert t.block_table is not None
    page_size = t.k.shape[1]
    dtype = torch.promote_types(t.q.dtype, torch.float32)
    sequences = []
    for pages, length in zip(t.block_table.tolist(), t.keys.tolist(), strict=True):
        used = torch.tensor(pages[: -(-length // page_size)], dtype=torch.long, device=t.q.device)
        k, v = (cache[used].flatten(0, 1)[:length].to(dtype) for cache in (t.k, t.v))
        if t.k_descale is not None and t.v_descale is not None:
            k = k * t.k_descale.to(dtype)[None, :, None]
            v = v * t.v_descale.to(dtype)[None, :, None]
        sequences.append((k, v))
    return _each_sequence(options, t, sequences)


_ATTENTION = {"dense": _dense, "varlen": _varlen, "paged": _paged}


def _each_sequence(
    options: AttentionOptions, t: AttentionTensors, sequences: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed queries, each sequence with its keys and values (seqlen_k, heads, dim)."""
    assert t.cu_seqlens_q is not None
    dtype = torch.promote_types(t.q.dtype, torch.float32)
    result = torch.zeros(*t.q.shape[:2], t.v.shape[-1], dtype=dtype, device=t.q.device)
    lse = torch.full((t.q.shape[1], t.q.shape[0]), float("-inf"), dtype=dtype, device=t.q.device)
    ends = itertools.pairwise(t.cu_seqlens_q.tolist())
    for index, ((a, b), (k, v)) in enumerate(zip(ends, sequences, strict=True)):
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        own = t if t.blocks is None else t._replace(blocks=t.blocks.of_sequence(index))
        o, sequence_lse = _attend(options, t.q[a:b][None], k[None], v[None], own, slopes)
        result[a:b] = o[0]
        lse[:, a:b] = sequence_lse[0]
    return _deliver(result, t), lse if options.return_lse else None


def _deliver(result: Tensor, t: AttentionTensors) -> Tensor:
    return result.to(t.q.dtype) if t.out is None else t.out.copy_(result)


def store_kv_reference(tensors: StoreTensors) -> None:
    """Write each token's keys and values to its slot, as `fa_serve.store_kv` defines it."""
    k = tensors.k
    v = tensors.v
    k_cache = tensors.k_cache
    v_cache = tensors.v_cache
    k_descale = tensors.k_descale
    page_size = k_cache.shape[1]
    for token, slot in enumerate(tensors.slot_mapping.tolist()):
        if slot < 0:
            continue
        for x, cache, descale in ((k, k_cache, k_descale), (v, v_cache, tensors.v_descale)):
            row = x[token] if descale is None else x[token].float() / descale[:, None]
            if cache.dtype == torch.float8_e4m3fn:
                row = row.float().clamp(-448, 448)
            cache[slot // page_size, slot % page_size] = row.to(cache.dtype)
