"""The experts of a mixture for few tokens: each pair reads its expert's weights by itself, row by row.

Two launches without a sort, as in `products/row.py`: the time is that of reading the weights. `_gated_rows` computes the gated
values of each pair, and `_mixed_rows` the weighted sum over the experts of each token. On Hopper and later GPUs they are
launched programmatically, see `primitives.wait_for_previous_kernel`, and `_mixed_rows` requests its weights while `_gated_rows`
ends. Left out: many tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import Run
from fa_serve.ops.moe.primitives import (
    expert_tensors,
    gate_numbers,
    gated_values,
    kernel_constants,
    rows_of_outputs,
    rows_of_weights,
    weight_strides,
)
from fa_serve.ops.ops_backend import ExpertWeights
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.primitives import add_row_sums, load_units, row_result
from fa_serve.ops.products.table import KernelChoice


@triton.jit
def _load_tile(w_ptr, experts, known, rows, k, strides, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """[PLACES, BLOCK_N, BLOCK_K]: rows and columns k of the (N, K) matrices of several experts; 0 for experts that are not
    `known`."""
    stride_we, stride_wn, stride_wk = strides
    offsets = experts[:, None, None] * stride_we + rows.to(tl.int64)[None, :, None] * stride_wn + k[None, None, :] * stride_wk
    keep = known[:, None, None] & (k < K)[None, None, :]
    if N % BLOCK_N != 0:
        keep = keep & (rows < N)[None, :, None]
    return tl.load(w_ptr + offsets, mask=keep, other=0.0)


@triton.jit
def _load_columns(x_ptr, known, k, K: tl.constexpr):
    """[PLACES, 1, BLOCK_K]: columns k of the input of each place.

    The result has the dimensions of a tile of weights, so a thread loads just the columns of its part of that tile, and threads
    exchange nothing.
    """
    return tl.load((x_ptr + k[None, :])[:, None, :], mask=known[:, None, None] & (k < K)[None, None, :], other=0.0)


@triton.jit
def _dot_matrices(
    x_ptr,
    w_ptr,
    experts,
    known,
    rows,
    strides,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    """[PLACES, BLOCK_N] float32: the products of x (PLACES, K) with rows of the matrices of the expert in each place.

    WAITS: load the first weights, then wait for the kernel that computes x
    """
    PLACES: tl.constexpr = experts.shape[0]
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = (STEPS + 7) // 8  # of up to 8 steps: more would make the code of long rows too long
    UNROLL: tl.constexpr = (STEPS + GROUPS - 1) // GROUPS
    x_ptr += tl.arange(0, PLACES)[:, None] * K
    k = tl.arange(0, BLOCK_K)
    tiles = ()
    for stage in tl.static_range(STAGES):
        tiles += (_load_tile(w_ptr, experts, known, rows, stage * BLOCK_K + k, strides, N, K, BLOCK_N),)
    wait_for_previous_kernel(WAITS)
    x = _load_columns(x_ptr, known, k, K)
    acc = tl.zeros([PLACES, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    # in a loop, ptxas keeps all tiles in the same registers, so it loads a tile only after the last use of the previous one. In
    # unrolled steps it does not
    for group in tl.range(0, GROUPS):
        loaded = tiles
        for step in tl.static_range(UNROLL):
            columns = (group * UNROLL + step) * BLOCK_K + k
            next_x = x
            if GROUPS > 1 or step + 1 < STEPS:
                next_x = _load_columns(x_ptr, known, columns + BLOCK_K, K)
            if GROUPS > 1 or step + STAGES < STEPS:
                ahead = columns + STAGES * BLOCK_K
                loaded += (_load_tile(w_ptr, experts, known, rows, ahead, strides, N, K, BLOCK_N),)
            # a thread adds the products of neighbouring columns, because a sum for each column would take many registers
            products = loaded[step].to(tl.float32) * x.to(tl.float32)
            acc += tl.sum(tl.reshape(products, [PLACES, BLOCK_N, BLOCK_K // VECTOR, VECTOR]), 3)
            x = next_x
        if GROUPS > 1:
            tiles = loaded[UNROLL:]
    return tl.sum(acc, 2)


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
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N / 2 gated elements of one pair, from BLOCK_N rows of the weights."""
    wait_for_previous_kernel(PDL, True)  # `_mixed_rows` reads the router's choice before it waits
    ROWS: tl.constexpr = 2 * N
    blocks = tl.cdiv(ROWS, BLOCK_N)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    expert = tl.load(index_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rows_of_weights(columns, True, STEP, UP)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * stride_be + rows, mask=columns < ROWS, other=0.0).to(tl.float32)
    x_ptr += pair // TOP_K * K
    if scales_ptr is not None:
        weight = (w_ptr, scales_ptr, zeros_ptr)
        all_rows = expert * ROWS + rows
        both = _dot_quantized(x_ptr, weight, all_rows, NUM_EXPERTS * ROWS, K, GROUP, VALUES, PARTS, BLOCK_N, BLOCK_K)
    else:
        one = tl.full([1], 0, tl.int64) + expert
        strides = (stride_we, stride_wn, stride_wk)
        both = _dot_matrices(x_ptr, w_ptr, one, one >= 0, rows, strides, ROWS, K, BLOCK_N, BLOCK_K, VECTOR, STAGES, False)
        both = tl.reshape(both, [BLOCK_N])
    gate, up = tl.split(tl.reshape(both + bias, [BLOCK_N // 2, 2]))
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
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N elements of one token: the weighted sum over its experts. x has a row for each pair.

    The choice of experts and the weights are read before the wait. This is safe because `_gated_rows` is always the previous
    kernel: this kernel starts once every program of `_gated_rows` has let it start, which each of them does only after its own
    wait. So all kernels before `_gated_rows`, including the router, have completed, and only x is still being written. The
    choice is read from the L2 cache, because the L1 cache may hold what an earlier layer had at the same address.
    """
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptr += token * (TOP_K * K)
    index_ptr += token * TOP_K
    weights_ptr += token * TOP_K
    if scales_ptr is not None:
        wait_for_previous_kernel(PDL)
        weight = (w_ptr, scales_ptr, zeros_ptr)
        y = tl.zeros([BLOCK_N], tl.float32)
        # one expert after the other, because unpacking takes many registers
        for i in range(TOP_K):
            expert = tl.load(index_ptr + i).to(tl.int64)
            if (expert >= 0) & (expert < NUM_EXPERTS):
                rows = expert * N + n
                part = _dot_quantized(x_ptr + i * K, weight, rows, NUM_EXPERTS * N, K, GROUP, VALUES, PARTS, BLOCK_N, BLOCK_K)
                if bias_ptr is not None:
                    part += tl.load(bias_ptr + expert * stride_be + n, mask=n < N, other=0.0).to(tl.float32)
                y += tl.load(weights_ptr + i).to(tl.float32) * part
    else:
        place = tl.arange(0, PLACES)
        experts = tl.load(index_ptr + place, mask=place < TOP_K, other=-1, cache_modifier=".cg").to(tl.int64)
        factors = tl.load(weights_ptr + place, mask=place < TOP_K, other=0.0, cache_modifier=".cg").to(tl.float32)
        known = (experts >= 0) & (experts < NUM_EXPERTS)
        bias = tl.zeros([PLACES, BLOCK_N], tl.float32)
        if bias_ptr is not None:
            keep = known[:, None] & (n < N)[None, :]
            bias = tl.load(bias_ptr + experts[:, None] * stride_be + n[None, :], mask=keep, other=0.0).to(tl.float32)
        strides = (stride_we, stride_wn, stride_wk)
        parts = _dot_matrices(x_ptr, w_ptr, experts, known, n, strides, N, K, BLOCK_N, BLOCK_K, VECTOR, STAGES, PDL)
        y = tl.sum(tl.where(known, factors, 0.0)[:, None] * (parts + bias), 0)
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def plan_rows(first: KernelChoice, second: KernelChoice, products: tuple[Product, Product], experts: ExpertWeights) -> Run:
    """A plan of two launches, for a call of `fa_serve.ops.experts` with contiguous tensors.

    products: the gated one, then the one with the down weights
    """
    gated_product, mixed_product = products
    tokens = gated_product.tokens
    num_experts = gated_product.num_experts
    top_k = gated_product.top_k
    width = gated_product.outputs
    hidden = mixed_product.outputs
    pdl = gated_product.is_programmatic
    gated = Launch(
        _gated_rows,
        tokens * top_k * triton.cdiv(2 * width, first.tile.block_n),
        varying=gate_numbers(experts.gate),
        strides=weight_strides(experts.gate_up, experts.gate_up_bias),
        fixed=(
            num_experts,
            width,
            hidden,
            top_k,
            *rows_of_outputs(experts.gate, width)[1:],
            *kernel_constants(gated_product, by_rows=True),
            *first.tile[:4],
            pdl,
        ),
        options=launch_options(pdl, first.tile.num_warps),
    )
    mixed = Launch(
        _mixed_rows,
        tokens * triton.cdiv(hidden, second.tile.block_n),
        varying=(),
        strides=weight_strides(experts.down, experts.down_bias),
        fixed=(
            num_experts,
            hidden,
            width,
            top_k,
            power_of_2(top_k),
            *kernel_constants(mixed_product, by_rows=True),
            *second.tile[:4],
            pdl,
        ),
        options=launch_options(pdl, second.tile.num_warps),
    )

    def run(tensors: tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor]) -> None:
        x, index, weights, experts, out = tensors
        h = x.new_empty(tokens * top_k, width)
        gated((x, *expert_tensors(experts.gate_up), experts.gate_up_bias, index, h))
        # nothing may be launched between the two, see `_mixed_rows`
        mixed((h, *expert_tensors(experts.down), experts.down_bias, index, weights, out))

    return run
