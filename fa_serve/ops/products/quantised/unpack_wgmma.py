"""Products of quantised weights with 2 to 128 tokens on Hopper, in Gluon: unpacked weights from registers to `wgmma`.

A program computes a tile over all columns, or over one of several ranges of them, whose sums a second kernel adds in their
order. Blocks of 128 bytes of each row (256 columns of 4-bit weights, or 128 of float8) and the input's columns are copied to
shared memory asynchronously, some blocks ahead. The first weights are copied before the previous kernel has ended. A thread
reads neighbouring pairs of words and turns them into pairs of weights in the input's dtype (see pairs.py). In some tiles of
float8 weights (`WgmmaTile.overlapped`), this happens while the tensor cores multiply the previous 128 columns. The weights are
rounded as in the unpacked matrix, except that scales of float8 weights in blocks are rounded to the input's dtype first. If a
float8 row has one scale, it multiplies the sums. Left out: how words become pairs of weights (pairs.py).
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.gluon_names import copy_to_shared, sync_threads
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.pairs import (
    load_scales,
    load_zeros,
    product_input,
    product_tensors,
    weights_of_half,
    word_layout,
)
from fa_serve.ops.products.quantised.primitives import kernel_values
from fa_serve.ops.products.quantised.tiles import WgmmaTile
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.row import store_product
from fa_serve.ops.products.split_k import plan_sums

MULTIPROCESSOR_BYTES = 228 << 10
"""Shared memory of a multiprocessor. Each program takes 1 KiB more than it asks for."""


@gluon.jit
def copy_words(words, stage, weights, block, inside, VALUES: gl.constexpr, K: gl.constexpr):
    """Begin to copy the 128 bytes of weights that each row has in a block. Bytes from K on are 0.

    weights: a pointer, the offsets of the first block's elements, and their columns
    """
    data_ptr, offsets, columns = weights
    WIDTH: gl.constexpr = 64 if VALUES == 0 else 32
    if VALUES == 0 and K % 128 > 0:
        inside = inside & (columns + block * 64 < K // 2)
    copy_to_shared(words.index(stage), data_ptr + block * WIDTH + offsets, mask=inside)


@gluon.jit
def copy_tokens(tokens, stage, inputs, block, inside, K: gl.constexpr):
    """Begin to copy the input's columns of a block, and commit everything that was begun. Columns from K on are 0.

    tokens: a tensor in shared memory for each 128 columns of a block; Triton would put a barrier between parts of one tensor
    inputs: a pointer, the offsets of the first 128 columns, the columns, and which tokens exist
    """
    x_ptr, offsets, columns, is_token = inputs
    for half in gl.static_range(len(tokens)):
        start = (block * len(tokens) + half) * 128
        mask = is_token & inside
        if K % (128 * len(tokens)) > 0:
            mask = mask & (columns + start < K)
        copy_to_shared(tokens[half].index(stage), x_ptr + start + offsets, mask=mask)
    async_copy.commit_group()


@gluon.jit
def wrapped(block, BLOCKS: gl.constexpr):
    """The number of a block, modulo BLOCKS: programs begin with different blocks, and the first block follows the last."""
    return gl.where(block >= BLOCKS, block - BLOCKS, block)


@gluon.jit
def blocks_of_program(BLOCKS: gl.constexpr, SPLITS: gl.constexpr):
    """(range of columns, tile of rows, first block, number of blocks) of this program. Each tile has SPLITS ranges."""
    SPAN: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    split = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    if SPLITS == 1:
        # if all programs began with the same columns, they would read the same few lines of the input at the same time
        return split, tile, tile % BLOCKS, BLOCKS
    else:  # noqa: RET505
        first = split * SPAN
        return split, tile, first, gl.minimum(SPAN, BLOCKS - first)


@gluon.jit
def load_groups(
    groups,
    block,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALVES: gl.constexpr,
    HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scales and zero points of a block: tuples with an element for each 128 columns, () for float8 with row scales.

    groups: pointers to scales and zero points, and the offset of each row's first group
    """
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    scales_ptr, zeros_ptr, rows = groups
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        start = (block * HALVES + half) * 128
        if VALUES == 0 and GROUP >= K:
            scales += ((),)
        else:
            scales += (load_scales(scales_ptr, rows, start, GROUPS, GROUP, VALUES, HALF),)
        zeros += (load_zeros(zeros_ptr, rows, start, GROUPS, GROUP, VALUES, HALF, LAYOUT),)
    return scales, zeros


