"""The kernels that choose keys: the scores of an indexer over a paged cache, and the slots of the best keys.

The heads of a query are the rows of a product with a block of keys. The weighted sum of the positive products over the rows is
the score of a key. `torch.topk` then chooses the best keys, for some queries at a time, so that at most MAX_SCORES scores are
held. If no sequence has more than `topk` keys, all keys up to a query's own are chosen and nothing is scored.

Products are computed in the dtype of the queries and summed in float32. Left out: products in float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS

MAX_SCORES = 1 << 26
"""The most scores that are held at a time, unless one query has more: 256 MiB of float32."""
SCORED_KEYS = 512
"""Keys that a program of `_index_scores` scores."""


@dataclass(frozen=True, slots=True)
class ScoreVariant:
    """What `_index_scores` is compiled for.

    heads, dim: heads of the indexer, and numbers of a head; block_h, block_d: the same, padded to a tile
    block_n:    keys of a product; blocks: products of a program
    batch:      a power of two, at least the number of sequences
    precision:  input precision of the products
    """

    heads: int
    dim: int
    block_h: int
    block_d: int
    block_n: int
    blocks: int
    batch: int
    precision: str
    pdl: bool


class QueryStrides(NamedTuple):
    """Strides of the queries (total, heads, dim), without the last one, which is 1."""

    token: int
    head: int


class IndexStrides(NamedTuple):
    """Strides of the cache (num_pages, page_size, 1, dim) by page and token; the last one is 1."""

    page: int
    token: int


@triton.jit
def _place_of(token, cu_q_ptr, used_k_ptr, batch, BATCH: tl.constexpr):
    """-> the sequence of a packed query and its position; `batch` and -1 for a row past the last sequence."""
    index = tl.arange(0, BATCH)
    live = index < batch
    ends = tl.load(cu_q_ptr + index + 1, mask=live, other=2147483647)
    seq = tl.sum((ends <= token).to(tl.int32), 0)
    owned = seq < batch
    end = tl.load(cu_q_ptr + tl.where(owned, seq + 1, 0))
    used = tl.load(used_k_ptr + tl.where(owned, seq, 0), mask=batch > 0, other=0)
    return seq, tl.where(owned, used - end + token, -1)


@triton.jit(do_not_specialize=["first", "batch", "max_k", "units", "page_size", "stride_table"])
def _index_scores(
    q_ptr,
    k_ptr,
    weights_ptr,
    scores_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    first,
    batch,
    max_k,
    units,
    page_size,
    stride_table,
    q_strides,
    k_strides,
    VAR: tl.constexpr,
):
    """One program: one query, and up to SCORED_KEYS keys of its sequence. first: the query whose scores are row 0"""
    wait_for_previous_kernel(VAR.pdl)
    row = tl.program_id(0) // units
    unit = tl.program_id(0) % units
    token = first + row
    seq, position = _place_of(token, cu_q_ptr, used_k_ptr, batch, VAR.batch)
    heads = tl.arange(0, VAR.block_h)
    offs_d = tl.arange(0, VAR.block_d)
    offs_n = tl.arange(0, VAR.block_n)
    in_heads = heads < VAR.heads
    in_dim = offs_d < VAR.dim
    q_ptrs = q_ptr + token.to(tl.int64) * q_strides.token + heads[:, None] * q_strides.head + offs_d[None, :]
    q = tl.load(q_ptrs, mask=in_heads[:, None] & in_dim[None, :], other=0.0)
    weight = tl.load(weights_ptr + token.to(tl.int64) * VAR.heads + heads, mask=in_heads, other=0.0)
    table_ptr += seq.to(tl.int64) * stride_table
    scores_ptr += row.to(tl.int64) * max_k
    for block in tl.range(0, VAR.blocks):
        cols = (unit * VAR.blocks + block) * VAR.block_n + offs_n
        seen = cols <= position
        page = tl.load(table_ptr + cols // page_size, mask=seen, other=0)
        k_ptrs = k_ptr + page.to(tl.int64) * k_strides.page + cols % page_size * k_strides.token
        k = tl.load(k_ptrs[:, None] + offs_d[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision=VAR.precision)
        score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        tl.store(scores_ptr + cols, tl.where(seen, score, float("-inf")), mask=cols < max_k)


@triton.jit(do_not_specialize=["first", "batch", "topk", "page_size", "stride_table"])
def _slots_of_keys(
    slots_ptr,
    best_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    first,
    batch,
    topk,
    page_size,
    stride_table,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the slots of one query. best_ptr: (queries, topk), places in the sequence; None for all keys."""
    wait_for_previous_kernel(PDL)
    token = first + tl.program_id(0)
    seq, position = _place_of(token, cu_q_ptr, used_k_ptr, batch, BATCH)
    table_ptr += seq.to(tl.int64) * stride_table
    for begin in tl.range(0, topk, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < topk
        place = index
        if best_ptr is not None:
            row = tl.program_id(0).to(tl.int64)
            place = tl.load(best_ptr + row * topk + index, mask=inside, other=0).to(tl.int32)
        seen = inside & (place <= position)
        page = tl.load(table_ptr + place // page_size, mask=seen, other=0)
        slot = tl.where(seen, page * page_size + place % page_size, -1)
        tl.store(slots_ptr + token.to(tl.int64) * topk + index, slot.to(tl.int32), mask=inside)


def launch_select_slots(
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
    """Arguments and result are those of `fa_serve.ops.select_slots`."""
    total = len(q)
    width = min(topk, max_seqlen_k)
    slots = torch.empty(total, width, dtype=torch.int32, device=q.device)
    if total == 0 or width == 0:
        return slots
    where = (block_table, seqused_k, cu_seqlens_q)
    if max_seqlen_k <= topk:
        _send_slots(slots, None, where, keys, 0, total)
        return slots
    q, keys = with_unit_stride(q), with_unit_stride(keys)
    weights = weights.float().contiguous()
    rows = max(1, MAX_SCORES // max_seqlen_k)
    for first in range(0, total, rows):
        count = min(rows, total - first)
        scores = torch.empty(count, max_seqlen_k, dtype=torch.float32, device=q.device)
        _score((q, keys, weights, scores, *where), first, count)
        _send_slots(slots, scores.topk(width, dim=-1, sorted=False).indices, where, keys, first, count)
    return slots


def _score(tensors: tuple[Tensor, ...], first: int, count: int) -> None:
    q, keys, _, scores, block_table = tensors[:5]
    shapes = [(x.shape, x.stride(), x.dtype) for x in (q, keys, scores, block_table)]
    key = ("index_scores", *shapes, count, *[x.dtype for x in tensors], q.get_device())
    run = PLANS.get(key)
    if run is None:
        _, heads, dim = q.shape
        max_k = scores.shape[1]
        arch = spec.arch_of(q.device)
        pdl = spec.has_programmatic_launch(arch)
        wide = q.element_size() == 4 or arch == 0
        block_n = 32 if wide else 128
        variant = ScoreVariant(
            heads=heads,
            dim=dim,
            block_h=max(16, power_of_2(heads)),
            block_d=max(16, power_of_2(dim)),
            block_n=block_n,
            blocks=SCORED_KEYS // block_n,
            batch=power_of_2(len(block_table)),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
            pdl=pdl,
        )
        units = triton.cdiv(max_k, SCORED_KEYS)
        run = PLANS.add(
            key,
            Launch(
                _index_scores,
                count * units,
                varying=(len(block_table), max_k, units, keys.shape[1], block_table.stride(0)),
                fixed=(QueryStrides(*q.stride()[:2]), IndexStrides(*keys.stride()[:2]), variant),
                options={**launch_options(pdl, 4), "num_stages": 1 if wide else 2},
            ),
        )
    run(tensors, first)


def _send_slots(slots: Tensor, best: Tensor | None, where: tuple[Tensor, ...], keys: Tensor, first: int, count: int) -> None:
    table = where[0]
    key = (
        "slots_of_keys",
        slots.shape[1],
        best is None,
        table.shape,
        table.stride(0),
        keys.shape[1],
        count,
        slots.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        pdl = spec.has_programmatic_launch(spec.arch_of(slots.device))
        width = slots.shape[1]
        run = PLANS.add(
            key,
            Launch(
                _slots_of_keys,
                count,
                varying=(len(table), width, keys.shape[1], table.stride(0)),
                fixed=(min(1024, power_of_2(width)), power_of_2(len(table)), pdl),
                options=launch_options(pdl, 4),
            ),
        )
    run((slots, best, *where), first)
