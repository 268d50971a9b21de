"""Products of quantised weights with 2 to 128 tokens on Hopper, in Gluon: unpacked weights from registers to `wgmma`.

A program computes a tile of all columns, or of one of several ranges of them, whose sums a second kernel adds in their order.
128 bytes of each row (256 columns of 4-bit weights, or 128 of float8) and the input's columns are copied to shared memory
asynchronously, up to three blocks ahead, the first weights before the previous kernel has ended. A thread reads neighbouring
pairs of words and makes pairs of weights of them in the input's dtype (see quantized_pairs.py). They are then rounded, as those
of the unpacked matrix are, but scales of float8 weights in blocks are rounded to the input's dtype before. If a float8 row has
one scale, it multiplies the row's sum instead. Left out: an input in another
order of columns, which the caller rearranges.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from fa_serve.backends.hopper.gluon_names import copy_to_shared, sync_threads
from fa_serve.backends.launch import Launch, launch_options, multiprocessors
from fa_serve.backends.plan import PLANS
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.ops.linear_kernel import store_product
from fa_serve.ops.quantized_kernel import launch_sum_splits
from fa_serve.ops.quantized_pairs import load_scales, load_zeros, product_input, product_tensors, weights_of_half, word_layout
from fa_serve.ops.quantized_primitives import kernel_values, product_facts
from fa_serve.ops.quantized_weight import QuantizedWeight, Values


class WgmmaTile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by a warp for each 16 rows.

    stages: blocks of columns in shared memory, of which one is multiplied and the others are on their way
    splits: ranges of columns that are summed by different programs
    """

    block_m: int
    block_n: int
    stages: int
    splits: int


