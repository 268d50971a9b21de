"""Products of float8 weights that have a scale for each row with 2 to 128 tokens in float8 on Hopper, in Gluon.

    y = launch_scaled_wgmma(rounded, weight, bias, residual, alpha)        # what torch._scaled_mm computes, and what follows

A program computes a tile of all columns, or of one of several ranges of them, whose sums a second kernel adds in their order.
128 columns of weights and tokens at a time are copied to shared memory asynchronously, some blocks ahead, the first weights
before the previous kernel has ended. `wgmma` reads both from there, so nothing is unpacked, and the time is that of reading the
weights. Several programs share a multiprocessor: while one waits for a copy or a product, the others go on.

Tensor cores add float8 products in about 14 bits. The sums of each 128 columns are therefore added in float32 (DeepSeek-V3
Technical Report, section 3.3.2). Left out: more tokens, which take `torch._scaled_mm` (product.py), and the rounding
of inputs (rounding.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
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
from fa_serve.launching.launch import Launch, launch_options, multiprocessors
from fa_serve.launching.plans import PLANS
from fa_serve.ops.ops_backend import RoundedRows
from fa_serve.ops.products.quantised.primitives import product_facts
from fa_serve.ops.products.quantised.unpack import launch_sum_splits
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.quantised.wgmma import store_tile
from fa_serve.ops.products.quantised.wgmma_loop import blocks_of_program, wrapped


class ScaledTile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by a warp for each 16 rows.

    stages: blocks of columns in shared memory, of which one is multiplied and the others are on their way
    splits: ranges of columns that are summed by different programs
    """

    block_m: int
    block_n: int
    stages: int
    splits: int


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
    """out = (x * x_scales) @ (data * scales).T + bias, plus what is asked for; with SPLITS > 1 out is (SPLITS, M, N) float32,
    without bias and residual.

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
    # rows that do not exist are the last one, and are not stored; tokens that do not exist are 0, and are not read
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


def launch_scaled_wgmma(
    x: RoundedRows, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """The product of 2 to 128 rounded rows, (m, n) in x.dtype: residual + alpha * (y + bias), in place of the residual.

    One launch, or two where the sums are split. Columns are a multiple of 16.
    """
    m, k = x.data.shape
    n = weight.shape[0]
    out = x.data.new_empty(m, n, dtype=x.dtype) if residual is None else residual
    tile = scaled_tile(multiprocessors(x.data.device, 1), m, n, k)
    key = ("scaled_wgmma", *product_facts(x.data, weight, bias, residual), out.dtype, alpha)
    run = PLANS.get(key)
    if run is None:
        launch = Launch(
            _scaled_wgmma,
            triton.cdiv(n, tile.block_n) * tile.splits,
            varying=(m, alpha),
            fixed=(n, k, *tile, True),
            options=launch_options(True, tile.block_n // 16),
        )
        run = PLANS.add(key, launch)
    tensors = (x.data, weight.data, x.scales, weight.scales)
    if tile.splits == 1:
        run((*tensors, bias, residual, out))
        return out
    sums = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.data.device)
    run((*tensors, None, None, sums))
    return launch_sum_splits(sums, bias, residual, out, alpha)


@lru_cache(maxsize=1024)
def scaled_tile(num_sms: int, m: int, n: int, k: int) -> ScaledTile:
    """The tile of the product of m tokens with n rows of weights.

    Where there are two tiles for each multiprocessor or more, few stages let all of them have a program at a time. Else
    programs have many stages, one or two of them fit on a multiprocessor, and they share ranges of at least 2048 columns. Of 64
    and 128 rows, 3 to 8 stages and 1 to 4 ranges, these were the fastest on one H200, or within 5% of the fastest, with weights
    outside of the L2 cache. In us for 28672 x 4096, 4096 x 14336, 6144 x 4096 and 4096 x 4096, by this kernel, by the one that
    unpacks float8 weights, and by torch._scaled_mm:
    16 tokens   36.4, 20.2,  9.9,  7.6; 37.8, 22.7, 11.2, 10.6; 49.8, 41.9, 17.9, 14.4
    32 tokens   37.2, 21.2, 10.6,  8.0; 39.1, 28.5, 12.4, 10.4; 48.8, 39.7, 17.3, 14.3
    64 tokens   37.7, 22.5, 10.5,  9.0; 45.2, 28.5, 16.4, 12.1; 45.8, 39.0, 15.4, 14.3
    128 tokens  46.2, 26.8, 13.8, 12.4; 61.2, 67.5, 33.4, 21.9; 41.0, 39.3, 15.3, 14.4
    Reading takes 26.6, 13.3, 5.7 and 3.8.
    """
    block_m = next(size for size in (16, 32, 64, 128) if m <= size)
    tiles = triton.cdiv(n, 64)
    if tiles >= 2 * num_sms:
        return ScaledTile(block_m, 64, 4 if block_m == 128 else 3, 1)
    residents = 2 if block_m <= 32 else 1
    splits = 1
    while 2 * splits * tiles <= residents * num_sms and k >= 4096 * splits:
        splits *= 2
    return ScaledTile(block_m, 64, 8, splits)
