"""The matrix of a quantised weight, and its product with many tokens: compared with that product, unpacking once is cheap.

    matrix_of = plan_matrix(product)
    y = torch_ops.product(x, matrix_of(weight), bias, residual, alpha)

Left out: few tokens, for which kernels unpack the weights in registers (unpack.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.primitives import (
    kernel_tensors,
    kernel_values,
    load_scale,
    load_words,
    source_columns,
    unpacked_run,
)
from fa_serve.ops.products.quantised.tiles import count_parts, run_width
from fa_serve.ops.products.quantised.weight import BLOCK_COLUMNS, QuantizedWeight
from fa_serve.ops.torch_ops import product as torch_product

_ROWS = 32
"""Rows of weights that a program unpacks."""


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


def plan_matrix(product: Product, rows: int | None = None) -> Callable[[QuantizedWeight], Tensor]:
    """A function that computes what `QuantizedWeight.dequantize` does, (rows, k) in the product's dtype: in one launch, which
    allocates only the result, or by PyTorch where Triton cannot read float8.

    rows: rows of the weight; None means the product's n. Experts are dequantised some at a time
    """
    dtype = product.dtype
    if not product.reads_float8:
        return lambda weight: weight.dequantize(dtype)
    n = product.n if rows is None else rows
    k = product.k
    constants = (product.group, kernel_values(product), count_parts(product, BLOCK_COLUMNS), run_width(product))
    launch = Launch(
        _dequantize,
        triton.cdiv(n, _ROWS) * triton.cdiv(k, BLOCK_COLUMNS),
        varying=(),
        fixed=(n, k, *constants, _ROWS),
        options={"num_warps": 4},
    )

    def matrix_of(weight: QuantizedWeight) -> Tensor:
        out = torch.empty(n, k, dtype=dtype, device=weight.device)
        launch((out, *kernel_tensors(weight)))
        return out

    return matrix_of


def plan_dequantised_product(product: Product, tile: None, details: Details) -> Multiply:
    """One launch that unpacks the matrix, and PyTorch's product with it."""
    matrix_of = plan_matrix(product)
    alpha = details.alpha

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return torch_product(x, matrix_of(weight), bias, residual, alpha)

    return multiply
