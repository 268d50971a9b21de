"""Products of 4-bit weights with 33 to 64 tokens on Hopper, in Gluon: unpacked weights from registers to `wgmma`.

A program computes a tile of all columns, or of one of several ranges of them, whose sums a second kernel adds in their order.
The words of a block of 256 columns and the input's columns are copied to shared memory asynchronously, one block ahead. A
thread reads neighbouring pairs of words and makes pairs of weights of them in the input's dtype (see quantized_pairs.py). They
are then rounded, as those of the unpacked matrix are. Left out: an input in another order of columns, which the caller
rearranges.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from fa_serve.backends.hopper.gluon_names import copy_to_shared, sync_threads
from fa_serve.backends.launch import Launch, multiprocessors
from fa_serve.backends.plan import PLANS
from fa_serve.ops.linear_kernel import store_product
from fa_serve.ops.quantized_kernel import launch_sum_splits
from fa_serve.ops.quantized_pairs import load_scales, load_zeros, weights_of_half, word_layout
from fa_serve.ops.quantized_primitives import product_facts
from fa_serve.ops.quantized_weight import QuantizedWeight


class WgmmaTile(NamedTuple):
    """block_n rows of weights by 64 tokens, computed by a warp for each 16 rows.

    splits: ranges of columns that are summed by different programs
    """

    block_n: int
    splits: int


@gluon.jit
def copy_block(words, tokens, stage, w_ptrs, x_ptrs, columns, block, inside, K: gl.constexpr):
    """Begin to copy a block of 256 columns: its words, and twice 128 columns of the input. Columns from K on are 0."""
    copy_to_shared(words.index(stage), w_ptrs + block * 32, mask=inside)
    for half in gl.static_range(2):
        start = block * 256 + 128 * half
        copy_to_shared(tokens.index(2 * stage + half), x_ptrs + start, mask=inside & (columns + start < K))
    async_copy.commit_group()


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
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """As `quantized_kernel._quantized_linear`: with SPLITS > 1 out is (SPLITS, M, N) float32, without bias and residual.

    M is at most 64.
    """
    BLOCK_M: gl.constexpr = 64
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty == gl.float16
    BLOCKS: gl.constexpr = (K + 255) // 256
    SPAN: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 16, True)
    pair_layout: gl.constexpr = word_layout(BLOCK_N, WARPS, 16)
    w_copy: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    split = gl.program_id(0) % SPLITS
    row = gl.program_id(0) // SPLITS * BLOCK_N
    first = split * SPAN
    count = gl.minimum(SPAN, BLOCKS - first)
    # rows and tokens that do not exist are the last ones, and are not stored
    w_rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, w_copy)), N - 1)
    w_words = gl.arange(0, 32, layout=gl.SliceLayout(0, w_copy))
    w_ptrs = data_ptr + gl.expand_dims(w_rows * (BLOCKS * 32), 1) + gl.expand_dims(w_words, 0)
    x_rows = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_copy)), M - 1)
    columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, x_copy)), 0)
    x_ptrs = x_ptr + gl.expand_dims(x_rows * K, 1) + columns
    groups = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pair_layout)), N - 1) * GROUPS
    words = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], w_shared)
    tokens = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [4, BLOCK_M, 128], x_shared)
    copy_block(words, tokens, 0, w_ptrs, x_ptrs, columns, first, count > 0, K)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    for step in range(0, count):
        block = first + step
        scales = ()
        zeros = ()
        for half in gl.static_range(2):
            start = block * 256 + 128 * half
            scales += (load_scales(scales_ptr, groups, start, GROUPS, GROUP, 1, HALF),)
            zeros += (load_zeros(zeros_ptr, groups, start, GROUPS, GROUP, 1, HALF, pair_layout),)
        async_copy.wait_group(0)
        fence_async_shared()
        sync_threads()
        stage = step % 2
        copy_block(words, tokens, 1 - stage, w_ptrs, x_ptrs, columns, block + 1, step + 1 < count, K)
        found = words.index(stage).load(w_layout)
        for half in gl.static_range(2):
            w = gl.convert_layout(weights_of_half(found, zeros[half], scales[half], pair_layout, half == 1, 1, HALF), a_layout)
            acc = warpgroup_mma(w, tokens.index(2 * stage + half).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
    o_row = gl.expand_dims(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma)), 1)
    o_token = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma)), 0)
    stored = (o_row < N) & (o_token < M)
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o_row, mask=o_row < N, other=0.0).to(gl.float32)
    store_product(acc, out_ptr + split.to(gl.int64) * M * N, residual_ptr, alpha, o_token * N + o_row, stored)


def launch_quantized_wgmma(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """As `launch_quantized_linear`. One launch, or two where the sums are split; one more rearranges columns."""
    if weight.columns is not None:
        x = x.index_select(1, weight.columns)
    elif x.data_ptr() % 16:
        x = x.clone()  # copies to shared memory are 16 bytes each
    m, k = x.shape
    n = weight.shape[0]
    out = x.new_empty(m, n) if residual is None else residual
    tile = wgmma_tile(multiprocessors(x.device, 1), n, k)
    key = ("quantized_wgmma", *product_facts(x, weight, bias, residual), alpha)
    run = PLANS.get(key)
    if run is None:
        launch = Launch(
            _quantized_wgmma,
            triton.cdiv(n, tile.block_n) * tile.splits,
            varying=(m, alpha),
            fixed=(n, k, weight.group_size, tile.block_n, tile.splits),
            options={"num_warps": tile.block_n // 16},
        )
        run = PLANS.add(key, launch)
    if tile.splits == 1:
        run((x, weight.data, weight.scales, weight.zeros, bias, residual, out))
        return out
    sums = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    run((x, weight.data, weight.scales, weight.zeros, None, None, sums))
    return launch_sum_splits(sums, bias, residual, out, alpha)


@lru_cache(maxsize=1024)
def wgmma_tile(num_sms: int, n: int, k: int) -> WgmmaTile:
    """The tile of the product of 33 to 64 tokens with n rows of weights.

    Rows and ranges were compared on one H200 in an earlier form, with four stages of 128 columns instead of two of 256. 64
    tokens took 44.8 us with 128 rows and 51.3 with 64 rows for 28672 x 4096, with one range of columns; with four ranges 14.2
    and 16.2 for 6144 x 4096, without the addition of the ranges' sums, 30.7 and 25.6 for 4096 x 14336. This form takes 55.6,
    20.7 and 26.0 with the selected tiles, so four stages of words in another order are worth another look.
    """
    block_n = 128 if 4 * triton.cdiv(n, 128) >= num_sms else 64
    programs = triton.cdiv(n, block_n)
    splits = 1
    while splits < 4 and programs * splits < num_sms and k >= 2048 * splits:
        splits *= 2
    return WgmmaTile(block_n, splits)
