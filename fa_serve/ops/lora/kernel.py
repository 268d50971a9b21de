"""The kernels of adapters: two launches for a product, whatever the number of adapters in a step.

`_shrink` multiplies the rows of a tile by one page of ranks of A. Several programs share the columns of x, because one program
for each of a few tiles would leave most of a GPU idle. `_expand` adds these partial sums, always in the same order, applies the
scale, and multiplies the result by some columns of the pages of B. Rows are gathered by number, and each row has one adapter,
so nothing is added atomically: equal calls have equal bits.

A CUDA graph has room for a tile of each sequence, in addition to the tiles that its prompts fill, in case every sequence has a
different adapter. In most steps these additional tiles are empty. So a program computes every `lanes`-th tile until it finds
an empty one. The number of programs can then follow what a step usually has, and so can the number of ranges into which the
columns of x are split.

With a norm, `_shrink` sums the squares of x as well, and `_expand` divides by their root mean square, so that one token needs
no separate launch for its norm. On Hopper and later GPUs both are launched programmatically, see
`primitives.wait_for_previous_kernel`. Left out: rows without an adapter, which no program reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_if_needed
from fa_serve.launching.launch import Launch, launch_options, multiprocessors
from fa_serve.launching.plans import PLANS, Run
from fa_serve.ops.lora.problem import PAGE_RANKS, SMALL_TILE_ROWS, LoraBatch, LoraWeights
from fa_serve.ops.ops_backend import Norm

MAX_PARTS = 4
"""Parts of a merged product: q, k and v, or the inputs of a gated delta net."""


TILE_LANES = 32
"""The most programs that share small tiles, or share large tiles in addition to one program for each full tile. A program with
several tiles waits for memory in each of them."""
USUAL_TILES = 8
"""How many small tiles are usually not empty. The number of splits of the columns of x is chosen for this many."""
MOST_PROGRAMS = 2048
"""About the most programs of `_expand`, unless each full tile needs one. Most of them find nothing to do."""


class LoraTile(NamedTuple):
    """lanes: programs that share the tiles of `_shrink`; block_k: columns of x that one iteration of it multiplies; splits:
    programs that share the columns of x; block_n: columns of y that a program of `_expand` computes."""

    lanes: int
    block_k: int
    splits: int
    block_n: int


def choose_lora_tile(k: int, total: int, block_rows: int, num_tiles: int, parts: int, num_sms: int) -> LoraTile:
    """The tile for `total` rows of k columns, in tiles of block_rows.

    num_tiles: with the empty ones; parts: programs of `_shrink` for each tile of rows, without splits

    The number of splits is the smallest power of two that gives every multiprocessor a program, but at most 16. A split has at
    least 512 columns. With large tiles it has at least 1024, because `_expand` reads the sums of every split for every row.
    """
    is_small = block_rows <= SMALL_TILE_ROWS
    full = full_tiles(total, block_rows)
    programs = min(num_tiles, USUAL_TILES if is_small else full + 1) * parts
    least = 512 if is_small else 1024
    splits = 1
    while splits < 16 and programs * splits < num_sms and k // (2 * splits) >= least:
        splits *= 2
    columns = 128 if is_small else 64
    return LoraTile(min(num_tiles, full + TILE_LANES), columns, splits, columns)


def full_tiles(total: int, block_rows: int) -> int:
    """How many large tiles `total` rows fill. Small tiles are of steps in which few of them are full: 0."""
    return 0 if block_rows <= SMALL_TILE_ROWS else total // block_rows


def expanding_lanes(tile: LoraTile, total: int, block_rows: int, blocks: int) -> int:
    """How many programs of `_expand` share the tiles of a step. blocks: programs for each tile"""
    usual = full_tiles(total, block_rows) + USUAL_TILES
    return max(min(tile.lanes, MOST_PROGRAMS // blocks), min(tile.lanes, usual))


@triton.jit
def _rows_with_adapter(tiles_ptr, tile, num_tiles):
    """How many rows a tile has; 0 past the last tile, for padding, and for rows without an adapter, whose tiles come last."""
    exists = tile < num_tiles
    slot = tl.load(tiles_ptr + 3 * tile, mask=exists, other=-1)
    return tl.where(slot < 0, 0, tl.load(tiles_ptr + 3 * tile + 2, mask=exists, other=0))


@triton.constexpr_function
def num_blocks(n0: int, n1: int, n2: int, n3: int, block_n: int) -> int:
    """The number of blocks of block_n columns. A block lies within one part."""
    return sum(-(-width // block_n) for width in (n0, n1, n2, n3))


@triton.jit
def part_of_block(block, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part that a block of BLOCK_N columns belongs to, the first column of the block, and where the part ends."""
    T0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    T2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    part = (block >= T0).to(tl.int32) + (block >= T0 + T1).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    end = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N0 + N1 + N2))
    before = tl.where(part == 0, 0, tl.where(part == 1, T0, T0 + T1))
    if N3 > 0:
        is_last = block >= T0 + T1 + T2
        part += is_last.to(tl.int32)
        begin = tl.where(is_last, N0 + N1 + N2, begin)
        end = tl.where(is_last, N0 + N1 + N2 + N3, end)
        before = tl.where(is_last, T0 + T1 + T2, before)
    return part, begin + (block - before) * BLOCK_N, end


