"""The experts of a mixture for few tokens: each pair reads its expert's weights by itself, row by row.

Two launches without a sort, in the manner of `linear_kernel.py`: there the time is that of reading the weights. `_gated_rows`
computes the gated values of each pair, and `_mixed_rows` the weighted sum over the experts of each token. On Hopper and later
GPUs they are launched programmatically, see `primitives.wait_for_previous_kernel`. Left out: many tokens, and when there are
few of them (experts_kernel.py).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import Launch, launch_options, power_of_2
from fa_serve.backends.plan import Run
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.ops.experts_primitives import (
    expert_tensors,
    gate_numbers,
    gated_values,
    kernel_constants,
    rows_of_outputs,
    rows_of_weights,
    weight_strides,
)
from fa_serve.ops.ops_backend import ExpertWeights, Weight
from fa_serve.ops.quantized_primitives import add_row_sums, load_units, row_result, unit_columns
from fa_serve.ops.quantized_weight import QuantizedWeight


class RowTile(NamedTuple):
    """block_n rows of the weights by block_k elements of each."""

    block_n: int
    block_k: int


@triton.jit
def _dot_rows(
    x_ptr,
    weight,
    strides,
    expert,
    rows,
    known,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N] float32: the products of x (K,) with those rows of an expert's (N, K) weights that are known, and their biases.

    weight:  pointers to data, scales, zero points and biases; a matrix has no scales
    strides: of a matrix by expert, row and column, and of biases by expert
    """
    w_ptr, scales_ptr, zeros_ptr, bias_ptr = weight
    stride_we, stride_wn, stride_wk, stride_be = strides
    if bias_ptr is not None:
        bias_ptr += expert * stride_be
    if scales_ptr is not None:
        quantized = (w_ptr, scales_ptr, zeros_ptr)
        y = _dot_quantized(x_ptr, quantized, expert * N + rows, NUM_EXPERTS * N, K, GROUP, VALUES, PARTS, BLOCK_N, BLOCK_K)
    else:
        y = _dot_matrix(x_ptr, w_ptr + expert * stride_we, rows, known, stride_wn, stride_wk, K, BLOCK_N, BLOCK_K)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=known, other=0.0).to(tl.float32)
    return y


@triton.jit
def _dot_matrix(x_ptr, w_ptr, rows, known, stride_wn, stride_wk, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The products of x with known rows of a matrix."""
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn + k[None, :] * stride_wk
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        keep = k < K - start
        x = tl.load(x_ptr + start + k, mask=keep, other=0.0).to(tl.float32)
        acc += tl.load(w_ptrs, mask=known[:, None] & keep[None, :], other=0.0).to(tl.float32) * x[None, :]
        w_ptrs += BLOCK_K * stride_wk
    return tl.sum(acc, 1)


@triton.jit
def _dot_quantized(
    x_ptr,
    weight,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of x with rows of (N, K) quantised weights, which are those of all experts."""
    data_ptr, scales_ptr, zeros_ptr = weight
    UNIT: tl.constexpr = 256 if VALUES != 0 else 32
    UNITS: tl.constexpr = BLOCK_K // UNIT
    units = tl.arange(0, UNITS)
    acc = tl.zeros([BLOCK_N, UNITS, 32] if VALUES != 0 else [BLOCK_N, UNITS], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        loaded = load_units(data_ptr, scales_ptr, zeros_ptr, rows, start // UNIT, units, N, K, GROUP, VALUES, PARTS)
        xs = ()
        for run in tl.static_range(UNIT // 32):
            columns = start + 32 * run + units[:, None] * UNIT + tl.arange(0, 32)[None, :]
            xs += (tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32),)
        acc = add_row_sums(acc, loaded, xs, VALUES, PARTS)
    return row_result(acc, scales_ptr, None, rows, 1.0, N, K, GROUP, VALUES)


@triton.jit
def _gated_rows(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    slope,
    limit,
    offset,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N / 2 gated elements of one pair, from BLOCK_N rows of the weights."""
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(2 * N, BLOCK_N)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    expert = tl.load(index_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    both = _dot_rows(
        x_ptr + pair // TOP_K * K,
        (w_ptr, scales_ptr, zeros_ptr, bias_ptr),
        (stride_we, stride_wn, stride_wk, stride_be),
        expert,
        rows_of_weights(columns, True, STEP, UP),
        columns < 2 * N,
        NUM_EXPERTS,
        2 * N,
        K,
        GROUP,
        VALUES,
        PARTS,
        BLOCK_N,
        BLOCK_K,
    )
    gate, up = tl.split(tl.reshape(both, [BLOCK_N // 2, 2]))
    y = gated_values(gate, up, slope, limit, offset, KIND)
    n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _mixed_rows(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N elements of one token: the weighted sum over its experts. x has a row for each pair."""
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i in range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(index_ptr + pair).to(tl.int64)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            y = _dot_rows(
                x_ptr + pair * K,
                (w_ptr, scales_ptr, zeros_ptr, bias_ptr),
                (stride_we, stride_wn, stride_wk, stride_be),
                expert,
                n,
                n < N,
                NUM_EXPERTS,
                N,
                K,
                GROUP,
                VALUES,
                PARTS,
                BLOCK_N,
                BLOCK_K,
            )
            acc += tl.load(weights_ptr + pair).to(tl.float32) * y
    tl.store(out_ptr + token * N + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)


def plan_rows(x: Tensor, index: Tensor, experts: ExpertWeights) -> Run:
    """A plan of two launches, for a call of `fa_serve.ops.experts` with contiguous tensors."""
    tokens, top_k = index.shape
    num_experts, hidden, width = experts.sizes
    first = row_tile(experts.gate_up)
    second = row_tile(experts.down)
    pdl = spec.arch_of(x.device) >= 90
    options = launch_options(pdl, 4)
    gated = Launch(
        _gated_rows,
        tokens * top_k * triton.cdiv(2 * width, first.block_n),
        varying=gate_numbers(experts.gate),
        strides=weight_strides(experts.gate_up, experts.gate_up_bias),
        fixed=(
            num_experts,
            width,
            hidden,
            top_k,
            *rows_of_outputs(experts.gate, width)[1:],
            *kernel_constants(experts.gate_up, by_rows=True),
            *first,
            pdl,
        ),
        options=options,
    )
    mixed = Launch(
        _mixed_rows,
        tokens * triton.cdiv(hidden, second.block_n),
        varying=(),
        strides=weight_strides(experts.down, experts.down_bias),
        fixed=(num_experts, hidden, width, top_k, *kernel_constants(experts.down, by_rows=True), *second, pdl),
        options=options,
    )

    def run(tensors: tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor]) -> None:
        x, index, weights, experts, out = tensors
        h = x.new_empty(tokens * top_k, width)
        gated((x, *expert_tensors(experts.gate_up), experts.gate_up_bias, index, h))
        mixed((h, *expert_tensors(experts.down), experts.down_bias, index, weights, out))

    return run


def row_tile(weight: Weight) -> RowTile:
    """The tile of a program for few tokens. 8 rows of 512 columns reach 1.08 of the time of reading matrices on one H200.

    Quantised weights take the same tile, in whole units of columns. That is not measured.
    """
    least = unit_columns(weight) if isinstance(weight, QuantizedWeight) else 1
    return RowTile(8, max(least, min(512, power_of_2(weight.shape[-1]))))
