"""A product of few tokens with its adapters, in the two launches that the product and its gate take anyway.

    y = launch_product(x, weight, bias, weights, batch, activation, residual, alpha)

In such a product the pages of A act as additional rows of the weights, because both are multiplied with the same tokens. So one
launch multiplies both: a program has either block_n rows of the weights or block_n / PAGE_RANKS pages of A, over one range of
the columns, and stores its sums in float32. The second launch adds the sums of all ranges, always in the same order, multiplies
the sums of A by B, and does what follows the product: the bias, the gate, or the residual sum. Rows without an adapter need all
of this except the product with B.

This design was chosen because no program has to wait inside a launch: the end of the first launch is the barrier between A and
B. In a single launch, programs would wait for those that multiply by A, and each would have to compute whole sums. But products
with few rows of weights (the output projections) leave most multiprocessors idle unless their sums are split. cuBLAS takes two
launches for them, too.

A page of A is multiplied with all tokens of a step, but only the results for the tokens of its adapter are stored: what takes
time is reading A, not multiplying by it. The second launch has tiles of rows that share an adapter, as `kernel.py` has, and
reads each page of B once for a tile. It loads what does not depend on the first launch before that launch ends (programmatic
launch). Sums have a fixed order, so equal calls have equal bits. Left out: one token (row_product.py), and which products are
computed in this way (run.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel, wait_if_needed
from fa_serve.launching.launch import Launch, launch_options, multiprocessors
from fa_serve.launching.plans import PLANS, Run
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.lora.kernel import USUAL_TILES, num_blocks, part_of_block, part_widths
from fa_serve.ops.lora.problem import MOST_MERGED_TOKENS, PAGE_RANKS, LoraBatch, LoraWeights
from fa_serve.ops.products.row import store_product
from fa_serve.ops.products.row_invariant import sum_chain
from fa_serve.ops.products.tiles import choose_splits, segment_columns

WIDE_ARCHS = (90, 100, 103)
"""GPUs with 227 KiB of shared memory in a multiprocessor."""
FINISH_PROGRAMS = 1024
"""About the most programs of the second launch. Most of them find nothing to do if a step has few adapters. The products of a
layer of an 8B model with 64 tokens of one adapter took 159.3 us on one H200, and 161.6 us with 2048 programs."""


class ProductTile(NamedTuple):
    """block_m tokens by block_n rows of weights, block_k columns at a time. Programs share the columns in `splits` ranges.

    finish_n:  columns that a program of the second launch computes
    num_warps: warps of a program of the first launch
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    splits: int
    finish_n: int
    num_warps: int = 4


