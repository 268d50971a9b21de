"""Products with quantised weights: of one token, of several tokens, and the matrix itself for many tokens.

Weights become numbers in registers, see primitives.py. The product of one token loads long stretches of rows, two
tiles ahead of the one that it uses. The product of several tokens is computed as weights times inputs, so that rows of
weights, and not a few padded tokens, fill the rows of the tensor cores, and unpacked weights go to them from registers. Where
it has few tiles, ranges of columns are summed by different programs, and a second kernel adds the sums in their order, so a
result does not change from one call to the next. Left out: activations in float8 (rounding.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, multiprocessors, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.quantised.primitives import (
    add_products,
    add_row_sums,
    count_parts,
    kernel_tensors,
    kernel_values,
    load_scale,
    load_units,
    load_words,
    product_facts,
    row_result,
    run_width,
    source_columns,
    unit_columns,
    unpacked_run,
)
from fa_serve.ops.products.quantised.weight import BLOCK, QuantizedWeight
from fa_serve.ops.products.row import store_product


class Tile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by num_warps warps with num_stages loads in flight.

    splits: ranges of columns that are summed by different programs
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


class RowTile(NamedTuple):
    """block_n rows of weights by block_k columns, computed by num_warps warps."""

    block_n: int
    block_k: int
    num_warps: int


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
    """The product of one token, with the same steps before and after it as `linear_kernel._linear_row`.

    GATED: the weights have 2 * N rows; the first N give the gates, the others what the gates are multiplied with.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    UNIT: tl.constexpr = 256 if VALUES != 0 else 32
    RUNS: tl.constexpr = UNIT // 32
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows of gates that do not exist are rows of the other half, whose results are not stored
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


