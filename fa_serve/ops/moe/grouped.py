"""The products of many pairs on any GPU, in the order of experts: with matrices, or with quantised weights.

A program computes a tile of the pairs of one expert. The grid has room for the most tiles that any routing may need, and a
program whose tile does not exist ends at once. So launches do not depend on the routing: equal calls have equal bits and may be
captured in a CUDA graph.

Weights are read as models keep them: transposed weights only have different strides, and interleaved gates a different step
between rows. Quantised weights have no strides. They become numbers in registers (products/quantised/primitives.py), and a tile
is then the product of weights and inputs instead of inputs and weights. If experts have very many pairs, the matrices of some
experts at a time are dequantised first. Left out: the launches before and after the products (order.py), and the kernels for
Hopper.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.ops.moe.order import ExpertProduct, Places, find_pair_tile, most_tiles
from fa_serve.ops.moe.primitives import (
    expert_tensors,
    gate_numbers,
    gated_values,
    kernel_constants,
    rows_of_outputs,
    rows_of_weights,
    weight_strides,
)
from fa_serve.ops.moe.tiles import GroupedTile
from fa_serve.ops.ops_backend import Gate, Weight
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.dequantise import plan_matrix
from fa_serve.ops.products.quantised.primitives import add_products
from fa_serve.ops.products.quantised.weight import QuantizedWeight

MATRIX_BYTES = 512 << 20
"""The most memory for the matrices of the experts that are dequantised at once."""


@triton.jit
def _grouped_linear(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    kept_ptr,
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
    GATED: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes one tile of the output, for up to BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the output a row for each place in `order`. Output n is gated from the rows n * STEP
    and n * STEP + UP of the weights, which are neighbours in the tile, so that the product itself is the same as without a
    gate. Otherwise x has a row for each place in `order`, the output a row for each pair, and output n is row n of the weights.
    Consecutive programs compute the tiles of the same pairs, so that they share their rows of x in the L2 cache.

    kept_ptr: gets the values before the gate, a row of COLUMNS for each pair; None if nobody needs them

    GROUP, VALUES and PARTS describe weights that have scales, see products/quantised/primitives.py.
    """
    wait_for_previous_kernel(PDL)
    COLUMNS: tl.constexpr = N * (2 if GATED else 1)
    tiles_n = tl.cdiv(COLUMNS, BLOCK_N)
    expert, first, end = find_pair_tile(starts_ptr, tl.program_id(0) // tiles_n, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    places = first + tl.arange(0, BLOCK_M)
    # places past the end repeat the last pair of the expert, or are zeros if MASKED, and are not stored
    pairs = tl.load(order_ptr + tl.minimum(places, end - 1)).to(tl.int64)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = pairs // TOP_K if GATED else tl.minimum(places, end - 1).to(tl.int64)
    which = rows_of_weights(columns, GATED, STEP, UP)
    if scales_ptr is not None:
        # rows past those of the expert belong to another expert, and are not stored
        all_rows = expert.to(tl.int64) * COLUMNS + which
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        sums = add_products(
            sums,
            x_ptr,
            rows,
            places < end,
            w_ptr,
            scales_ptr,
            zeros_ptr,
            None,
            all_rows,
            0,
            K,
            NUM_EXPERTS * COLUMNS,
            K,
            GROUP,
            VALUES,
            PARTS,
            BLOCK_K,
        )
        acc = tl.trans(sums)
    else:
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows[:, None] * K + k[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + which.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            if K % BLOCK_K == 0 and COLUMNS % BLOCK_N == 0:
                x = tl.load(x_ptrs, mask=(places < end)[:, None], other=0.0) if MASKED else tl.load(x_ptrs)
                w = tl.load(w_ptrs)
            else:
                columns_of_x = (k < K - start)[None, :]
                x = tl.load(x_ptrs, mask=columns_of_x & (places < end)[:, None] if MASKED else columns_of_x, other=0.0)
                w = tl.load(w_ptrs, mask=(k < K - start)[:, None] & (columns < COLUMNS)[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * stride_wk
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * stride_be + which, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
    keep = (places < end)[:, None]
    if kept_ptr is not None:
        kept_ptrs = kept_ptr + pairs[:, None] * COLUMNS + which[None, :]
        tl.store(kept_ptrs, acc.to(kept_ptr.dtype.element_ty), mask=keep & (columns < COLUMNS)[None, :])
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        y = gated_values(gate, up, slope, limit, offset, KIND)
        n = tl.program_id(0) % tiles_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_ptrs = out_ptr + places.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=keep & (n < N)[None, :])
    else:
        out_ptrs = out_ptr + pairs[:, None] * N + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=keep & (columns < N)[None, :])


def plan_grouped(product: Product, tile: GroupedTile, weight: Weight, bias: Tensor | None, gate: Gate | None) -> ExpertProduct:
    """One launch. weight, bias: those of a call, for their strides"""
    return _plan_product(product, tile, weight_strides(weight, bias), gate, product.num_experts)


def _plan_product(
    product: Product, tile: GroupedTile, strides: tuple[int, ...], gate: Gate | None, num_experts: int
) -> ExpertProduct:
    """strides: of the weight and of its bias; num_experts: experts in the weight, which may have only some of the product's"""
    n = product.outputs
    pdl = product.is_programmatic
    launch = Launch(
        _grouped_linear,
        most_tiles(product, tile.block_m) * triton.cdiv(product.n, tile.block_n),
        varying=gate_numbers(gate),
        strides=strides,
        fixed=(
            num_experts,
            n,
            product.k,
            product.top_k,
            *rows_of_outputs(gate, n),
            "ieee",
            power_of_2(num_experts),
            *kernel_constants(product),
            *tile[:3],
            tile.masked,
            pdl,
        ),
        options={**launch_options(pdl, tile.num_warps), "num_stages": tile.num_stages},
    )

    def multiply(
        x: Tensor, weight: Weight, bias: Tensor | None, places: Places, out: Tensor, kept: Tensor | None = None
    ) -> None:
        launch((x, *expert_tensors(weight), bias, places.order, places.starts, out, kept))

    return multiply


def plan_dequantised(
    product: Product, tile: GroupedTile, weight: QuantizedWeight, bias: Tensor | None, gate: Gate | None
) -> ExpertProduct:
    """Two launches for some experts at a time, whose matrices take at most MATRIX_BYTES."""
    rows = product.n
    k = product.k
    num_experts = product.num_experts
    at_once = experts_at_once(num_experts, rows * k * product.dtype.itemsize)
    with_matrices = replace(product, values="float", group=0, scales=None, matrix_dtype=product.dtype)
    strides = (rows * k, k, 1, 0 if bias is None else bias.stride(0))
    steps = {
        count: (plan_matrix(product, count * rows), _plan_product(with_matrices, tile, strides, gate, count))
        for count in {min(at_once, num_experts - first) for first in range(0, num_experts, at_once)}
    }

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, places: Places, out: Tensor) -> None:
        for first in range(0, num_experts, at_once):
            last = min(first + at_once, num_experts)
            matrix_of, multiply_matrices = steps[last - first]
            matrices = matrix_of(weight.rows(first * rows, last * rows)).view(last - first, rows, k)
            biases = None if bias is None else bias[first:last]
            multiply_matrices(x, matrices, biases, places._replace(starts=places.starts[first:]), out)

    return multiply


def experts_at_once(num_experts: int, matrix_bytes: int) -> int:
    """How many experts are dequantised at once: as many as MATRIX_BYTES hold, in equal parts.

    The number is a multiple of 4, so that the first element of each part has an address that is a multiple of 16 bytes.
    """
    most = max(MATRIX_BYTES // matrix_bytes // 4 * 4, 4)
    parts = -(-num_experts // most)
    return 4 * -(-num_experts // (4 * parts))