def choose_product_tile(tokens: int, n: int, k: int, itemsize: int, num_sms: int, arch: int) -> ProductTile:
    """The tile of a product of `tokens` rows with (n, k) weights of `itemsize` bytes each.

    Sums are split as long as the GPU holds all programs at the same time. On GPUs with enough shared memory, tiles are wide
    (128 rows of weights) if at least 90% of the multiprocessors still get one.
    """
    block_m = next(size for size in (16, 32, 64, MOST_MERGED_TOKENS) if size >= tokens)
    if itemsize == 4:
        return ProductTile(block_m, 32, 32, 2, 1, 64)
    stages = 3 if block_m == MOST_MERGED_TOKENS else 4
    # a program with 64 rows of weights reads as much of x as of them: 28672 x 4096 took 86 us on one H200, and 67 with cuBLAS
    splits = choose_splits(-(-n // 128), 3 * num_sms // 2, k, 256, most=8)
    if arch in WIDE_ARCHS and -(-n // 128) * splits >= num_sms * 9 // 10:
        return ProductTile(block_m, 128, 64, stages, splits, 64 if splits == 1 else 128)
    splits = choose_splits(-(-n // 64), 3 * num_sms, k, 256, most=8)
    return ProductTile(block_m, 64, 64, stages, splits, 128)


@triton.jit
def _pages_of_a(
    a_ptr, pages_ptr, num_pages_ptr, scales_ptr, tiles_ptr, first, num_tiles, page, part, stride_page, stride_slot,
    K: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to BLOCK_N rows of A, namely one page of the adapter of each tile from `first` on; which of these rows are
    needed; and their slots. If several tiles have the same adapter, only the first one has its rows."""
    rows = tl.arange(0, BLOCK_N)
    tile = first + rows // PAGE
    exists = tile < num_tiles
    slot = tl.load(tiles_ptr + 3 * tile, mask=exists, other=-1)
    count = tl.load(tiles_ptr + 3 * tile + 2, mask=exists, other=0)
    before = tl.load(tiles_ptr + 3 * tile - 3, mask=exists & (tile > 0), other=-1)
    used = (count > 0) & (slot >= 0) & (slot != before)
    used = used & (page < tl.load(num_pages_ptr + slot, mask=used, other=0))
    used = used & (tl.load(scales_ptr + slot * stride_slot + part, mask=used, other=0.0) != 0.0)
    number = tl.load(pages_ptr + slot * MAX_PAGES + page, mask=used, other=0).to(tl.int64)
    return a_ptr + number * stride_page + (part * PAGE + rows % PAGE) * K, used, slot


@triton.jit
def _prefetch_weights(w_ptr, columns, begin, N: tl.constexpr, K: tl.constexpr, PREFETCHED: tl.constexpr):
    """Prefetch the first weights of a program to the L2 cache, PREFETCHED lines of 128 bytes of each row."""
    rows = tl.minimum(columns, N - 1).to(tl.int64) * K
    lines = tl.minimum(begin + tl.arange(0, PREFETCHED) * 64, K - 1)
    places = (w_ptr + rows[:, None] + lines[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M", "num_tiles", "shrinks"])
def _product_and_shrink(
    x_ptr,
    w_ptr,
    a_ptr,
    tiles_ptr,
    slots_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    sums_ptr,
    shrunk_ptr,
    M,
    num_tiles,
    shrinks,
    stride_x,
    stride_page,
    stride_slot,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write sums (SPLITS, M, N): the products of x with the weights; and shrunk (SPLITS, PARTS, M, MAX_PAGES * PAGE): the
    products of each row of x with the A of its adapter.

    A program multiplies WIDTH columns. The first `shrinks` blocks of programs have rows of A, the others rows of the weights.
    """
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    rows = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin = split * WIDTH
    end = tl.minimum(begin + WIDTH, K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x + k[None, :]
    if block < shrinks:
        page = block % MAX_PAGES
        part = block // MAX_PAGES % PARTS
        first = block // (MAX_PAGES * PARTS) * (BLOCK_N // PAGE)
        a_rows, used, slot = _pages_of_a(
            a_ptr, pages_ptr, num_pages_ptr, scales_ptr, tiles_ptr, first, num_tiles, page, part, stride_page, stride_slot,
            K, MAX_PAGES, PAGE, BLOCK_N,
        )  # fmt: skip
        slot_of_row = tl.load(slots_ptr + rows, mask=rows < M, other=-1)
        needed = tl.max(used.to(tl.int32), 0) > 0
        wait_if_needed(needed, PDL)
        end = tl.where(needed, end, begin)
        keep = (rows < M, used)
        acc = sum_chain(
            x_ptrs, a_rows[None, :] + k[:, None], keep, begin, end, 1, 1, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ranks = tl.arange(0, BLOCK_N) % PAGE
        place = ((split * PARTS + part) * M + rows).to(tl.int64) * (MAX_PAGES * PAGE) + page * PAGE
        tl.store(
            shrunk_ptr + place[:, None] + ranks[None, :], acc, mask=used[None, :] & (slot_of_row[:, None] == slot[None, :])
        )
    else:
        columns = (block - shrinks) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_ptrs = w_ptr + columns.to(tl.int64)[None, :] * K + k[:, None]
        if PDL:
            _prefetch_weights(w_ptr, columns, begin, N, K, 8)
        wait_for_previous_kernel(PDL)
        keep = (rows < M, columns < N)
        acc = sum_chain(x_ptrs, w_ptrs, keep, begin, end, 1, 1, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        place = (split * M + rows).to(tl.int64) * N
        tl.store(sums_ptr + place[:, None] + columns[None, :], acc, mask=(rows < M)[:, None] & (columns < N)[None, :])


class AdapterTensors(NamedTuple):
    """The pointers that `_adapted_columns` reads: fields of LoraWeights and LoraBatch, and the results of the first launch."""

    b: tl.tensor
    pages: tl.tensor
    num_pages: tl.tensor
    scales: tl.tensor
    ones: tl.tensor
    factors: tl.tensor
    sums: tl.tensor
    shrunk: tl.tensor


@triton.jit
def rows_of_b(
    b_ptr, pages_ptr, slot, page, columns, inside, stride_page, N: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr
):
    """[PAGE, columns]: a page of B of an adapter; zeros for slot -1, and for columns that are not `inside`."""
    number = tl.load(pages_ptr + slot * MAX_PAGES + page, mask=slot >= 0, other=0).to(tl.int64)
    rows = b_ptr + number * stride_page + tl.arange(0, PAGE)[:, None] * N + columns[None, :]
    return tl.load(rows, mask=inside[None, :] & (slot >= 0), other=0.0)


@triton.jit
def _first_of_b(
    b_ptr, pages_ptr, slot, columns, inside, stride_page,
    N: tl.constexpr, OUT: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The first page of B of an adapter and, if GATED, the same for the columns of the other half."""
    b = rows_of_b(b_ptr, pages_ptr, slot, 0, columns, inside, stride_page, N, MAX_PAGES, PAGE)
    b_up = b
    if GATED:
        b_up = rows_of_b(b_ptr, pages_ptr, slot, 0, columns + OUT, inside, stride_page, N, MAX_PAGES, PAGE)
    return b, b_up


@triton.jit
def _rows_of_tile(tiles_ptr, rows_ptr, tile, num_tiles, BLOCK_ROWS: tl.constexpr):
    """The slot, the number of rows and the rows of a tile. Past the last tile and for padding: slot -1 and 0 rows."""
    exists = tile < num_tiles
    count = tl.load(tiles_ptr + 3 * tile + 2, mask=exists, other=0)
    slot = tl.load(tiles_ptr + 3 * tile, mask=exists, other=-1)
    first = tl.load(tiles_ptr + 3 * tile + 1, mask=exists, other=0)
    i = tl.arange(0, BLOCK_ROWS)
    return tl.where(count > 0, slot, -1), count, tl.load(rows_ptr + first + i, mask=i < count, other=0)


@triton.jit
def _adapted_columns(
    b, slot, part, rows, keep, columns, inside, given, bias_ptr, M, stride_page, stride_slot,
    N: tl.constexpr, PARTS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_N]: the product of some rows, plus their adapter and the bias. b: the first page of B"""
    written = keep[:, None] & inside[None, :]
    has = slot >= 0
    scale = tl.load(given.scales + slot * stride_slot + part, mask=has, other=0.0)
    one = tl.load(given.ones + slot * stride_slot + part, mask=has, other=-1)
    factor = tl.load(given.factors + slot * stride_slot + part, mask=has, other=-1)
    # where the scale is 0, the first launch has written nothing, and nothing is read
    num_pages = tl.where(scale != 0.0, tl.load(given.num_pages + slot, mask=has, other=0), 0)
    ranks = tl.arange(0, PAGE)
    y = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * M + rows).to(tl.int64) * N
        y += tl.load(given.sums + place[:, None] + columns[None, :], mask=written, other=0.0)
    delta = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    for page in tl.range(0, tl.maximum(num_pages, 1), num_stages=1):
        if page > 0:
            b = rows_of_b(given.b, given.pages, slot, page, columns, inside, stride_page, N, MAX_PAGES, PAGE)
        u = tl.zeros([BLOCK_ROWS, PAGE], tl.float32)
        read = keep & (page < num_pages)
        for split in tl.static_range(SPLITS):
            place = ((split * PARTS + part) * M + rows).to(tl.int64) * (MAX_PAGES * PAGE) + page * PAGE
            u += tl.load(given.shrunk + place[:, None] + ranks[None, :], mask=read[:, None], other=0.0)
        u = tl.where((page * PAGE + ranks == one)[None, :], 1.0, u) * scale
        # memory that belongs to no adapter may hold NaN, which a factor of 0 would not remove
        b = tl.where(page < num_pages, b, 0.0)
        delta += tl.dot(u.to(b.dtype), b, input_precision=PRECISION)
    if factor >= 0:
        number = tl.load(given.pages + slot * MAX_PAGES + factor // PAGE).to(tl.int64)
        row = given.b + number * stride_page + (factor % PAGE) * N + columns
        delta += y * tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
    y += delta
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["M", "num_tiles", "lanes"])
def _expand_and_finish(
    sums_ptr,
    shrunk_ptr,
    b_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows_ptr,
    tiles_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    ones_ptr,
    factors_ptr,
    M,
    num_tiles,
    lanes,
    alpha,
    stride_page,
    stride_slot,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N columns of the result for every `lanes`-th tile of rows. The columns lie within one part; the parts have
    N0, N1, N2 and N3 columns. GATED: they are columns of the gate, which need the same columns of the other half."""
    N: tl.constexpr = N0 + N1 + N2 + N3
    OUT: tl.constexpr = N // 2 if GATED else N
    BLOCKS: tl.constexpr = num_blocks(OUT, 0, 0, 0, BLOCK_N) if GATED else num_blocks(N0, N1, N2, N3, BLOCK_N)
    program = tl.program_id(0)
    block = program % BLOCKS
    tile = program // BLOCKS
    part = 0
    begin = block * BLOCK_N
    end = OUT
    if not GATED:
        part, begin, end = part_of_block(block, N0, N1, N2, N3, BLOCK_N)
    columns = begin + tl.arange(0, BLOCK_N)
    inside = columns < end
    given = AdapterTensors(b_ptr, pages_ptr, num_pages_ptr, scales_ptr, ones_ptr, factors_ptr, sums_ptr, shrunk_ptr)
    # no kernel of a step writes tiles or adapters, so the first tile and its adapter are loaded before the first launch ends
    slot, count, rows = _rows_of_tile(tiles_ptr, rows_ptr, tile, num_tiles, BLOCK_ROWS)
    b, b_up = _first_of_b(b_ptr, pages_ptr, slot, columns, inside, stride_page, N, OUT, MAX_PAGES, PAGE, GATED)
    wait_if_needed(count > 0, PDL)
    while count > 0:
        # the next tile is loaded before this one is computed
        tile += lanes
        next_slot, next_count, next_rows = _rows_of_tile(tiles_ptr, rows_ptr, tile, num_tiles, BLOCK_ROWS)
        next_b, next_up = _first_of_b(b_ptr, pages_ptr, next_slot, columns, inside, stride_page, N, OUT, MAX_PAGES, PAGE, GATED)
        keep = tl.arange(0, BLOCK_ROWS) < count
        y = _adapted_columns(
            b, slot, part, rows, keep, columns, inside, given, bias_ptr, M, stride_page, stride_slot,
            N, PARTS, MAX_PAGES, PAGE, SPLITS, BLOCK_ROWS, BLOCK_N, PRECISION,
        )  # fmt: skip
        if GATED:
            up = _adapted_columns(
                b_up, slot, PARTS - 1, rows, keep, columns + OUT, inside, given, bias_ptr, M, stride_page, stride_slot,
                N, PARTS, MAX_PAGES, PAGE, SPLITS, BLOCK_ROWS, BLOCK_N, PRECISION,
            )  # fmt: skip
            y = activate(y, KIND) * up
        offsets = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
        store_product(y, out_ptr, residual_ptr, alpha, offsets, keep[:, None] & inside[None, :])
        slot = next_slot
        count = next_count
        rows = next_rows
        b = next_b
        b_up = next_up


def launch_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: LoraWeights,
    batch: LoraBatch,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear_lora`, for several tokens that run.py lets through. Two launches.

    Left out: the norm. The caller has normalised x.
    """
    key = (
        "lora_product",
        x.shape,
        x.stride(0),
        x.dtype,
        weight.shape,
        weights.a.stride(0),
        weights.b.stride(0),
        weights.scales.stride(0),
        weights.widths,
        batch.tiles.shape,
        batch.pages.shape,
        activation,
        alpha,
        None if bias is None else bias.dtype,
        residual is None,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, plan_lora_product(x, weight, weights, batch, activation, alpha))
    y: Tensor = run(x, weight, bias, weights, batch, residual)
    return y


def plan_lora_product(
    x: Tensor,
    weight: Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    activation: str | None,
    alpha: float,
    tile: ProductTile | None = None,
) -> Run:
    """The launches for calls that look like this one. tile: overrides the choice, for tuning"""
    m, k = x.shape
    n = weight.shape[0]
    num_tiles = len(batch.tiles)
    max_pages = batch.pages.shape[1]
    parts = len(weights.widths)
    widths = part_widths(weights)
    if tile is None:
        arch = spec.arch_of(x.device)
        tile = choose_product_tile(m, n, k, x.dtype.itemsize, multiprocessors(x.device, 132), arch)
    precision = "ieee"
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    shrinks = triton.cdiv(num_tiles, tile.block_n // PAGE_RANKS) * parts * max_pages
    sizes = (parts, max_pages, PAGE_RANKS, tile.splits)
    strides = (weights.scales.stride(0),)
    multiply = Launch(
        _product_and_shrink,
        (shrinks + triton.cdiv(n, tile.block_n)) * tile.splits,
        varying=(m, num_tiles, shrinks),
        strides=(x.stride(0), weights.a.stride(0), *strides),
        fixed=(n, k, *sizes, segment_columns(k, tile.splits), *tile[:3], precision, pdl),
        options={**launch_options(pdl, tile.num_warps), "num_stages": tile.num_stages},
    )
    gated = activation is not None
    outputs = n // 2 if gated else n
    blocks = triton.cdiv(outputs, tile.finish_n) if gated else num_blocks(*widths, tile.finish_n)
    lanes = min(num_tiles, max(USUAL_TILES, FINISH_PROGRAMS // blocks))
    finish = Launch(
        _expand_and_finish,
        lanes * blocks,
        varying=(m, num_tiles, lanes, float(alpha)),
        strides=(weights.b.stride(0), *strides),
        fixed=(
            *widths,
            *sizes,
            gated,
            ACTIVATION_KINDS[activation or "silu"],
            batch.block_rows,
            tile.finish_n,
            precision,
            pdl,
        ),
        options=launch_options(pdl, 4),
    )

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, weights: LoraWeights, batch: LoraBatch, residual: Tensor | None
    ) -> Tensor:
        sums = x.new_empty(tile.splits * m * n, dtype=torch.float32)
        shrunk = x.new_empty(tile.splits * parts * m * max_pages * PAGE_RANKS, dtype=torch.float32)
        owners = (batch.pages, batch.num_pages, weights.scales)
        multiply((x, weight, weights.a, batch.tiles, batch.slots, *owners, sums, shrunk))
        out = x.new_empty(m, outputs) if residual is None else residual
        numbers = (*owners, weights.ones, weights.factors)
        finish((sums, shrunk, weights.b, bias, residual, out, batch.rows, batch.tiles, *numbers))
        return out

    return run