@gluon.jit
def copy_words(words, stage, w_ptrs, columns, block, inside, VALUES: gl.constexpr, K: gl.constexpr):
    """Begin to copy the 128 bytes of weights that each row has in a block. Bytes from K on are 0."""
    if VALUES == 0:
        copy_to_shared(words.index(stage), w_ptrs + block * 64, mask=inside & (columns + block * 64 < K // 2))
    else:
        copy_to_shared(words.index(stage), w_ptrs + block * 32, mask=inside)


@gluon.jit
def copy_tokens(tokens, stage, x_ptrs, columns, block, inside, K: gl.constexpr, HALVES: gl.constexpr):
    """Begin to copy the input's columns of a block, and commit everything that was begun. Columns from K on are 0."""
    for half in gl.static_range(HALVES):
        start = (block * HALVES + half) * 128
        copy_to_shared(tokens.index(HALVES * stage + half), x_ptrs + start, mask=inside & (columns + start < K))
    async_copy.commit_group()


@gluon.jit
def load_groups(
    scales_ptr,
    zeros_ptr,
    groups,
    block,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALVES: gl.constexpr,
    HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scales and zero points of a block, a tuple for each 128 columns. Float8 weights with a scale for each row get none."""
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        start = (block * HALVES + half) * 128
        if VALUES == 0 and GROUP >= K:
            scales += ((),)
        else:
            scales += (load_scales(scales_ptr, groups, start, GROUPS, GROUP, VALUES, HALF),)
        zeros += (load_zeros(zeros_ptr, groups, start, GROUPS, GROUP, VALUES, HALF, LAYOUT),)
    return scales, zeros


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
    SPAN: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
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
    split = gl.program_id(0) % SPLITS
    row = gl.program_id(0) // SPLITS * BLOCK_N
    first = split * SPAN
    count = gl.minimum(SPAN, BLOCKS - first)
    # rows and tokens that do not exist are the last ones, and are not stored
    w_rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, w_copy)), N - 1)
    w_columns = gl.expand_dims(gl.arange(0, 64 if VALUES == 0 else 32, layout=gl.SliceLayout(0, w_copy)), 0)
    w_ptrs = data_ptr + gl.expand_dims(w_rows * ROW, 1) + w_columns
    x_rows = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_copy)), M - 1)
    columns = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, x_copy)), 0)
    x_ptrs = x_ptr + gl.expand_dims(x_rows * K, 1) + columns
    groups = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pair_layout)), N - 1) * GROUPS
    if VALUES == 0:
        words = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, 64], w_shared)
    else:
        words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, 32], w_shared)
    tokens = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * HALVES, BLOCK_M, 128], x_shared)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    for stage in gl.static_range(STAGES - 1):
        copy_words(words, stage, w_ptrs, w_columns, first + stage, stage < count, VALUES, K)
    scales, zeros = load_groups(scales_ptr, zeros_ptr, groups, first, K, GROUP, VALUES, HALVES, HALF, pair_layout)
    wait_for_previous_kernel(PDL)
    for stage in gl.static_range(STAGES - 1):
        copy_tokens(tokens, stage, x_ptrs, columns, first + stage, stage < count, K, HALVES)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=mma))
    stage = 0
    into = STAGES - 1
    for step in range(0, count):
        async_copy.wait_group(STAGES - 2)
        # the products of the stage that the next copies overwrite have ended
        acc = warpgroup_mma_wait(0, deps=[acc])
        fence_async_shared()
        sync_threads()
        ahead = step + STAGES - 1
        copy_words(words, into, w_ptrs, w_columns, first + ahead, ahead < count, VALUES, K)
        copy_tokens(tokens, into, x_ptrs, columns, first + ahead, ahead < count, K, HALVES)
        block = first + step + 1
        next_scales, next_zeros = load_groups(scales_ptr, zeros_ptr, groups, block, K, GROUP, VALUES, HALVES, HALF, pair_layout)
        found = words.index(stage).load(w_layout)
        for half in gl.static_range(HALVES):
            w = weights_of_half(found, zeros[half], scales[half], pair_layout, half == 1, VALUES, HALF)
            w = gl.convert_layout(w, a_layout)
            if half > 0:
                acc = warpgroup_mma_wait(0, deps=[acc])
            # ptxas keeps w in its registers until the next wait; tests check that it does not serialise the products for that
            acc = warpgroup_mma(w, tokens.index(HALVES * stage + half).permute((1, 0)), acc, is_async=True)
        scales = next_scales
        zeros = next_zeros
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    o_rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
    o_row = gl.expand_dims(o_rows, 1)
    o_token = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma)), 0)
    stored = (o_row < N) & (o_token < M)
    if VALUES == 0 and GROUP >= K:
        acc *= gl.load(scales_ptr + o_row, mask=o_row < N, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o_row, mask=o_row < N, other=0.0).to(gl.float32)
    store_product(acc, out_ptr + split.to(gl.int64) * M * N, residual_ptr, alpha, o_token * N + o_row, stored)


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
            options=launch_options(True, tile.block_n // 16),
        )
        run = PLANS.add(key, launch)
    tensors = (x, *product_tensors(weight))
    if tile.splits == 1:
        run((*tensors, bias, residual, out))
        return out
    sums = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    run((*tensors, None, None, sums))
    return launch_sum_splits(sums, bias, residual, out, alpha)


@lru_cache(maxsize=1024)
def wgmma_tile(num_sms: int, m: int, n: int, k: int, values: Values) -> WgmmaTile:
    """The tile of the product of m tokens with n rows of weights.

    Of 64 and 128 rows of weights, 2 to 6 stages, and 1, 2, 4 and 8 ranges of columns on one H100, these were the fastest, or
    within 7% of the fastest, for the shapes and formats in `quantized_choice.kernel_of`. More stages take shared memory that
    other programs of the multiprocessor need: 16 tokens took 26.3 us with 3 stages and 34.7 with 6 for 28672 x 4096 and 4-bit
    weights, and 64 tokens 37.8 with 2 and 52.8 with 4, both of 128 rows. 16 tokens of 6144 x 4096 took 8.7 with 4 ranges and
    10.0 with 2; 64 tokens took 13.8 and 12.9.
    """
    block_m = next(size for size in (16, 32, 64, 128) if m <= size)
    many_rows = triton.cdiv(n, 128) >= num_sms
    if values == "float8":
        rows = 64
        stages = {16: 4, 32: 3, 64: 3, 128: 2}[block_m]
    else:
        rows = 128 if many_rows and block_m >= 64 else 64
        stages = 3 if (many_rows and block_m == 16) or block_m == 32 else 2
    wanted = (2 if block_m <= 32 else 1) * num_sms
    programs = triton.cdiv(n, rows)
    splits = 1
    while splits < 4 and programs * splits < wanted and k >= 2048 * splits:
        splits *= 2
    return WgmmaTile(block_m, rows, stages, splits)