@triton.jit(do_not_specialize=["M"])
def _sum_splits(
    sums_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    alpha,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program adds the sums (SPLITS, M, N) of BLOCK outputs, always in the same order, then the bias and the residual."""
    wait_for_previous_kernel(PDL)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = offsets < M * N
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(sums_ptr + split * M * N + offsets, mask=keep, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offsets % N, mask=keep, other=0.0).to(tl.float32)
    store_product(y, out_ptr, residual_ptr, alpha, offsets, keep)


@triton.jit
def _dequantize(
    out_ptr,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    columns_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program writes a block of 256 columns of BLOCK_N rows."""
    BLOCKS: tl.constexpr = (K + 255) // 256
    RUNS: tl.constexpr = 256 // WIDTH // PARTS
    rows = tl.program_id(0) // BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(0) % BLOCKS * 256
    words = load_words(data_ptr, rows, block, N, K, VALUES)
    for part in tl.static_range(PARTS):
        scale, zero = load_scale(scales_ptr, zeros_ptr, rows, block + part * (256 // PARTS), N, K, GROUP)
        for run in tl.static_range(part * RUNS, part * RUNS + RUNS):
            start = block + WIDTH * run
            w = unpacked_run(words, data_ptr, scale, zero, rows, start, N, K, VALUES, run, WIDTH)
            keep = (rows < N)[:, None] & (start + tl.arange(0, WIDTH) < K)[None, :]
            offsets = rows.to(tl.int64)[:, None] * K + source_columns(columns_ptr, start, K, WIDTH)[None, :]
            tl.store(out_ptr + offsets, w.to(out_ptr.dtype.element_ty), mask=keep)


def launch_quantized_row(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear`, with x of (1, k) and all tensors contiguous. One launch."""
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    gated = activation is not None
    n, k = weight.shape
    n = n // 2 if gated else n
    out = x.new_empty(1, n) if residual is None else residual
    key = (
        "quantized_row",
        *product_facts(x, weight, bias, residual),
        activation,
        eps,
        offset,
        alpha,
        None if norm_weight is None else norm_weight.dtype,
    )
    run = PLANS.get(key)
    if run is None:
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        tile = row_tile(multiprocessors(x.device, 1), n, k, weight.is_packed, gated)
        kind = ACTIVATION_KINDS[activation or "silu"]
        unit = unit_columns(weight)
        launch = Launch(
            _quantized_row,
            triton.cdiv(n, tile.block_n),
            varying=(eps, offset, alpha),
            fixed=(
                n,
                k,
                weight.group_size,
                kernel_values(weight),
                count_parts(weight, unit),
                gated,
                kind,
                tile.block_n,
                tile.block_k // unit,
                pdl,
            ),
            options=launch_options(pdl, tile.num_warps),
        )
        run = PLANS.add(key, launch)
    run((x, *kernel_tensors(weight), norm_weight, bias, residual, out))
    return out


def launch_quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """x @ weight.T + bias, (m, n). With `residual`, alpha times that is added to it in place. One launch, or two
    where the sums are split.

    x, residual: contiguous
    """
    m, k = x.shape
    n = weight.shape[0]
    out = x.new_empty(m, n) if residual is None else residual
    if m == 0:
        return out
    tile = linear_tile(multiprocessors(x.device, 1), m, n, k, x.element_size())
    key = ("quantized_linear", *product_facts(x, weight, bias, residual), alpha)
    run = PLANS.get(key)
    if run is None:
        parts = count_parts(weight, BLOCK)
        launch = Launch(
            _quantized_linear,
            triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n) * tile.splits,
            varying=(m, alpha),
            fixed=(
                n,
                k,
                weight.group_size,
                kernel_values(weight),
                parts,
                run_width(weight),
                tile.block_m,
                tile.block_n,
                tile.splits,
            ),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )
        run = PLANS.add(key, launch)
    if tile.splits == 1:
        run((x, *kernel_tensors(weight), bias, residual, out))
        return out
    sums = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    run((x, *kernel_tensors(weight), None, None, sums))
    return launch_sum_splits(sums, bias, residual, out, alpha)


def launch_sum_splits(sums: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, alpha: float) -> Tensor:
    """out, (m, n): the sum of sums, (splits, m, n) float32, and what `launch_quantized_linear` adds to it. One launch."""
    splits, m, n = sums.shape
    key = (
        "sum_splits",
        sums.shape,
        sums.get_device(),
        out.dtype,
        alpha,
        None if bias is None else bias.dtype,
        residual is None,
    )
    run = PLANS.get(key)
    if run is None:
        pdl = spec.has_programmatic_launch(spec.arch_of(sums.device))
        fixed = (n, splits, 512, pdl)
        options = launch_options(pdl, 4)
        launch = Launch(_sum_splits, triton.cdiv(m * n, 512), varying=(m, alpha), fixed=fixed, options=options)
        run = PLANS.add(key, launch)
    run((sums, bias, residual, out))
    return out


def launch_dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """What `QuantizedWeight.dequantize` computes. One launch, and no memory but the result."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    key = ("dequantize", *product_facts(out, weight, None, None))
    run = PLANS.get(key)
    if run is None:
        fixed = (n, k, weight.group_size, kernel_values(weight), count_parts(weight, BLOCK), run_width(weight), 32)
        launch = Launch(
            _dequantize, triton.cdiv(n, 32) * triton.cdiv(k, 256), varying=(), fixed=fixed, options={"num_warps": 4}
        )
        run = PLANS.add(key, launch)
    run((out, *kernel_tensors(weight)))
    return out


def row_tile(num_sms: int, n: int, k: int, is_packed: bool, gated: bool) -> RowTile:
    """The tile of the product of one token.

    A thread loads 16 bytes of a row at once, so 4 warps have 512 columns of float8 weights, and 8 warps 1,024 columns of 4-bit
    weights. In us on one H200, 4-bit: 16 x 1024 takes 14.2, 45.2 and 30.1 for 6144 x 4096, 28672 x 4096 and 4096 x 14336, and
    16 x 512 takes 16.3, 44.9 and more than 35. Float8 in 8 x 512: 18.3, 59.4 and 37.1. Fewer rows do not pay off while every
    multiprocessor has a program.
    """
    block_n = (16 if is_packed else 8) // (2 if gated else 1)
    while block_n > 8 and n // block_n < num_sms:
        block_n //= 2
    block_k = 1024 if is_packed else 512
    while block_k > 256 and block_k >= 2 * k:
        block_k //= 2
    warps = 8 if block_k == 1024 else 4
    return RowTile(block_n, block_k, warps)


@lru_cache(maxsize=1024)
def linear_tile(num_sms: int, m: int, n: int, k: int, element_size: int) -> Tile:
    """The tile of the product of m tokens with n rows of weights. The fastest of five on one H200, for 2 to 128 tokens.

    Up to 64 tokens fit into one tile, so weights are read once. float32, which tensor cores do not multiply, takes small tiles.
    Larger ones spill registers before Hopper. Sums are split until every multiprocessor has two programs, but not below 1,024
    columns.
    """
    if element_size == 4:
        return Tile(16, 32, 4, 2, 1)
    block_m = min(64, max(16, power_of_2(m)))
    programs = triton.cdiv(m, block_m) * triton.cdiv(n, 64)
    splits = 1
    while splits < 8 and programs * splits < 2 * num_sms and k >= 2048 * splits:
        splits *= 2
    return Tile(block_m, 64, 4, 3 if block_m == 16 else 2, splits)