@triton.jit(do_not_specialize=["total", "num_tiles", "lanes"])
def _shrink(
    x_ptr,
    a_ptr,
    norm_ptr,
    rows_ptr,
    tiles_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    sums_ptr,
    squares_ptr,
    total,
    num_tiles,
    lanes,
    offset,
    stride_x,
    stride_page,
    stride_slot,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write sums (SPLITS, PARTS, total, MAX_PAGES * PAGE): partial products of each row of x with A. With a norm, also write
    squares (SPLITS, total): partial sums of the squares of x."""
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    program = tl.program_id(0)
    split = program % SPLITS
    page = program // SPLITS % MAX_PAGES
    part = program // (SPLITS * MAX_PAGES) % PARTS
    tile = program // (SPLITS * MAX_PAGES * PARTS)
    count = _rows_with_adapter(tiles_ptr, tile, num_tiles)
    wait_if_needed(count > 0, PDL)
    while count > 0:
        slot = tl.load(tiles_ptr + 3 * tile)
        first = tl.load(tiles_ptr + 3 * tile + 1)
        used = page < tl.load(num_pages_ptr + slot)
        used = used & (tl.load(scales_ptr + slot * stride_slot + part) != 0.0)
        needed = used
        if norm_ptr is not None:
            needed = needed | ((page == 0) & (part == 0))
        if needed:
            i = tl.arange(0, BLOCK_ROWS)
            keep = i < count
            rows = tl.load(rows_ptr + first + i, mask=keep, other=0).to(tl.int64)
            ranks = tl.arange(0, PAGE)
            number = tl.load(pages_ptr + slot * MAX_PAGES + page, mask=used, other=0).to(tl.int64)
            a_page = a_ptr + number * stride_page + part * PAGE * K
            acc = tl.zeros([BLOCK_ROWS, PAGE], tl.float32)
            squares = tl.zeros([BLOCK_ROWS], tl.float32)
            for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
                k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                inside = k < K
                x = tl.load(x_ptr + rows[:, None] * stride_x + k[None, :], mask=keep[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_page + ranks[None, :] * K + k[:, None], mask=inside[:, None] & used, other=0.0)
                if norm_ptr is not None:
                    wide = x.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
                    weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32) + offset
                    x = (wide * weight[None, :]).to(x.dtype)
                acc += tl.dot(x, a, input_precision=PRECISION)
            places = (split * PARTS + part) * total + rows
            out = sums_ptr + places[:, None] * (MAX_PAGES * PAGE) + page * PAGE + ranks[None, :]
            tl.store(out, acc, mask=keep[:, None] & used)
            if norm_ptr is not None:
                tl.store(squares_ptr + split * total + rows, squares, mask=keep & (page == 0) & (part == 0))
        tile += lanes
        count = _rows_with_adapter(tiles_ptr, tile, num_tiles)


@triton.jit(do_not_specialize=["total", "num_tiles", "lanes"])
def _expand(
    y_ptr,
    b_ptr,
    bias_ptr,
    rows_ptr,
    tiles_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    ones_ptr,
    factors_ptr,
    sums_ptr,
    squares_ptr,
    total,
    num_tiles,
    lanes,
    eps,
    stride_y,
    stride_page,
    stride_slot,
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the adapter to BLOCK_N columns of a tile of rows. They lie within one part, of N0, N1, N2 or N3 columns."""
    N: tl.constexpr = N0 + N1 + N2 + N3
    BLOCKS: tl.constexpr = num_blocks(N0, N1, N2, N3, BLOCK_N)
    program = tl.program_id(0)
    tile = program // BLOCKS
    part, begin, end = part_of_block(program % BLOCKS, N0, N1, N2, N3, BLOCK_N)
    columns = begin + tl.arange(0, BLOCK_N)
    inside = columns < end
    count = _rows_with_adapter(tiles_ptr, tile, num_tiles)
    wait_if_needed(count > 0, PDL)
    while count > 0:
        slot = tl.load(tiles_ptr + 3 * tile)
        first = tl.load(tiles_ptr + 3 * tile + 1)
        scale = tl.load(scales_ptr + slot * stride_slot + part)
        if scale != 0.0:
            one = tl.load(ones_ptr + slot * stride_slot + part)
            factor = tl.load(factors_ptr + slot * stride_slot + part)
            i = tl.arange(0, BLOCK_ROWS)
            keep = i < count
            rows = tl.load(rows_ptr + first + i, mask=keep, other=0).to(tl.int64)
            root = tl.zeros([BLOCK_ROWS], tl.float32) + 1.0
            if squares_ptr is not None:
                squares = tl.zeros([BLOCK_ROWS], tl.float32)
                for split in tl.static_range(SPLITS):
                    squares += tl.load(squares_ptr + split * total + rows, mask=keep, other=0.0)
                root = tl.rsqrt(squares / K + eps)
            acc = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
            ranks = tl.arange(0, PAGE)
            # most adapters have one page, so loading the next page ahead would only cost registers
            for page in tl.range(0, tl.load(num_pages_ptr + slot), num_stages=1):
                number = tl.load(pages_ptr + slot * MAX_PAGES + page).to(tl.int64)
                u = tl.zeros([BLOCK_ROWS, PAGE], tl.float32)
                for split in tl.static_range(SPLITS):
                    places = (split * PARTS + part) * total + rows
                    sums = sums_ptr + places[:, None] * (MAX_PAGES * PAGE) + page * PAGE + ranks[None, :]
                    u += tl.load(sums, mask=keep[:, None], other=0.0)
                u = tl.where((page * PAGE + ranks == one)[None, :], 1.0, u * root[:, None]) * scale
                b_rows = b_ptr + number * stride_page + ranks[:, None] * N + columns[None, :]
                b = tl.load(b_rows, mask=inside[None, :], other=0.0)
                acc += tl.dot(u.to(b.dtype), b, input_precision=PRECISION)
            here = y_ptr + rows[:, None] * stride_y + columns[None, :]
            written = keep[:, None] & inside[None, :]
            y = tl.load(here, mask=written, other=0.0).to(tl.float32)
            if factor >= 0:
                number = tl.load(pages_ptr + slot * MAX_PAGES + factor // PAGE).to(tl.int64)
                row = b_ptr + number * stride_page + (factor % PAGE) * N + columns
                base = y
                if bias_ptr is not None:
                    base -= tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
                acc += base * tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
            tl.store(here, (y + acc).to(y_ptr.dtype.element_ty), mask=written)
        tile += lanes
        count = _rows_with_adapter(tiles_ptr, tile, num_tiles)


def part_widths(weights: LoraWeights) -> tuple[int, ...]:
    """The columns of each of MAX_PARTS parts, 0 for those that the product lacks. Raises ValueError for more parts."""
    missing = MAX_PARTS - len(weights.widths)
    if missing < 0:
        raise ValueError(f"a product with adapters has at most {MAX_PARTS} parts, got {len(weights.widths)}")
    return (*weights.widths, *[0] * missing)


def launch_add_lora(
    y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, norm: Norm | None, bias: Tensor | None
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.add_lora`. Two launches."""
    key = (
        "add_lora",
        y.shape,
        y.stride(0),
        x.stride(0),
        x.dtype,
        weights.a.shape,
        weights.a.stride(0),
        weights.b.stride(0),
        weights.scales.stride(0),
        weights.widths,
        batch.rows.shape,
        batch.tiles.shape,
        batch.pages.shape,
        batch.block_rows,
        None if norm is None else (norm.weight.dtype, norm.eps, norm.offset),
        None if bias is None else bias.dtype,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        if not len(batch.tiles) or not len(y):
            return y
        run = PLANS.add(key, plan_add_lora(y, x, weights, batch, norm))
    run((y, x, weights, batch, norm, bias))
    return y


def plan_add_lora(y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, norm: Norm | None) -> Run:
    """The launches for calls that look like this one."""
    num_tiles = len(batch.tiles)
    total, k = x.shape
    max_pages = batch.pages.shape[1]
    parts = len(weights.widths)
    widths = part_widths(weights)
    tile = choose_lora_tile(k, total, batch.block_rows, num_tiles, parts * max_pages, multiprocessors(x.device, 132))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    sizes = (parts, max_pages, PAGE_RANKS, tile.splits, batch.block_rows)
    options = launch_options(pdl, 4)
    shrink = Launch(
        _shrink,
        tile.lanes * parts * max_pages * tile.splits,
        varying=(total, num_tiles, tile.lanes, 0.0 if norm is None else float(norm.offset)),
        strides=(x.stride(0), weights.a.stride(0), weights.scales.stride(0)),
        fixed=(k, *sizes, tile.block_k, precision, pdl),
        options=options,
    )
    blocks = num_blocks(*widths, tile.block_n)
    lanes = expanding_lanes(tile, total, batch.block_rows, blocks)
    expand = Launch(
        _expand,
        lanes * blocks,
        varying=(total, num_tiles, lanes, 0.0 if norm is None else float(norm.eps)),
        strides=(y.stride(0), weights.b.stride(0), weights.scales.stride(0)),
        fixed=(k, *widths, *sizes, tile.block_n, precision, pdl),
        options=options,
    )

    def run(call: tuple[Tensor, Tensor, LoraWeights, LoraBatch, Norm | None, Tensor | None]) -> None:
        y, x, weights, batch, norm, bias = call
        sums = x.new_empty(tile.splits * parts * total * max_pages * PAGE_RANKS, dtype=torch.float32)
        squares = None if norm is None else x.new_empty(tile.splits * total, dtype=torch.float32)
        segments = (batch.rows, batch.tiles, batch.pages, batch.num_pages)
        shrink((x, weights.a, None if norm is None else norm.weight, *segments, weights.scales, sums, squares))
        numbers = (weights.scales, weights.ones, weights.factors)
        expand((y, weights.b, bias, *segments, *numbers, sums, squares))

    return run
