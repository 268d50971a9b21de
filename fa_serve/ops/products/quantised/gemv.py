"""The product of a quantised weight with one token on Hopper, in Gluon: weights from registers to `mma.sync`.

A program multiplies tiles of 16 rows of weights, one after the other, and each of its warps sums different columns. There are
as many programs as the multiprocessors hold at a time, so that each prepares the token only once: in shared memory, with the
norm applied, in the order in which it is multiplied. While a block is multiplied, the words of the next blocks are on their way
from memory to registers, also across the end of a tile. Warps wait for each other only at the end of a tile.

Two instructions turn two 4-bit values into a pair of bfloat16 or float16 numbers: the bits are moved below the exponent of 16,
so that each number is exactly 16 + value. The excess in a sum is (16 + zero point) times the sum of the inputs, and is
subtracted once for each group of columns. A pair of float8 numbers takes four instructions: their bits are moved to the places
of exponent and mantissa, and multiplied by a power of two. NaN, which no checkpoint has, becomes 480.

A product may add the columns in any order, so a thread multiplies the columns that it has loaded, and the input is rearranged
to match (runs.py). `mma` multiplies 8 tokens at a time, and all 8 are copies of the one token. Left out: several tokens
(unpack_wgmma.py), and the portable kernels (unpack.py).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.gluon_names import sync_threads
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.primitives import kernel_tensors, kernel_values
from fa_serve.ops.products.quantised.runs import along, by_position, load_block, row_of, weights_of_run, words_of_runs
from fa_serve.ops.products.quantised.tiles import GemvTile
from fa_serve.ops.products.quantised.weight import QuantizedWeight


@gluon.jit
def store_token(
    token,
    sums,
    x_ptr,
    columns_ptr,
    norm_ptr,
    eps,
    offset,
    K: gl.constexpr,
    VALUES: gl.constexpr,
    WIDTH: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Write one row of inputs to shared memory (STEPS, warps, WIDTH) in the order of positions, with its norm applied.

    sums: gets the sums of the PARTS equal parts of each block (STEPS, warps, PARTS), or None

    Loads of up to 8 steps are on their way together, because each takes most of a microsecond.
    """
    WARPS: gl.constexpr = token.shape[1]
    UNROLLED: gl.constexpr = min(STEPS, 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)), 1)
    column = warp * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), 0)
    factor = 1.0
    if norm_ptr is not None:
        squares = gl.zeros([WARPS, WIDTH], gl.float32, layout=layout)
        for start in range(0, STEPS, UNROLLED):
            for i in gl.static_range(UNROLLED):
                at = column + (start + i) * (WARPS * WIDTH)
                x = gl.load(x_ptr + at, mask=at < K, other=0.0).to(gl.float32)
                squares += x * x
        factor = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    for start in range(0, STEPS, UNROLLED):
        found = ()
        for i in gl.static_range(UNROLLED):
            at = column + (start + i) * (WARPS * WIDTH)
            source = at
            if columns_ptr is not None:
                source = gl.load(columns_ptr + at, mask=at < K, other=0)
            x = gl.load(x_ptr + source, mask=at < K, other=0.0)
            if norm_ptr is not None:
                weight = gl.load(norm_ptr + source, mask=at < K, other=0.0).to(gl.float32) + offset
                x = (x.to(gl.float32) * factor * weight).to(x_ptr.dtype.element_ty)
            found += (x,)
        for i in gl.static_range(UNROLLED):
            if start + i < STEPS:
                token.index(start + i).store(by_position(found[i], VALUES))
                if sums is not None:
                    parts = gl.reshape(found[i].to(gl.float32), [WARPS, PARTS, WIDTH // PARTS])
                    sums.index(start + i).store(gl.sum(parts, 2))


@gluon.jit
def add_block(
    acc,
    data,
    scales,
    zeros,
    token,
    sums,
    opaque,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    PARTS: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    B_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    MMA: gl.constexpr,
):
    """acc [warps, BLOCK_N, 8] + the products of a block of weights with the token's part. All arguments belong to one step."""
    WARPS: gl.constexpr = acc.shape[0]
    RUNS: gl.constexpr = token.shape[1] // 32 // PARTS
    found = words_of_runs(data, VALUES)
    # the product has room for 8 tokens, and this one is repeated
    repeats = along(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT))), 2)
    for part in gl.static_range(PARTS):
        total = gl.zeros(acc.shape, gl.float32, layout=MMA) if VALUES != 0 or GROUP < K else acc
        for run in gl.static_range(part * RUNS, (part + 1) * RUNS):
            x = token.slice(32 * run, 32, dim=1).load(gl.SliceLayout(2, X_LAYOUT))
            x, _ = gl.broadcast(gl.expand_dims(x, 2), repeats)
            x = gl.permute(gl.reshape(x, [WARPS, 4, 4, 2, 8]), (0, 2, 1, 3, 4))
            x = gl.convert_layout(gl.reshape(x, [WARPS, 32, 8]), B_LAYOUT)
            w = gl.convert_layout(weights_of_run(found, opaque, run, VALUES, HALF), A_LAYOUT)
            total = mma_v2(w, x, total)
        if VALUES != 0:
            added = gl.expand_dims(sums.slice(part, 1, dim=1).load(gl.SliceLayout(2, MMA)), 2)
            if len(zeros) > 0:
                total -= (zeros[part].to(gl.float32) + 16.0) * added
            else:
                total -= 24.0 * added
        if GROUP < K:
            total *= scales[part].to(gl.float32)
        acc = acc + total if VALUES != 0 or GROUP < K else total
    return acc


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
    PROGRAMS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The product of one token, with the same steps before and after it as in `unpack._quantized_row`.

    GATED: the weights have 2 * N rows. The first half of a tile's rows are gates, the other half the rows that they multiply.
    """
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty == gl.float16
    WIDTH: gl.constexpr = 128 if VALUES == 0 else 256
    STEPS: gl.constexpr = ((K + WIDTH - 1) // WIDTH + WARPS - 1) // WARPS
    PARTS: gl.constexpr = WIDTH // GROUP if GROUP < WIDTH else 1
    STORED: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TILES: gl.constexpr = (N + STORED - 1) // STORED
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    w_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    # a thread has 8 neighbouring positions
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    opaque = gl.num_programs(1)

    w_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, w_layout))))
    w_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, w_layout))))
    w_part = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, w_layout))))
    w_word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(0, w_layout))))
    w_offset = gl.expand_dims(along(w_part, 1), 3) * 16 + gl.expand_dims(along(w_word, 2), 0)
    words = (gl.expand_dims(along(w_row, 2), 3), gl.expand_dims(along(w_warp, 0), 3), w_offset)
    g_row = along(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 1)
    g_warp = along(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 0)
    groups = (g_row, g_warp)
    y_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, mma)))
    out_layout: gl.constexpr = gl.BlockedLayout([1, 1], [STORED, 32 // STORED], [1, WARPS], [0, 1])
    out_row = gl.arange(0, STORED, layout=gl.SliceLayout(1, out_layout))
    tokens = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, out_layout)), 0)

    # no kernel writes weights, so they may be loaded before the previous kernel ends
    first = gl.program_id(0)
    ahead = first
    ahead_step = 0
    blocks = ()
    for _ in gl.static_range(STAGES - 1):
        blocks += (
            load_block(data_ptr, scales_ptr, zeros_ptr, words, groups, ahead, ahead_step, N, K, GROUP, STORED, WIDTH, PARTS),
        )
        ahead += gl.where(ahead_step == STEPS - 1, PROGRAMS, 0)
        ahead_step = gl.where(ahead_step == STEPS - 1, 0, ahead_step + 1)

    wait_for_previous_kernel(PDL)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    token = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, WIDTH], shared)
    sums = None
    if VALUES != 0:
        sums = gl.allocate_shared_memory(gl.float32, [STEPS, WARPS, PARTS], shared)
    store_token(token, sums, x_ptr, columns_ptr, norm_ptr, eps, offset, K, VALUES, WIDTH, STEPS, PARTS)
    sync_threads()  # without this one, Triton would put a barrier into every step

    for tile in range(first, TILES, PROGRAMS):
        # what the end of a tile needs is loaded at its start
        rows = gl.expand_dims(row_of(y_row, tile, N, STORED), 1)
        row = gl.expand_dims(tile * STORED + out_row, 1)
        stored = (row < N) & (tokens < 1)
        if GROUP >= K:
            scale = gl.load(scales_ptr + rows).to(gl.float32)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + rows).to(gl.float32)
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + (tokens + row), mask=stored, other=0.0).to(gl.float32)

        acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
        for step in range(0, STEPS):
            data, scales, zeros = blocks[0]  # type: ignore[misc]
            block = load_block(
                data_ptr, scales_ptr, zeros_ptr, words, groups, ahead, ahead_step, N, K, GROUP, STORED, WIDTH, PARTS
            )
            blocks = blocks[1:] + (block,)  # noqa: RUF005  Gluon unpacks no tuples inside of tuples
            ahead += gl.where(ahead_step == STEPS - 1, PROGRAMS, 0)
            ahead_step = gl.where(ahead_step == STEPS - 1, 0, ahead_step + 1)
            sums_of_step = None
            if VALUES != 0:
                sums_of_step = sums.index(step)
            acc = add_block(
                acc,
                data,
                scales,
                zeros,
                token.index(step),
                sums_of_step,
                opaque,
                GROUP,
                K,
                VALUES,
                HALF,
                PARTS,
                a_layout,
                b_layout,
                x_layout,
                mma,
            )

        y = gl.sum(acc, 0)
        if GROUP >= K:
            y *= scale
        if bias_ptr is not None:
            y += bias
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(y, [2, STORED, 8]), (1, 2, 0)))
            y = activate(gate, KIND) * up
        y = gl.convert_layout(y, out_layout)
        if residual_ptr is not None:
            y = residual + alpha * y
        gl.store(out_ptr + (tokens + row), y.to(out_ptr.dtype.element_ty), mask=stored)


def plan_gemv(product: Product, tile: GemvTile, details: Details) -> Multiply:
    """One launch for one token, of contiguous tensors."""
    n = product.outputs
    tiles = triton.cdiv(n, tile.block_n // 2 if product.gated else tile.block_n)
    programs = min(tiles, tile.programs * product.num_sms)
    launch = Launch(
        _quantized_gemv,
        programs,
        varying=(details.eps, details.offset, details.alpha),
        fixed=(
            n,
            product.k,
            product.group,
            kernel_values(product),
            product.gated,
            ACTIVATION_KINDS[details.activation or "silu"],
            tile.block_n,
            tile.num_stages,
            programs,
            True,
        ),
        options=launch_options(True, tile.num_warps),
    )

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = x.new_empty(1, n) if residual is None else residual
        data, *others = kernel_tensors(weight)
        launch((x, data.view(torch.int32), *others, norm_weight, bias, residual, out))
        return out

    return multiply
