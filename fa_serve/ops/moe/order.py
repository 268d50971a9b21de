"""Pairs before and after the products of experts: they are sorted by expert, listed in tiles, and summed in the end.

A *pair* is one token at one of its experts; pair p belongs to token p // top_k. `_sort_pairs` puts the pairs in the order of
their experts, `_list_tiles` lists tiles for kernels that do not find them by themselves, and `_sum_experts` adds the pairs of
each token. No kernel uses atomics, and nothing is read back to the host. A number that belongs to no expert adds nothing;
expert parallelism uses such numbers for the experts of another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.ops.products.problem import Product

SORT_BLOCKS = (1024, 8192)
"""Pairs that a program of the sort reads at once: the first number for up to four times as many pairs, the second for more."""
SHORT_IDS = torch.int16
"""The dtype in which the sort reads the experts of many pairs. One program for each expert reads all pairs twice, so with 512
experts and 81,920 pairs (a step of 8,192 tokens) a layer reads 671 MB of int64 from the L2 cache, or 168 MB of int16."""
SUM_BLOCK = 1024


class Places(NamedTuple):
    """Where the pairs of each expert are: what `_sort_pairs` and `_list_tiles` write.

    order:  (pairs,) int32, the pair in each place
    starts: (num_experts + 1,) int32, where each expert begins in `order`, and where the last one ends
    tiles:  (tiles, 3) int32, or None if no product needs them
    """

    order: Tensor
    starts: Tensor
    tiles: Tensor | None


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs(index_ptr, order_ptr, starts_ptr, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program e writes the pairs of expert e in ascending order, after those of the experts before e.

    order:  (pairs,) int32
    starts: (num_experts + 1,) int32, where each expert begins in `order`, and where the last one ends
    """
    wait_for_previous_kernel(PDL)
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        ids = tl.load(index_ptr + start + lanes, mask=start + lanes < pairs, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    position = tl.sum(before, 0)
    tl.store(starts_ptr + expert, position)
    for start in tl.range(0, pairs, BLOCK):
        ids = tl.load(index_ptr + start + lanes, mask=start + lanes < pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + position + tl.cumsum(mine, 0) - 1, start + lanes, mask=mine > 0)
        position += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, position)


@triton.jit
def find_pair_tile(starts_ptr, tile, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, the first of its rows, and the end of that expert's rows. The expert is NUM_EXPERTS if there is no
    such tile."""
    experts = tl.arange(0, BLOCK_E)
    known = experts < NUM_EXPERTS
    begins = tl.load(starts_ptr + experts, mask=known, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=known, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (last <= tile)).to(tl.int32), 0)
    mine = experts == expert
    row = tl.sum(tl.where(mine, begins + (tile - last + tiles) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _list_tiles(
    starts_ptr, tiles_ptr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr
):
    """Program i writes what `find_pair_tile` finds for tile i: (tiles, 3) int32. A tile that does not exist has no rows."""
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    expert, first, end = find_pair_tile(starts_ptr, tile, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    tl.store(tiles_ptr + 3 * tile, expert)
    tl.store(tiles_ptr + 3 * tile + 1, first)
    tl.store(tiles_ptr + 3 * tile + 2, end)


@triton.jit
def _sum_experts(
    parts_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK elements of one token, as the sum of its pairs in the order in which the router gave them."""
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(N, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(index_ptr + pair)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        part = tl.load(parts_ptr + pair * N + columns, mask=(columns < N) & known, other=0.0).to(tl.float32)
        acc += tl.where(known, tl.load(weights_ptr + pair).to(tl.float32), 0.0) * part
    tl.store(out_ptr + token * N + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < N)


ExpertProduct = Callable[..., None]
"""The plan of one product of many pairs: a function of x, the weights of all experts, their biases, the places of pairs and the
tensor for the result. A gated product reads a row of x for each token and writes a row for each place; the other product reads
a row for each place and writes a row for each pair. The gated product of the kernel `grouped` also takes a tensor for the
values before the gate, see `OpsBackend.experts`."""


def plan_sort(product: Product) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Maps the router's choice, (tokens, top_k), to the order of pairs and where each expert begins in it. One launch."""
    pairs = product.pairs
    num_experts = product.num_experts
    few, many = SORT_BLOCKS
    has_many = pairs > 4 * few
    pdl = product.is_programmatic
    launch = Launch(
        _sort_pairs,
        num_experts,
        varying=(pairs,),
        fixed=(many if has_many else few, pdl),
        options=launch_options(pdl, 8),
    )

    def sort(index: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.empty(pairs, dtype=torch.int32, device=index.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=index.device)
        # a number of no expert may become one of an expert, whose product computes the pair then; the sum leaves it out
        ids = index.to(SHORT_IDS) if has_many else index
        launch((ids, order, starts))
        return order, starts

    return sort


def most_tiles(product: Product, block_m: int) -> int:
    """The most tiles of pairs that any routing may need: each expert that is taken wastes less than one tile."""
    return (product.pairs + (block_m - 1) * min(product.num_experts, product.pairs)) // block_m


def plan_list(product: Product, block_m: int) -> Callable[[Tensor], Tensor]:
    """Lists the tiles of up to block_m pairs of one expert, from where each expert begins. One launch."""
    count = most_tiles(product, block_m)
    pdl = product.is_programmatic
    fixed = (product.num_experts, power_of_2(product.num_experts), block_m, pdl)
    launch = Launch(_list_tiles, count, varying=(), fixed=fixed, options=launch_options(pdl, 1))

    def list_tiles(starts: Tensor) -> Tensor:
        tiles = torch.empty(count, 3, dtype=torch.int32, device=starts.device)
        launch((starts, tiles))
        return tiles

    return list_tiles


def plan_total(product: Product) -> Launch:
    """The launch on (results of pairs, router's choice, router's weights, out) that adds the pairs of each token.

    product: the second one, whose outputs are summed
    """
    n = product.outputs
    block = min(SUM_BLOCK, power_of_2(n))
    pdl = product.is_programmatic
    return Launch(
        _sum_experts,
        product.tokens * triton.cdiv(n, block),
        varying=(),
        fixed=(product.num_experts, n, product.top_k, block, pdl),
        options=launch_options(pdl, 4),
    )