@gluon.jit
def products_in_turn(
    acc,
    words,
    tokens,
    weights,
    inputs,
    groups,
    scales,
    zeros,
    first,
    count,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """Add the products of `count` blocks, in at least 2 stages. A block is unpacked after the products of the previous
    block."""
    STAGES: gl.constexpr = words.shape[0]
    HALVES: gl.constexpr = len(tokens)
    BLOCKS: gl.constexpr = (K + 128 * HALVES - 1) // (128 * HALVES)
    stage = 0
    into = STAGES - 1
    for step in range(0, count):
        async_copy.wait_group(STAGES - 2)
        # the products of the stage that the next copies overwrite have ended
        acc = warpgroup_mma_wait(0, deps=[acc])
        fence_async_shared()
        sync_threads()
        ahead = step + STAGES - 1
        block = wrapped(first + ahead, BLOCKS)
        copy_words(words, into, weights, block, ahead < count, VALUES, K)
        copy_tokens(tokens, into, inputs, block, ahead < count, K)
        block = wrapped(first + step + 1, BLOCKS)
        next_scales, next_zeros = load_groups(groups, block, K, GROUP, VALUES, HALVES, HALF, LAYOUT)
        found = words.index(stage).load(W_LAYOUT)
        for half in gl.static_range(HALVES):
            w = weights_of_half(found, zeros[half], scales[half], LAYOUT, half == 1, VALUES, HALF)
            w = gl.convert_layout(w, A_LAYOUT)
            if half > 0:
                acc = warpgroup_mma_wait(0, deps=[acc])
            # ptxas keeps w in its registers until the next wait; tests check that it does not serialise the products for that
            acc = warpgroup_mma(w, tokens[half].index(stage).permute((1, 0)), acc, is_async=True)
        scales = next_scales
        zeros = next_zeros
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def products_overlapped(
    acc,
    words,
    tokens,
    weights,
    inputs,
    groups,
    scales,
    zeros,
    first,
    count,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """Add the products of `count` blocks, in at least 3 stages. Tensor cores multiply 128 columns while the next are unpacked.

    The loop waits for the copies of the block after the one that it multiplies, because it unpacks the first 128 columns of
    that block. Each iteration has one point at which Triton puts barriers between copies and products.
    """
    STAGES: gl.constexpr = words.shape[0]
    HALVES: gl.constexpr = len(tokens)
    BLOCKS: gl.constexpr = (K + 128 * HALVES - 1) // (128 * HALVES)
    # with two sets of registers for unpacked weights, none is written while products read it
    PARTS: gl.constexpr = 2 // HALVES
    stage = 0
    into = STAGES - 1
    async_copy.wait_group(2 * STAGES - 3)
    sync_threads()
    found = words.index(0).load(W_LAYOUT)
    w = weights_of_half(found, zeros[0], scales[0], LAYOUT, False, VALUES, HALF)
    w = gl.convert_layout(w, A_LAYOUT)
    for pair in range(0, count, PARTS):
        for part in gl.static_range(PARTS):
            # the products of the stage that the next copies overwrite have ended
            acc = warpgroup_mma_wait(0, deps=[acc])
            async_copy.wait_group(STAGES - 3)
            fence_async_shared()
            sync_threads()
            ahead = pair + part + STAGES - 1
            block = wrapped(first + ahead, BLOCKS)
            copy_words(words, into, weights, block, ahead < count, VALUES, K)
            copy_tokens(tokens, into, inputs, block, ahead < count, K)
            x = tokens[0].index(stage).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
            block = wrapped(first + pair + part + 1, BLOCKS)
            next_scales, next_zeros = load_groups(groups, block, K, GROUP, VALUES, HALVES, HALF, LAYOUT)
            if HALVES == 2:
                found = words.index(stage).load(W_LAYOUT)
                w = weights_of_half(found, zeros[1], scales[1], LAYOUT, True, VALUES, HALF)
                w = gl.convert_layout(w, A_LAYOUT)
                acc = warpgroup_mma_wait(0, deps=[acc])
                x = tokens[1].index(stage).permute((1, 0))
                acc = warpgroup_mma(w, x, acc, is_async=True)
            scales = next_scales
            zeros = next_zeros
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            into = gl.where(into == STAGES - 1, 0, into + 1)
            # at the end of the loop, because the machine code then unpacks before it waits
            found = words.index(stage).load(W_LAYOUT)
            w = weights_of_half(found, zeros[0], scales[0], LAYOUT, False, VALUES, HALF)
            w = gl.convert_layout(w, A_LAYOUT)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def store_tile(
    acc,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    row,
    M,
    alpha,
    N: gl.constexpr,
    BY_ROW: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Finish the sums of a tile, [BLOCK_N, BLOCK_M], from `row` on, and store them in units of 8 rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, gl.num_warps()], [0, 1])
    rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    n = gl.expand_dims(rows, 1)
    token = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT)), 0)
    y = gl.convert_layout(acc, LAYOUT)
    if BY_ROW:
        y *= gl.load(scales_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    store_product(y, out_ptr, residual_ptr, alpha, token * N + n, (n < N) & (token < M))


@gluon.jit(do_not_specialize=["M"])
def _quantized_wgmma(
    x_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    alpha,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
    PDL: gl.constexpr,
):
    """As `unpack._quantized_linear`: with SPLITS > 1 out is (SPLITS, M, N) float32, without bias and residual.

    data: int16 for float8 weights
    M:    at most BLOCK_M
    """
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty == gl.float16
    HALVES: gl.constexpr = 1 if VALUES == 0 else 2
    BLOCKS: gl.constexpr = (K + 128 * HALVES - 1) // (128 * HALVES)
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    ROW: gl.constexpr = K // 2 if VALUES == 0 else BLOCKS * 32
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 64) if VALUES == 0 else word_layout(BLOCK_N, WARPS, 16, True)
    pair_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 16)
    w_copy: gl.constexpr = gl.BlockedLayout([1, 8 if VALUES == 0 else 4], [4, 8], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(8 if VALUES == 0 else 4, 1, 8, [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    split, tile, first, count = blocks_of_program(BLOCKS, SPLITS)
    row = tile * BLOCK_N
    # rows past the end repeat the last row and are not stored; tokens past the end are 0 and are not read
    w_rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, w_copy)), N - 1)
    w_columns = gl.expand_dims(gl.arange(0, 64 if VALUES == 0 else 32, layout=gl.SliceLayout(0, w_copy)), 0)
    weights = (data_ptr, gl.expand_dims(w_rows * ROW, 1) + w_columns, w_columns)
    x_rows = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_copy)), 1)
    columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, x_copy)), 0)
    inputs = (x_ptr, x_rows * K + columns, columns, x_rows < M)
    g_rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pair_layout)), N - 1) * GROUPS
    groups = (scales_ptr, zeros_ptr, g_rows)
    if VALUES == 0:
        words = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, 64], w_shared)
    else:
        words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, 32], w_shared)
    tokens = ()
    for _half in gl.static_range(HALVES):
        tokens += (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, 128], x_shared),)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    for stage in gl.static_range(STAGES - 1):
        copy_words(words, stage, weights, wrapped(first + stage, BLOCKS), stage < count, VALUES, K)
        async_copy.commit_group()
    scales, zeros = load_groups(groups, first, K, GROUP, VALUES, HALVES, HALF, pair_layout)
    wait_for_previous_kernel(PDL)
    for stage in gl.static_range(STAGES - 1):
        copy_tokens(tokens, stage, inputs, wrapped(first + stage, BLOCKS), stage < count, K)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma))
    if OVERLAPPED:
        acc = products_overlapped(
            acc, words, tokens, weights, inputs, groups, scales, zeros, first, count,
            K, GROUP, VALUES, HALF, w_layout, pair_layout, a_layout,
        )  # fmt: skip
    else:
        acc = products_in_turn(
            acc, words, tokens, weights, inputs, groups, scales, zeros, first, count,
            K, GROUP, VALUES, HALF, w_layout, pair_layout, a_layout,
        )  # fmt: skip
    async_copy.wait_group(0)
    out_ptr += split.to(gl.int64) * M * N
    store_tile(acc, scales_ptr, bias_ptr, residual_ptr, out_ptr, row, M, alpha, N, VALUES == 0 and GROUP >= K, BLOCK_M, BLOCK_N)


