"""The products of quantised experts on Hopper, in Gluon: unpacked weights from registers to `wgmma`.

A program multiplies BLOCK_N rows of one expert's weights with up to BLOCK_M of its pairs, as `grouped._grouped_linear` does.
Weights become pairs of numbers (products/quantised/pairs.py). Counting everything in the loop, this takes 2.9 to 4.3
instructions for a weight, where the portable kernel takes 5.0 to 8.9. Weights are unpacked while the tensor cores multiply the
previous half of a block. Columns are copied to shared memory asynchronously, the input half a block ahead and the weights at
least as far. In a tile of up to 128 pairs, an unpacked weight serves more products than in a tile of 64. The same kernel
multiplies a dense weight with 129 to 512 tokens, as if it were the only expert. Left out: inputs that are not bfloat16, and the
other launches (order.py).
"""

from __future__ import annotations

from dataclasses import replace
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
from fa_serve.ops.elementwise.addition import launch_add
from fa_serve.ops.moe.order import ExpertProduct, Places, most_tiles
from fa_serve.ops.moe.primitives import gate_numbers, gated_values, kernel_constants, rows_of_outputs
from fa_serve.ops.moe.tiles import GroupedWgmmaTile
from fa_serve.ops.ops_backend import Gate
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.pairs import (
    load_scales,
    load_zeros,
    product_input,
    product_tensors,
    weights_of_half,
    word_layout,
)
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.split_k import plan_sums


