"""The product of a quantised weight with one token on Hopper, in Gluon: weights from registers to `mma.sync`.

A program has 16 rows of weights, and each of its warps sums other columns of them. A thread copies words to shared memory
asynchronously, several steps ahead, and reads back those that it copied, so warps never wait for each other before the end. Two
instructions make a pair of bfloat16 or float16 numbers of 4-bit values: bits are moved below the exponent of 16, so that the
numbers are 16 + value, exactly. What that adds to a sum is (16 + zero point) times the sum of the inputs, which a product with
ones gives. A pair of float8 numbers takes four instructions: their bits are moved below the exponent and multiplied by a power
of two. NaN, which no checkpoint has, becomes 480.

Tensor cores add products in any order of the columns, so a thread multiplies the columns that it has, and the input is
rearranged: `column_of` says how. The token is kept in shared memory, with its norm applied, and is gathered there once. `mma`
multiplies 8 tokens at a time, and all of them are this one. Left out: several tokens (quantized_wgmma_kernel.py), the portable
kernels (quantized_kernel.py), and when this kernel is used (quantized_choice.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fa_serve.backends.hopper.gluon_names import copy_to_shared
from fa_serve.backends.launch import Launch, launch_options, multiprocessors
from fa_serve.backends.plan import PLANS
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.ops.activation_kernel import ACTIVATION_KINDS, activate
from fa_serve.ops.linear_kernel import store_product
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.quantized_pairs import both_numbers, pairs_of_float8
from fa_serve.ops.quantized_primitives import kernel_tensors, kernel_values, product_facts
from fa_serve.ops.quantized_weight import QuantizedWeight, Values


class GemvTile(NamedTuple):
    """block_n rows of weights; each of num_warps warps has its own blocks of 32 words of a row.

    num_stages: blocks of a warp that are copied or used at a time
    """

    block_n: int
    num_warps: int
    num_stages: int


@gluon.jit
def column_of(position, VALUES: gl.constexpr):
    """The column that is multiplied at a position. Positions are permuted inside of 32 columns for 4 bits, of 128 for float8.

    A thread reads words 4t to 4t + 3 of 16 neighbouring ones, where t is its number among four. Its share of 32 positions is 8t
    to 8t + 7.
    """
    thread = (position >> 3) & 3
    if VALUES == 0:
        run = (position >> 5) & 3
        column = (position & ~127) + (run >> 1) * 64 + thread * 16 + (run & 1) * 8 + (position & 7)
    else:
        column = (position & ~31) + ((position >> 2) & 1) * 16 + thread * 4 + (position & 3)
    return column


@gluon.jit
def pairs_of_int4(words, opaque, RUN: gl.constexpr, HALF: gl.constexpr):
    """int32: two numbers 16 + value, of the bits 4 * RUN to 4 * RUN + 3 of each half of words. HALF: whether in float16.

    opaque: 1, which the compiler cannot know. So it leaves `(t & mask) | exponent` in one instruction.
    """
    if HALF:
        t = words << (6 - 4 * RUN) if RUN < 2 else words >> (4 * RUN - 6)
        t = (t & 0x03C003C0) | (0x4C004C00 * opaque)
    else:
        t = words << 3 if RUN == 0 else words >> (4 * RUN - 3)
        t = (t & 0x00780078) | (0x41804180 * opaque)
    return t


@gluon.jit
def words_of_runs(words, VALUES: gl.constexpr):
    """[warps, 2, BLOCK_N, 16] words -> a tuple of those that `weights_of_run` takes.

    For 4 bits: [warps, BLOCK_N, 16] of 128 columns, twice, in which halves of a word are neighbouring columns.
    For float8: [warps, BLOCK_N, 4, 2] of 32 columns, four times.
    """
    A: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[2]
    split = gl.reshape(words, [A, 2, B, 4, 2, 2])
    if VALUES == 0:
        split = gl.permute(split, (0, 2, 3, 5, 4, 1))
        first, second = gl.split(split)
        first_even, first_odd = gl.split(first)
        second_even, second_odd = gl.split(second)
        found = (first_even, first_odd, second_even, second_odd)
    else:
        even, odd = gl.split(split)
        found = ()
        for part in gl.static_range(2):
            if part == 0:
                t = gl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
                )
            else:
                t = gl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
                )
            found += (gl.reshape(gl.permute(t, (0, 2, 1, 4, 3)), [A, B, 16]),)
    return found


@gluon.jit
def weights_of_run(found, opaque, RUN: gl.constexpr, VALUES: gl.constexpr, HALF: gl.constexpr):
    """[warps, BLOCK_N, 32]: the numbers at positions 32 * RUN to 32 * RUN + 31 of a block."""
    if VALUES == 0:
        words = found[RUN]
        pairs = gl.join(pairs_of_float8(words, False, HALF), pairs_of_float8(words, True, HALF))
        numbers = gl.permute(both_numbers(pairs, HALF), (0, 1, 3, 4, 2, 5))
    else:
        words = found[RUN // 4]
        numbers = both_numbers(pairs_of_int4(words, opaque, RUN % 4, HALF), HALF)
    return gl.reshape(numbers, [words.shape[0], words.shape[1], 32])


@gluon.jit
def along(x, DIM: gl.constexpr):
    """A vector as dimension DIM of three."""
    if DIM == 0:
        y = gl.expand_dims(gl.expand_dims(x, 1), 2)
    elif DIM == 1:
        y = gl.expand_dims(gl.expand_dims(x, 0), 2)
    else:
        y = gl.expand_dims(gl.expand_dims(x, 0), 1)
    return y


@gluon.jit
def load_groups(ptr, offsets, start, K: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr):
    """PARTS tensors of [warps, BLOCK_N, 1]: scales or zero points of the equal parts of the blocks from columns `start` on.

    offsets: [1, BLOCK_N, 1], those of the rows
    start:   [warps, 1, 1]
    """
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    found = ()
    for part in gl.static_range(PARTS):
        group = gl.minimum((start + part * (BLOCK // PARTS)) // GROUP, GROUPS - 1)
        found += (gl.load(ptr + offsets + group),)
    return found


@gluon.jit
def store_token(
    token,
    x_ptr,
    columns_ptr,
    norm_ptr,
    eps,
    offset,
    K: gl.constexpr,
    VALUES: gl.constexpr,
    WIDTH: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Write one row of inputs to shared memory (STEPS, warps, block) in the order of positions, with its norm applied."""
    WARPS: gl.constexpr = token.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)), 1)
    position = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), 0)
    column = column_of(warp * WIDTH + position, VALUES)
    factor = 1.0
    if norm_ptr is not None:
        squares = gl.zeros([WARPS, WIDTH], gl.float32, layout=layout)
        for step in range(0, STEPS):
            at = column + step * (WARPS * WIDTH)
            x = gl.load(x_ptr + at, mask=at < K, other=0.0).to(gl.float32)
            squares += x * x
        factor = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    for step in range(0, STEPS):
        at = column + step * (WARPS * WIDTH)
        source = at
        if columns_ptr is not None:
            source = gl.load(columns_ptr + at, mask=at < K, other=0)
        x = gl.load(x_ptr + source, mask=at < K, other=0.0)
        if norm_ptr is not None:
            weight = gl.load(norm_ptr + source, mask=at < K, other=0.0).to(gl.float32) + offset
            x = (x.to(gl.float32) * factor * weight).to(x_ptr.dtype.element_ty)
        token.index(step).store(x)


