"""Products of quantised weights with 2 to 128 tokens on Hopper, in Gluon: unpacked weights from registers to `wgmma`.

A program computes a tile of all columns, or of one of several ranges of them, whose sums a second kernel adds in their order.
128 bytes of each row (256 columns of 4-bit weights, or 128 of float8) and the input's columns are copied to shared memory
asynchronously, some blocks ahead, the first weights before the previous kernel has ended. A thread reads neighbouring
pairs of words and makes pairs of weights of them in the input's dtype (see pairs.py), float8 weights while the tensor
cores multiply the 128 columns before them. The weights are then rounded, as those of the unpacked matrix are, but scales of
float8 weights in blocks are rounded to the input's dtype before. If a float8 row has one scale, it multiplies the sums.
Left out: the loop over blocks (wgmma_loop.py), and an input in another order of columns, which the caller rearranges.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, multiprocessors
from fa_serve.launching.plans import PLANS
from fa_serve.ops.products.quantised.pairs import product_input, product_tensors, word_layout
from fa_serve.ops.products.quantised.primitives import kernel_values, product_facts
from fa_serve.ops.products.quantised.unpack import launch_sum_splits
from fa_serve.ops.products.quantised.weight import QuantizedWeight, Values
from fa_serve.ops.products.quantised.wgmma_loop import (
    blocks_of_program,
    copy_tokens,
    copy_words,
    load_groups,
    products_in_turn,
    products_overlapped,
    wrapped,
)
from fa_serve.ops.products.row import store_product

SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor. Each program takes 1 KiB more than it asks for."""


class WgmmaTile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by a warp for each 16 rows.

    stages: blocks of columns in shared memory, of which one is multiplied and the others are on their way
    splits: ranges of columns that are summed by different programs
    overlapped: weights are unpacked while tensor cores multiply those before them, which takes at least 3 stages
    """

    block_m: int
    block_n: int
    stages: int
    splits: int
    overlapped: bool = False


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
    """As `quantized_kernel._quantized_linear`: with SPLITS > 1 out is (SPLITS, M, N) float32, without bias and residual.

    data: of float8 weights, int16
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
    # rows that do not exist are the last one, and are not stored; tokens that do not exist are 0, and are not read
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


def launch_quantized_wgmma(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """As `launch_quantized_linear`. One launch, or two where the sums are split; one more rearranges columns."""
    x = product_input(x, weight)
    m, k = x.shape
    n = weight.shape[0]
    out = x.new_empty(m, n) if residual is None else residual
    tile = wgmma_tile(multiprocessors(x.device, 1), m, n, k, weight.values)
    key = ("quantized_wgmma", *product_facts(x, weight, bias, residual), alpha)
    run = PLANS.get(key)
    if run is None:
        launch = Launch(
            _quantized_wgmma,
            triton.cdiv(n, tile.block_n) * tile.splits,
            varying=(m, alpha),
            fixed=(n, k, weight.group_size, kernel_values(weight), *tile, True),
            options=tile_options(tile, weight.values),
        )
        run = PLANS.add(key, launch)
    tensors = (x, *product_tensors(weight))
    if tile.splits == 1:
        run((*tensors, bias, residual, out))
        return out
    sums = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    run((*tensors, None, None, sums))
    return launch_sum_splits(sums, bias, residual, out, alpha)


def stage_bytes(block_m: int, block_n: int, values: Values) -> int:
    """Shared memory of a block of columns: 128 bytes of each row of weights, and the input in 16 bits."""
    return block_n * 128 + block_m * (256 if values == "float8" else 512)


def tile_options(tile: WgmmaTile, values: Values) -> dict[str, Any]:
    """A warp for each 16 rows, and at most so many registers that as many programs fit as shared memory has room for.

    With zero points, ptxas takes 143 registers for 16 tokens and 64 rows if it may. Then 3 programs fit instead of 4, and 448
    programs on 132 multiprocessors take two turns.
    """
    programs = SHARED_BYTES // (tile.stages * stage_bytes(tile.block_m, tile.block_n, values) + 1024)
    registers = max(128, 65536 // (2 * tile.block_n * max(1, programs)) // 8 * 8)
    options = launch_options(True, tile.block_n // 16)
    return options if registers > 255 else {**options, "maxnreg": registers}


@lru_cache(maxsize=1024)
def wgmma_tile(num_sms: int, m: int, n: int, k: int, values: Values) -> WgmmaTile:
    """The tile of the product of m tokens with n rows of weights.

    Programs that a multiprocessor holds at a time share ranges of at least 1024 columns. Of 64 to 256 rows, 2 to 6 stages, 1
    to 8 ranges, and with and without overlap, these were the fastest or within 10% of the fastest on one H200. Unpacking while
    the tensor cores multiply pays off for float8 weights only. In us for 28672 x 4096, 4096 x 14336, 6144 x 4096 and
    4096 x 4096, with these tiles and by the kernel before it:
    4-bit weights, 4 tokens   27.9, 15.3, 9.1, 6.6;   44.7, 22.0, 12.1, 7.7
                  16 tokens   28.0, 16.7, 9.2, 8.0;   32.2, 24.7, 9.2, 9.0
                  64 tokens   41.5, 24.9, 15.1, 10.8; 55.9, 23.6, 13.8, 9.1
                  128 tokens  77.3, 44.3, 24.4, 16.6; 77.7, 43.0, 26.4, 16.7
    Float8 by row, 4 tokens   34.0, 20.4, 10.3, 8.4;  46.8, 26.8, 12.7, 10.6
                  16 tokens   34.5, 21.9, 11.2, 9.3;  36.0, 26.3, 10.8, 10.0
                  64 tokens   42.9, 27.7, 16.4, 12.2; 51.8, 31.1, 18.1, 12.0
    """
    block_m = next(size for size in (16, 32, 64, 128) if m <= size)
    packed = values != "float8"
    tiles = triton.cdiv(n, 64)
    if tiles >= 2 * num_sms:
        block_n = 64 if block_m <= 32 else 128
        stages = {16: 3, 32: 2, 64: 2, 128: 2} if packed else {16: 4, 32: 3, 64: 3, 128: 2}
        return WgmmaTile(block_m, block_n, stages[block_m], 1, not packed and block_m == 16)
    residents = {16: 4, 32: 4, 64: 2, 128: 1}[block_m]
    splits = 1
    while 2 * splits * tiles <= residents * num_sms and k >= 2048 * splits:
        splits *= 2
    stages = {16: 3, 32: 2, 64: 2, 128: 3} if packed else {16: 4, 32: 4, 64: 4, 128: 2}
    return WgmmaTile(block_m, 64, stages[block_m], splits, not packed and block_m < 128)