@gluon.jit
def rows_of_tile(tile, t, N: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr, STEP: gl.constexpr, UP: gl.constexpr):
    """The rows of an expert's weights for the rows t of a tile. Rows past the end repeat the last row.

    If GATED, rows 8 apart are the gate and the up value of one output, because one thread has the sums of both.
    """
    if GATED:
        n = gl.minimum(tile * (BLOCK_N // 2) + t // 16 * 8 + t % 8, N - 1)
        rows = n * STEP + t // 8 % 2 * UP
    else:
        rows = gl.minimum(tile * BLOCK_N + t, N - 1)
    return rows


@gluon.jit
def copy_weights(words, stage, w_ptrs, columns, block, VALUES: gl.constexpr, K: gl.constexpr):
    """Begin to copy a block of 256 columns: its words, or for float8 two halves of 64 pairs of bytes. Bytes from K on are 0."""
    if VALUES == 0:
        for half in gl.static_range(2):
            start = block * 128 + 64 * half
            copy_to_shared(words.index(2 * stage + half), w_ptrs + start, mask=columns + start < K // 2)
    else:
        # a row has whole blocks of words
        start = block * 32
        copy_to_shared(words.index(stage), w_ptrs + start, mask=columns + start < (K + 255) // 256 * 32)


@gluon.jit
def load_half(words, stage, HALF: gl.constexpr, VALUES: gl.constexpr, LAYOUT: gl.constexpr):
    """What `weights_of_half` takes of the block in a stage."""
    return words.index(2 * stage + HALF if VALUES == 0 else stage).load(LAYOUT)


@gluon.jit(do_not_specialize=["pairs"])
def _grouped_wgmma(
    x_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    pairs,
    slope,
    limit,
    offset,
    stride_be,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STEP: gl.constexpr,
    UP: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program computes one tile of the output, as `grouped._grouped_linear` does.

    tiles: (tiles, 3) int32, as `order._list_tiles` writes them; None for one expert that has all `pairs`
    order: None if outputs are in the order of the input's rows
    data:  int16 for float8 weights
    out:   with SPLITS above 1, for one expert, (SPLITS, pairs, N) float32
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = (K + 255) // 256
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    COLUMNS: gl.constexpr = 2 * N if GATED else N
    ROW: gl.constexpr = K // 2 if VALUES == 0 else BLOCKS * 32
    TILES_N: gl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pair_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 16)
    w_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 64) if VALUES == 0 else word_layout(BLOCK_N, WARPS, 16, True)
    w_copy: gl.constexpr = gl.BlockedLayout([1, 8 if VALUES == 0 else 4], [4, 8], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tile = gl.program_id(0) // (TILES_N * SPLITS)
    tile_n = gl.program_id(0) // SPLITS % TILES_N
    first_block = 0
    last_block = BLOCKS
    if SPLITS > 1:
        split = gl.program_id(0) % SPLITS
        first_block = split * ((BLOCKS + SPLITS - 1) // SPLITS)
        last_block = gl.minimum(first_block + (BLOCKS + SPLITS - 1) // SPLITS, BLOCKS)
        out_ptr += split.to(gl.int64) * pairs * N
    if tiles_ptr is not None:
        wait_for_previous_kernel(PDL)
    if tiles_ptr is None:
        expert = 0
        first = tile * BLOCK_M
        end = gl.minimum(first + BLOCK_M, pairs)
    else:
        expert = gl.load(tiles_ptr + 3 * tile).to(gl.int64)
        first = gl.load(tiles_ptr + 3 * tile + 1)
        end = gl.load(tiles_ptr + 3 * tile + 2)
        if first >= end:
            return
    # places past the end repeat the last pair, and are not stored
    x_places = gl.minimum(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_copy)), end - 1)
    x_rows = gl.load(order_ptr + x_places) // TOP_K if GATED else x_places
    x_columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, x_copy)), 0)
    x_ptrs = x_ptr + gl.expand_dims(x_rows.to(gl.int64) * K, 1) + x_columns
    w_rows = rows_of_tile(tile_n, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, w_copy)), N, BLOCK_N, GATED, STEP, UP)
    w_columns = gl.expand_dims(gl.arange(0, 64 if VALUES == 0 else 32, layout=gl.SliceLayout(0, w_copy)), 0)
    w_ptrs = data_ptr + expert * (COLUMNS * ROW) + gl.expand_dims(w_rows * ROW, 1) + w_columns
    t = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pair_layout))
    groups = rows_of_tile(tile_n, t, N, BLOCK_N, GATED, STEP, UP) * GROUPS
    scales_ptr += expert * (COLUMNS * GROUPS)
    if zeros_ptr is not None:
        zeros_ptr += expert * (COLUMNS * GROUPS)
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(8 if VALUES == 0 else 4, 1, 8, [1, 0])
    if VALUES == 0:
        words = gl.allocate_shared_memory(gl.int16, [4, BLOCK_N, 64], w_shared)
    else:
        words = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], w_shared)
    tokens = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, BLOCK_M, 128], x_shared)
    start = first_block * 256
    copy_weights(words, first_block % 2, w_ptrs, w_columns, first_block, VALUES, K)
    async_copy.commit_group()
    if tiles_ptr is None:
        wait_for_previous_kernel(PDL)  # no kernel writes weights, so their copies need not wait
    copy_to_shared(tokens.index(0), x_ptrs + start, mask=x_columns + start < K)
    async_copy.commit_group()
    scales = load_scales(scales_ptr, groups, start, GROUPS, GROUP, VALUES, False)
    zeros = load_zeros(zeros_ptr, groups, start, GROUPS, GROUP, VALUES, False, pair_layout)
    async_copy.wait_group(1)
    sync_threads()
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma))
    found = load_half(words, first_block % 2, 0, VALUES, w_layout)
    lower = gl.convert_layout(weights_of_half(found, zeros, scales, pair_layout, False, VALUES, False), a_layout)
    scales = load_scales(scales_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False)
    zeros = load_zeros(zeros_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False, pair_layout)
    for block in range(first_block, last_block):
        acc = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        sync_threads()
        start = block * 256 + 128
        copy_to_shared(tokens.index(1), x_ptrs + start, mask=x_columns + start < K)
        copy_weights(words, (block + 1) % 2, w_ptrs, w_columns, block + 1, VALUES, K)
        async_copy.commit_group()
        acc = warpgroup_mma(lower, tokens.index(0).permute((1, 0)), acc, is_async=True)
        next_scales = load_scales(scales_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False)
        next_zeros = load_zeros(zeros_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False, pair_layout)
        found = load_half(words, block % 2, 1, VALUES, w_layout)
        upper = gl.convert_layout(weights_of_half(found, zeros, scales, pair_layout, True, VALUES, False), a_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        sync_threads()
        start = block * 256 + 256
        copy_to_shared(tokens.index(0), x_ptrs + start, mask=x_columns + start < K)
        async_copy.commit_group()
        acc = warpgroup_mma(upper, tokens.index(1).permute((1, 0)), acc, is_async=True)
        scales = load_scales(scales_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False)
        zeros = load_zeros(zeros_ptr, groups, start + 128, GROUPS, GROUP, VALUES, False, pair_layout)
        # at the end of the loop, because the machine code then unpacks before it waits
        found = load_half(words, (block + 1) % 2, 0, VALUES, w_layout)
        w = weights_of_half(found, next_zeros, next_scales, pair_layout, False, VALUES, False)
        lower = gl.convert_layout(w, a_layout)
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    if bias_ptr is not None:
        r = rows_of_tile(tile_n, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma)), N, BLOCK_N, GATED, STEP, UP)
        acc += gl.expand_dims(gl.load(bias_ptr + expert * stride_be + r).to(gl.float32), 1)
    OUTPUTS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        both = gl.permute(gl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1))
        gate, up = gl.split(both)
        y = gl.reshape(gated_values(gate, up, slope, limit, offset, KIND), [OUTPUTS, BLOCK_M])
    else:
        y = acc
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1])
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), stored)
    n = gl.expand_dims(tile_n * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, stored)), 1)
    places = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, stored))
    o_rows = places
    if not GATED and order_ptr is not None:
        o_rows = gl.load(order_ptr + gl.minimum(places, end - 1))
    keep = (n < N) & gl.expand_dims(places < end, 0)
    gl.store(out_ptr + gl.expand_dims(o_rows.to(gl.int64) * N, 0) + n, y, mask=keep)