@gluon.jit
def row_of(row, N: gl.constexpr, STORED: gl.constexpr):
    """Which row of weights a program's row is. Rows that do not exist are the last one, and are not stored."""
    return gl.minimum(gl.program_id(0) * STORED + row % STORED, N - 1) + row // STORED * N


@gluon.jit
def _quantized_gemv(
    x_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    columns_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    offset,
    alpha,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = activation of x @ weights + bias, plus what is asked for, as `quantized_kernel._quantized_row` computes it.

    GATED: the weights have 2 * N rows. The first half of a program's rows are gates, the other the rows that they multiply.
    """
    BLOCK_M: gl.constexpr = 8
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty == gl.float16
    WIDTH: gl.constexpr = 128 if VALUES == 0 else 256
    BLOCKS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    PARTS: gl.constexpr = WIDTH // GROUP if GROUP < WIDTH else 1
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    STORED: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    w_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    # a thread has 8 neighbouring positions
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    opaque = gl.num_programs(1)

    w_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, w_layout))))
    w_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, w_layout))))
    w_part = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, w_layout))))
    w_word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(0, w_layout))))
    w_row = row_of(w_row, N, STORED)
    w_block = gl.expand_dims(along(w_warp, 0), 3)
    w_ptrs = data_ptr + w_block * 32 + gl.expand_dims(along(w_part, 1), 3) * 16
    w_ptrs = w_ptrs + gl.expand_dims(along(w_row, 2), 3) * (BLOCKS * 32)
    w_ptrs = w_ptrs + gl.expand_dims(along(w_word, 2), 0)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, 2, BLOCK_N, 16], w_shared)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    for stage in gl.static_range(STAGES - 1):
        copy_to_shared(ring.index(stage), w_ptrs + stage * (WARPS * 32), mask=w_block + stage * WARPS < BLOCKS)
        async_copy.commit_group()

    g_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    g_row = along(row_of(g_row, N, STORED), 1)
    g_start = along(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))) * WIDTH, 0)
    scales = ()
    zeros = ()
    if GROUP < K:
        scales = load_groups(scales_ptr, g_row * GROUPS, g_start, K, GROUP, WIDTH, PARTS)
    if zeros_ptr is not None:
        zeros = load_groups(zeros_ptr, g_row * GROUPS, g_start, K, GROUP, WIDTH, PARTS)

    wait_for_previous_kernel(PDL)
    # the product has room for 8 tokens, and this one is repeated
    repeats = along(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, x_layout))), 2)
    token_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    token = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, WIDTH], token_shared)
    store_token(token, x_ptr, columns_ptr, norm_ptr, eps, offset, K, VALUES, WIDTH, STEPS)

    none = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=mma)
    ones = gl.full([WARPS, BLOCK_N, 32], 1.0, x_ptr.dtype.element_ty, layout=a_layout)
    acc = none
    stage = 0
    into = STAGES - 1
    for step in range(0, STEPS):
        async_copy.wait_group(STAGES - 2)
        found = words_of_runs(ring.index(stage).load(w_layout), VALUES)
        ahead = (step + STAGES - 1) * WARPS
        copy_to_shared(ring.index(into), w_ptrs + ahead * 32, mask=w_block + ahead < BLOCKS)
        async_copy.commit_group()
        next_start = g_start + (step + 1) * (WARPS * WIDTH)
        next_scales = scales
        next_zeros = zeros
        if GROUP < K:
            next_scales = load_groups(scales_ptr, g_row * GROUPS, next_start, K, GROUP, WIDTH, PARTS)
        if zeros_ptr is not None:
            next_zeros = load_groups(zeros_ptr, g_row * GROUPS, next_start, K, GROUP, WIDTH, PARTS)
        for part in gl.static_range(PARTS):
            total = none
            sums = none
            for run in gl.static_range(part * (WIDTH // 32 // PARTS), (part + 1) * (WIDTH // 32 // PARTS)):
                x = token.index(step).slice(32 * run, 32, dim=1).load(gl.SliceLayout(2, x_layout))
                x, _ = gl.broadcast(gl.expand_dims(x, 2), repeats)
                x = gl.permute(gl.reshape(x, [WARPS, 4, 4, 2, BLOCK_M]), (0, 2, 1, 3, 4))
                x = gl.convert_layout(gl.reshape(x, [WARPS, 32, BLOCK_M]), b_layout)
                w = gl.convert_layout(weights_of_run(found, opaque, run, VALUES, HALF), a_layout)
                if VALUES == 0:
                    acc = mma_v2(w, x, acc)
                else:
                    total = mma_v2(w, x, total)
                    sums = mma_v2(ones, x, sums)
            if VALUES != 0:
                if zeros_ptr is not None:
                    total -= (zeros[part].to(gl.float32) + 16.0) * sums
                else:
                    total -= 24.0 * sums
                if GROUP < K:
                    total *= scales[part].to(gl.float32)
                acc += total
        scales = next_scales
        zeros = next_zeros
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)

    y = gl.sum(acc, 0)
    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, mma)))
    rows = gl.expand_dims(row_of(rows, N, STORED), 1)
    if GROUP >= K:
        y *= gl.load(scales_ptr + rows).to(gl.float32)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + rows).to(gl.float32)
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(y, [2, STORED, BLOCK_M]), (1, 2, 0)))
        y = activate(gate, KIND) * up
    out_layout: gl.constexpr = gl.BlockedLayout([1, 1], [STORED, 32 // STORED], [1, WARPS], [0, 1])
    y = gl.convert_layout(y, out_layout)
    row = gl.expand_dims(gl.program_id(0) * STORED + gl.arange(0, STORED, layout=gl.SliceLayout(1, out_layout)), 1)
    tokens = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout)), 0)
    stored = (row < N) & (tokens < 1)
    store_product(y, out_ptr, residual_ptr, alpha, tokens + row, stored)


def launch_quantized_gemv(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear`, with one token and contiguous tensors. One launch."""
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    gated = activation is not None
    k = x.shape[1]
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(1, n) if residual is None else residual
    key = (
        "quantized_gemv",
        *product_facts(x, weight, bias, residual),
        activation,
        eps,
        offset,
        alpha,
        None if norm_weight is None else norm_weight.dtype,
    )
    run = PLANS.get(key)
    if run is None:
        tile = gemv_tile(multiprocessors(x.device, 1), weight.shape[0], k, weight.values)
        launch = Launch(
            _quantized_gemv,
            triton.cdiv(n, tile.block_n // 2 if gated else tile.block_n),
            varying=(eps, offset, alpha),
            fixed=(
                n,
                k,
                weight.group_size,
                kernel_values(weight),
                gated,
                ACTIVATION_KINDS[activation or "silu"],
                tile.block_n,
                tile.num_stages,
                True,
            ),
            options=launch_options(True, tile.num_warps),
        )
        run = PLANS.add(key, launch)
    data, *others = kernel_tensors(weight)
    run((x, data.view(torch.int32), *others, norm_weight, bias, residual, out))
    return out


def gemv_tile(num_sms: int, n: int, k: int, values: Values) -> GemvTile:
    """The tile of the product of one token with n rows of k weights.

    Of 16 and 32 rows, 4 and 8 warps, and 2 to 4 stages on one H100, these were the fastest, or within 5% of the fastest, with
    weights outside of the L2 cache. In us with 4 warps and 2 stages, and with 8 warps and 3 stages, for 28672 x 4096 with a
    norm and a gate, 4096 x 14336, 6144 x 4096 and 4096 x 4096: 4-bit weights 29.1, 40.4; 19.3, 18.2; 7.9, 9.1; 6.3, 7.4. Float8
    weights with 4 stages and 4 warps, and 8 warps: 46.8, 50.7; 29.8, 26.5; 12.7, 12.1; 9.3, 8.4. The times of the selected
    tiles are in `quantized_choice.kernel_of`.
    """
    few_rows = triton.cdiv(n, 16) <= 2 * num_sms
    if values == "float8":
        return GemvTile(16, 8 if few_rows else 4, 4)
    return GemvTile(16, 8, 3) if few_rows and k > 8192 else GemvTile(16, 4, 2)
