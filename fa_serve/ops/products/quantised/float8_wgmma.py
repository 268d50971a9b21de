"""Products of float8 weights that have a scale for each row with 2 to 128 tokens in float8 on Hopper, in Gluon.

A program computes a tile over all columns, or over one of several ranges of them, whose sums a second kernel adds in their
order. Weights and tokens are copied to shared memory asynchronously, 128 columns at a time and some blocks ahead. The first
weights are copied before the previous kernel has ended. `wgmma` reads both from there, so nothing is unpacked, and the time is
that of reading the weights. Several programs share a multiprocessor: while one waits for a copy or a product, the others go on.

Tensor cores add float8 products in about 14 bits. The sums of each 128 columns are therefore added in float32 (DeepSeek-V3
Technical Report, section 3.3.2). Left out: more tokens, which take `torch._scaled_mm` (pytorch.py), and the rounding
of inputs (rounding.py).
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.gluon_names import copy_to_shared, sync_threads
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.ops_backend import RoundedRows
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.tiles import Float8Tile
from fa_serve.ops.products.quantised.unpack_wgmma import blocks_of_program, store_tile, wrapped
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.split_k import plan_sums


@gluon.jit
def copy_columns(memory, stage, source, block, inside, K: gl.constexpr):
    """Begin to copy the columns of a block. Columns from K on are 0.

    source: a pointer, the offsets of the first block's elements, their columns, and which rows exist
    """
    ptr, offsets, columns, exists = source
    mask = exists & inside
    if K % 128 > 0:
        mask = mask & (columns + block * 128 < K)
    copy_to_shared(memory.index(stage), ptr + block * 128 + offsets, mask=mask)


@gluon.jit(do_not_specialize=["M"])
def _scaled_wgmma(
    x_ptr,
    data_ptr,
    x_scales_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    alpha,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = (x * x_scales) @ (data * scales).T + bias, or residual + alpha * that. With SPLITS > 1, out is (SPLITS, M, N)
    float32, without bias and residual.

    x, data: float8, (M, K) and (N, K); M is at most BLOCK_M
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = (K + 127) // 128
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    split, tile, first, count = blocks_of_program(BLOCKS, SPLITS)
    row = tile * BLOCK_N
    columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, copied)), 0)
    # rows past the end repeat the last row and are not stored; tokens past the end are 0 and are not read
    w_rows = gl.expand_dims(gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, copied)), N - 1), 1)
    weights = (data_ptr, w_rows * K + columns, columns, columns < 128)  # all rows exist
    x_rows = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copied)), 1)
    inputs = (x_ptr, x_rows * K + columns, columns, x_rows < M)
    words = gl.allocate_shared_memory(data_ptr.dtype.element_ty, [STAGES, BLOCK_N, 128], shared)
    tokens = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, 128], shared)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    for stage in gl.static_range(STAGES - 1):
        copy_columns(words, stage, weights, wrapped(first + stage, BLOCKS), stage < count, K)
        async_copy.commit_group()
    wait_for_previous_kernel(PDL)
    for stage in gl.static_range(STAGES - 1):
        copy_columns(tokens, stage, inputs, wrapped(first + stage, BLOCKS), stage < count, K)
        async_copy.commit_group()
    token = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    x_scales = gl.load(x_scales_ptr + token, mask=token < M, other=0.0)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    stage = 0
    into = STAGES - 1
    for step in range(0, count):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        # all warps have waited for the products of the stage that the next copies overwrite
        sync_threads()
        x = tokens.index(stage).permute((1, 0))
        products = warpgroup_mma(words.index(stage), x, nothing, use_acc=False, is_async=True)
        ahead = step + STAGES - 1
        block = wrapped(first + ahead, BLOCKS)
        copy_columns(words, into, weights, block, ahead < count, K)
        copy_columns(tokens, into, inputs, block, ahead < count, K)
        async_copy.commit_group()
        acc += warpgroup_mma_wait(0, deps=[products])
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    async_copy.wait_group(0)
    acc *= gl.expand_dims(x_scales, 0)
    out_ptr += split.to(gl.int64) * M * N
    store_tile(acc, scales_ptr, bias_ptr, residual_ptr, out_ptr, row, M, alpha, N, True, BLOCK_M, BLOCK_N)


def plan_float8_wgmma(product: Product, tile: Float8Tile, details: Details) -> Multiply:
    """One launch for rows that were rounded, or two where the sums are split. Columns are a multiple of 16."""
    launch = Launch(
        _scaled_wgmma,
        triton.cdiv(product.n, tile.block_n) * tile.splits,
        varying=(product.tokens, details.alpha),
        fixed=(product.n, product.k, *tile, True),
        options=launch_options(True, tile.block_n // 16),
    )
    sums = plan_sums(launch, product, tile.splits, details.alpha)

    def multiply(
        x: RoundedRows, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return sums((x.data, weight.data, x.scales, weight.scales), bias, residual)

    return multiply
