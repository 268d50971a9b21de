"""The table of tiles for calls whose keys may be split: the device cuts the keys of each sequence by the lengths there.

A share is the number of key blocks of all tiles, divided by the number of thread blocks that run at once. The keys of a
sequence are cut into as many splits as it has shares, to the nearest number, so that no thread block has much more than a
share: at least 1 split, at most `max_splits`, and none much shorter than `min_blocks`. A sequence of slightly more than a share
stays whole, because combining has a cost. So does a sequence of up to 5/4 of the key blocks that a multiprocessor gets: the
thread blocks of a multiprocessor share its bandwidth, so more of them are not faster. On one H100, 4 queries in each of 32
sequences of 4096 keys (64/8 heads of 64) take 119 us in two splits and 101 us whole.

Chunks of prompts whose sequences visit equally many blocks, such as a single chunk, are cut `by_waves`: their tiles are equally
long, so the thread blocks compute them in waves, and the last wave may be nearly empty. With 48 tiles and 132 thread blocks, 3
splits take two waves of a third of the blocks each, and 2 splits one wave of a half.

Records have the form of `forward.tile_scheduler`, but the second number is splits * SPLIT_BASE + split. They are in the order
of sequences, because they are about equally long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.backends.hopper.forward.tile_scheduler import (
    OUTPUT,
    SEQUENCES_AT_A_TIME,
    PackedOutput,
    ceil_div_up_to_zero,
    clear_tail,
    sequence_bounds,
)
from fa_serve.backends.hopper.split_kv.split import SPLIT_BASE
from fa_serve.launching.launch import Launch


@triton.jit
def _blocks_of_tile(
    m, q_len, kv_len, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """-> the first key block that a row of tile m sees, and the one after the last; at least one block."""
    reach = kv_len
    if HAS_RIGHT:
        reach = tl.minimum(reach, (m + 1) * BLOCK_M + kv_len - q_len + right)
    high = tl.maximum(ceil_div_up_to_zero(reach, BLOCK_N), 1)
    low = high * 0
    if HAS_LEFT:
        low = tl.minimum(tl.maximum(m * BLOCK_M + kv_len - q_len - left, 0) // BLOCK_N, high - 1)
    return low, high


@triton.jit
def _cut_by_waves(tiles, blocks, resident, max_splits, min_blocks, MOST: tl.constexpr):
    """Into how many splits each of so many tiles of `blocks` key blocks is cut, so that the waves of thread blocks end soonest.

    The start and the end of a thread block cost about as much as three blocks, and combining as two. `table_capacity` has room
    for 4 splits more than tiles for each thread block.
    """
    cut = 1 + tl.arange(0, MOST)
    waves = (tiles * cut + resident - 1) // resident
    cost = waves * ((blocks + cut - 1) // cut + 3) + tl.where(cut > 1, 2, 0)
    fits = (cut <= max_splits) & (cut * min_blocks <= blocks) & (tiles * (cut - 1) <= 4 * resident)
    return 1 + tl.argmin(tl.where(fits | (cut == 1), cost, 1 << 30), 0)


@triton.jit(
    do_not_specialize=[
        "capacity",
        "batch",
        "skip_q",
        "left",
        "right",
        "tile_heads",
        "processors",
        "resident",
        "max_splits",
        "min_blocks",
        "by_waves",
        *OUTPUT,
    ]
)
def _split_table(
    table_ptr,
    cu_q_ptr,
    k_ptr,
    out_ptr,
    lse_ptr,
    capacity,
    batch,
    skip_q,
    left,
    right,
    tile_heads,
    processors,
    resident,
    max_splits,
    min_blocks,
    by_waves,
    total_q,
    num_heads,
    stride_lse,
    stride_token,
    stride_head,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per record finds its sequence, its rows and its split of the keys.

    All programs clear the rows past the last sequence, and those from `capacity` on write nothing else.
    """
    index = tl.program_id(0)
    output = (total_q, num_heads, stride_lse, stride_token, stride_head)
    clear_tail(out_ptr, lse_ptr, cu_q_ptr, batch, skip_q, output, DIM_V, BLOCK_DV)
    total = 0
    count = 0
    longest = 0
    shortest = 1 << 30
    for start in range(0, batch, CHUNK):
        b = start + tl.arange(0, CHUNK)
        _, ql, _, kl = sequence_bounds(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED, 1)
        tiles = ceil_div_up_to_zero(ql, BLOCK_M)
        low, high = _blocks_of_tile(tl.maximum(tiles - 1, 0), ql, kl, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        total += tl.sum(tiles * (high - low), 0)
        count += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, high - low, 0), 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(tiles > 0, high - low, 1 << 30), 0))
    share = tl.maximum((total * tile_heads + resident - 1) // resident, min_blocks)
    whole = 5 * ((total * tile_heads + processors - 1) // processors) // 4
    even = (by_waves != 0) & (longest == shortest)
    cut_of_all = _cut_by_waves(count * tile_heads, longest, resident, max_splits, min_blocks, SPLIT_BASE)
    before = 0
    sequence = 0
    place = 0
    splits = 0
    q_start = 0
    q_len = 0
    k_start = 0
    kv_len = 0
    for start in range(0, batch, CHUNK):
        b = start + tl.arange(0, CHUNK)
        q0, ql, k0, kl = sequence_bounds(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED, 1)
        tiles = ceil_div_up_to_zero(ql, BLOCK_M)
        low, high = _blocks_of_tile(tl.maximum(tiles - 1, 0), ql, kl, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        blocks = high - low
        cut = tl.minimum(tl.maximum((2 * blocks + share) // (2 * share), 1), max_splits)
        cut = tl.where(blocks <= whole, 1, cut)
        cut = tl.where(even, cut_of_all, cut)
        last = before + tl.cumsum(tiles * cut, 0)
        mine = (last > index) & (last - tiles * cut <= index)
        sequence += tl.sum(tl.where(mine, b, 0), 0)
        place += tl.sum(tl.where(mine, index - (last - tiles * cut), 0), 0)
        splits += tl.sum(tl.where(mine, cut, 0), 0)
        q_start += tl.sum(tl.where(mine, q0, 0), 0)
        q_len += tl.sum(tl.where(mine, ql, 0), 0)
        k_start += tl.sum(tl.where(mine, k0, 0), 0)
        kv_len += tl.sum(tl.where(mine, kl, 0), 0)
        before += tl.sum(tiles * cut, 0)
    if index == 0:
        tl.store(table_ptr + capacity * 8, 0)
        tl.store(table_ptr + capacity * 8 + 1, before)
    record = table_ptr + index.to(tl.int64) * 8
    if index >= before:
        tl.store(record, -1, mask=index < capacity)
    else:
        m = place // splits
        split = place % splits
        low, high = _blocks_of_tile(m, q_len, kv_len, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        begin = low + (high - low) * split // splits
        end = low + (high - low) * (split + 1) // splits
        # A tile may see fewer blocks than its sequence has splits. An empty split visits one block that is wholly masked.
        empty = begin == end
        tl.store(record, m * BLOCK_M)
        tl.store(record + 1, splits * SPLIT_BASE + split)
        tl.store(record + 2, q_start)
        tl.store(record + 3, q_len)
        tl.store(record + 4, k_start)
        tl.store(record + 5, tl.where(empty, 0, kv_len))
        tl.store(record + 6, tl.where(empty, high - 1, begin))
        tl.store(record + 7, tl.where(empty, high, end))


def split_table_launch(
    capacity: int,
    batch: int,
    window_size: tuple[int, int],
    queries: int,
    block_n: int,
    skip_q: int,
    paged: bool,
    output: PackedOutput,
    *,
    tile_heads: int,
    processors: int,
    resident: int,
    max_splits: int,
    min_blocks: int,
    by_waves: bool = False,
) -> Launch:
    """The launch of `_split_table`, for `tile_scheduler.tile_table`.

    capacity:  records that the table has room for, see `table_capacity`
    tile_heads: heads that have separate tiles
    processors: multiprocessors of the GPU; resident: thread blocks that run on them at once
    by_waves:  tiles of equal sequences are cut so that the waves of thread blocks end soonest
    """
    left, right = window_size
    cutting = (tile_heads, processors, resident, max_splits, min_blocks, int(by_waves))
    numbers = (capacity, batch, skip_q, left, right, *cutting, *output.numbers)
    fixed = (*output.widths, queries, block_n, left >= 0, right >= 0, paged, SEQUENCES_AT_A_TIME)
    return Launch(_split_table, output.programs(capacity), numbers, fixed, {"num_warps": 1}, strides=output.strides)


def table_capacity(max_tiles: int, num_heads: int, resident: int, max_splits: int, *, by_waves: bool = False) -> int:
    """An upper bound of the records of one head.

    A sequence with n > 1 splits has at least n - 1/2 shares for each tile, so its splits are at most 4/3 of its shares, and all
    shares of a head are at most resident / num_heads. `_cut_by_waves` makes at most 4 * resident splits more than tiles.
    """
    more = 4 * resident // num_heads if by_waves else 4 * resident // (3 * num_heads)
    return min(max_tiles * max_splits, max_tiles + more + 1)
