"""Token-sparse attention in plain PyTorch, on any device. It computes in float32, or in float64 for float64 input."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_GATHERED = 1 << 22
"""How many numbers of keys are gathered at once: 16 MiB in float32."""


def torch_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, sinks: Tensor | None, softmax_scale: float, num_splits: int
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.sparse_attention`."""
    keys, values = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    rows = max(1, _GATHERED // max(slots.shape[1] * keys[0].numel(), 1))
    pieces = zip(torch.split(q, rows), torch.split(slots, rows), strict=True)
    outputs = [_attend(*piece, keys, values, sinks, softmax_scale) for piece in pieces]
    return torch.cat(outputs) if outputs else q.new_zeros(*q.shape[:2], v.shape[3])


def _attend(q: Tensor, slots: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, softmax_scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    chosen = slots >= 0
    index = slots.long().clamp(min=0)
    heads = (len(q), keys.shape[1], q.shape[1] // keys.shape[1])
    grouped = q.to(dtype).view(*heads, q.shape[2])
    # what is not chosen may hold anything, and 0 * NaN is NaN
    k, v = (x[index].to(dtype).masked_fill(~chosen[..., None, None], 0.0) for x in (keys, values))
    scores = torch.einsum("tkgd,tnkd->tkgn", grouped, k) * softmax_scale
    # nothing is hidden from a query without keys: softmax over -inf only is NaN, also in its gradients
    hidden = ~chosen & chosen.any(1, keepdim=True)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).view(1, *heads[1:], 1).expand(*heads, 1)], dim=-1)
    p = torch.softmax(scores, dim=-1)[..., : slots.shape[1]].masked_fill(~chosen[:, None, None], 0.0)
    return torch.einsum("tkgn,tnkd->tkgd", p, v).reshape(*q.shape[:2], values.shape[2]).to(q.dtype)


def torch_select_slots(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    topk: int,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.select_slots`. It reads the lengths on the host."""
    page_size = keys.shape[1]
    slots = torch.full((len(q), min(topk, max_seqlen_k)), -1, dtype=torch.int32, device=q.device)
    ends = cu_seqlens_q.tolist()
    for sequence, ((first, last), length) in enumerate(zip(itertools.pairwise(ends), seqused_k.tolist(), strict=True)):
        if first == last:
            continue
        places = torch.arange(length, device=q.device)
        held = block_table[sequence, places // page_size].long() * page_size + places % page_size
        scores = index_scores(q[first:last], keys.reshape(-1, keys.shape[-1])[held], weights[first:last])
        best = scores.topk(min(topk, length), dim=-1)
        chosen = held[best.indices].masked_fill(best.values == float("-inf"), -1)
        slots[first:last, : chosen.shape[1]] = chosen.to(torch.int32)
    return slots


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The scores of an indexer for the last queries of a sequence, -inf for the keys after a query.

    q: (queries, heads, dim); keys: (length, dim), all of the sequence; weights: (queries, heads) float32

    Returns (queries, length) float32.
    """
    products = torch.relu(q.float() @ keys.float().t())
    scores = (weights.float()[:, None] @ products)[:, 0]
    places = torch.arange(len(keys), device=q.device)
    return scores.masked_fill(places > places[len(keys) - len(q) :, None], float("-inf"))
