"""Products with quantised weights on any GPU: of one token, and of several tokens.

Weights become numbers in registers, see primitives.py. The product of one token loads long stretches of rows, two tiles ahead
of the one that it uses. The product of several tokens is computed as weights times inputs. Then rows of weights, instead of a
few padded tokens, fill the rows of the tensor cores, and unpacked weights go to them from registers. If there are few tiles,
sums are split (split_k.py). Left out: more tokens (dequantise.py), activations in float8 (rounding.py), and the kernels for
Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.primitives import (
    add_products,
    add_row_sums,
    kernel_tensors,
    kernel_values,
    load_units,
    row_result,
)
from fa_serve.ops.products.quantised.tiles import UnpackRowTile, UnpackTile, count_parts, run_width, unit_columns
from fa_serve.ops.products.quantised.weight import BLOCK_COLUMNS, QuantizedWeight
from fa_serve.ops.products.row import store_product
from fa_serve.ops.products.split_k import plan_sums


@triton.jit
def _quantized_row(
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
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product of one token, with the same steps before and after it as `row._linear_row`.

    GATED: the weights have 2 * N rows; the first N give the gates, the others what the gates are multiplied with.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    UNIT: tl.constexpr = 256 if VALUES != 0 else 32
    RUNS: tl.constexpr = UNIT // 32
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the last gate are rows of the other half; their results are not stored
    up_rows = rows + N
    units = tl.arange(0, UNITS)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    loaded = load_units(data_ptr, scales_ptr, zeros_ptr, rows, 0, units, ROWS, K, GROUP, VALUES, PARTS)
    ahead = load_units(data_ptr, scales_ptr, zeros_ptr, rows, UNITS, units, ROWS, K, GROUP, VALUES, PARTS)
    loaded_up = loaded
    ahead_up = ahead
    if GATED:
        loaded_up = load_units(data_ptr, scales_ptr, zeros_ptr, up_rows, 0, units, ROWS, K, GROUP, VALUES, PARTS)
        ahead_up = load_units(data_ptr, scales_ptr, zeros_ptr, up_rows, UNITS, units, ROWS, K, GROUP, VALUES, PARTS)
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([BLOCK_N, UNITS, 32] if VALUES != 0 else [BLOCK_N, UNITS], tl.float32)
    acc_up = acc
    squares = tl.zeros([UNITS, 32], tl.float32)
    for start in tl.range(0, K, UNITS * UNIT):
        # two tiles are in flight while another is used
        first = start // UNIT + 2 * UNITS
        further = load_units(data_ptr, scales_ptr, zeros_ptr, rows, first, units, ROWS, K, GROUP, VALUES, PARTS)
        further_up = further
        if GATED:
            further_up = load_units(data_ptr, scales_ptr, zeros_ptr, up_rows, first, units, ROWS, K, GROUP, VALUES, PARTS)
        xs = ()
        for run in tl.static_range(RUNS):
            cols = start + 32 * run + units[:, None] * UNIT + tl.arange(0, 32)[None, :]
            keep = cols < K
            source = cols
            if columns_ptr is not None:
                source = tl.load(columns_ptr + cols, mask=keep, other=0)
            x = tl.load(x_ptr + source, mask=keep, other=0.0).to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x *= tl.load(norm_ptr + source, mask=keep, other=0.0).to(tl.float32) + offset
            xs += (x,)
        acc = add_row_sums(acc, loaded, xs, VALUES, PARTS)
        if GATED:
            acc_up = add_row_sums(acc_up, loaded_up, xs, VALUES, PARTS)
        loaded = ahead
        loaded_up = ahead_up
        ahead = further
        ahead_up = further_up
    factor = 1.0
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    y = row_result(acc, scales_ptr, bias_ptr, rows, factor, ROWS, K, GROUP, VALUES)
    if GATED:
        y = activate(y, KIND) * row_result(acc_up, scales_ptr, bias_ptr, up_rows, factor, ROWS, K, GROUP, VALUES)
    store_product(y, out_ptr, residual_ptr, alpha, rows, rows < N)


@triton.jit(do_not_specialize=["M"])
def _quantized_linear(
    x_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    columns_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    alpha,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A program computes BLOCK_N outputs of BLOCK_M tokens. Consecutive programs read the same weights.

    With SPLITS > 1 it computes the sum of one of SPLITS ranges of columns. out is then (SPLITS, M, N) float32, and there is
    neither bias nor residual; `_sum_splits` does the rest.
    """
    SPAN: tl.constexpr = ((K + 255) // 256 + SPLITS - 1) // SPLITS * 256
    tiles_m = tl.cdiv(M, BLOCK_M)
    tokens = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(0) // tiles_m % SPLITS
    rows = tl.program_id(0) // tiles_m // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    last = tl.minimum(split * SPAN + SPAN, K)
    acc = add_products(
        acc,
        x_ptr,
        tokens,
        tokens < M,
        data_ptr,
        scales_ptr,
        zeros_ptr,
        columns_ptr,
        rows,
        split * SPAN,
        last,
        N,
        K,
        GROUP,
        VALUES,
        PARTS,
        WIDTH,
    )
    inside = rows < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    offsets = tokens[None, :] * N + rows[:, None]
    stored = inside[:, None] & (tokens < M)[None, :]
    store_product(acc, out_ptr + split.to(tl.int64) * M * N, residual_ptr, alpha, offsets, stored)


def plan_unpack_row(product: Product, tile: UnpackRowTile, details: Details) -> Multiply:
    """One launch for one token, of contiguous tensors."""
    n = product.outputs
    pdl = product.is_programmatic
    unit = unit_columns(product)
    launch = Launch(
        _quantized_row,
        triton.cdiv(n, tile.block_n),
        varying=(details.eps, details.offset, details.alpha),
        fixed=(
            n,
            product.k,
            product.group,
            kernel_values(product),
            count_parts(product, unit),
            product.gated,
            ACTIVATION_KINDS[details.activation or "silu"],
            tile.block_n,
            tile.block_k // unit,
            pdl,
        ),
        options=launch_options(pdl, tile.num_warps),
    )

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = x.new_empty(1, n) if residual is None else residual
        launch((x, *kernel_tensors(weight), norm_weight, bias, residual, out))
        return out

    return multiply


def plan_unpack(product: Product, tile: UnpackTile, details: Details) -> Multiply:
    """One launch for contiguous tensors, or two where the sums are split."""
    m = product.tokens
    launch = Launch(
        _quantized_linear,
        triton.cdiv(m, tile.block_m) * triton.cdiv(product.n, tile.block_n) * tile.splits,
        varying=(m, details.alpha),
        fixed=(
            product.n,
            product.k,
            product.group,
            kernel_values(product),
            count_parts(product, BLOCK_COLUMNS),
            run_width(product),
            tile.block_m,
            tile.block_n,
            tile.splits,
        ),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    sums = plan_sums(launch, product, tile.splits, details.alpha)

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return sums((x, *kernel_tensors(weight)), bias, residual)

    return multiply