def plan_expert_wgmma(
    product: Product, tile: GroupedWgmmaTile, weight: QuantizedWeight, bias: Tensor | None, gate: Gate | None
) -> ExpertProduct:
    """One launch. bias: that of a call, for its strides"""
    stride_be = 0 if bias is None else bias.stride(0)
    launch = plan_tiles(product, tile, gate, most_tiles(product, tile.block_m), stride_be)

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, places: Places, out: Tensor) -> None:
        if x.data_ptr() % 16:
            x = x.clone()  # copies to shared memory are 16 bytes each
        launch((x, *product_tensors(weight), bias, places.order, places.tiles, out))

    return multiply


def plan_tiles(
    product: Product, tile: GroupedWgmmaTile, gate: Gate | None, tiles: int, stride_be: int, pairs: int = 0
) -> Launch:
    """The launch of a product with the weights of all experts, in `tiles` tiles of pairs.

    pairs:     number of pairs, if the kernel is not given a list of tiles
    gate:      if given, pairs of outputs are gated, and the input has a row for each token; else it has a row for each pair
    stride_be: stride of the biases from one expert to the next
    """
    n = product.outputs
    options = launch_options(True, tile.block_n // 16)
    if tile.block_m == 16:
        options["maxnreg"] = 128  # two programs on a multiprocessor
    return Launch(
        _grouped_wgmma,
        tiles * triton.cdiv(product.n, tile.block_n) * tile.splits,
        varying=(pairs, *gate_numbers(gate)),
        strides=(stride_be,),
        fixed=(n, product.k, product.top_k, *rows_of_outputs(gate, n), *kernel_constants(product)[:2], *tile, True),
        options=options,
    )


def plan_one_expert(product: Product, tile: GroupedWgmmaTile, details: Details) -> Multiply:
    """A dense weight, multiplied in bfloat16 as an expert that all tokens have chosen.

    One launch, or two where sums are split or a residual is added; one more if columns must be rearranged.
    """
    m = product.tokens
    chosen = replace(product, num_experts=1, top_k=1, gated=False)
    launch = plan_tiles(chosen, tile, None, triton.cdiv(m, tile.block_m), 0, m)
    adds_residual = tile.splits > 1

    def multiply_pairs(tensors: tuple[Any, ...]) -> None:
        *of_product, bias, _, out = tensors
        launch((*of_product, bias, None, None, out))

    sums = plan_sums(multiply_pairs, chosen, tile.splits, details.alpha)

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        y = sums((product_input(x, weight), *product_tensors(weight)), bias, residual if adds_residual else None)
        return y if adds_residual or residual is None else launch_add(residual, y, details.alpha)

    return multiply