def plan_unpack_wgmma(product: Product, tile: WgmmaTile, details: Details) -> Multiply:
    """One launch, or two if the sums are split; one more if the columns must be rearranged."""
    launch = Launch(
        _quantized_wgmma,
        triton.cdiv(product.n, tile.block_n) * tile.splits,
        varying=(product.tokens, details.alpha),
        fixed=(product.n, product.k, product.group, kernel_values(product), *tile, True),
        options=tile_options(tile, product),
    )
    sums = plan_sums(launch, product, tile.splits, details.alpha)

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return sums((product_input(x, weight), *product_tensors(weight)), bias, residual)

    return multiply


def stage_bytes(tile: WgmmaTile, product: Product) -> int:
    """Shared memory of a block of columns: 128 bytes of each row of weights, and the input in 16 bits."""
    return tile.block_n * 128 + tile.block_m * (512 if product.is_packed else 256)


def tile_options(tile: WgmmaTile, product: Product) -> dict[str, Any]:
    """One warp for each 16 rows, and a limit of registers with which as many programs fit on a multiprocessor as its shared
    memory has room for.

    Without the limit, ptxas takes 143 registers for 16 tokens and 64 rows with zero points. Then 3 programs fit instead of 4,
    and 448 programs on 132 multiprocessors take two turns.
    """
    programs = MULTIPROCESSOR_BYTES // (tile.stages * stage_bytes(tile, product) + 1024)
    registers = max(128, 65536 // (2 * tile.block_n * max(1, programs)) // 8 * 8)
    options = launch_options(True, tile.block_n // 16)
    return options if registers > 255 else {**options, "maxnreg": registers}
