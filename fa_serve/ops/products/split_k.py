"""Products whose sums are split: ranges of columns are summed by different programs, and a second kernel adds the sums.

    multiply = plan_sums(launch, product, splits, alpha)
    y = multiply((x, data, scales), bias, residual)

This is for products with so few tiles that most multiprocessors would have none. The sums are always added in the same order,
so that a result does not change from one call to the next. The number of sums is a part of the tile (`tiles.choose_splits`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.row import store_product

_BLOCK = 512


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


def plan_sums(
    launch: Callable[[tuple[Any, ...]], None], product: Product, splits: int, alpha: float
) -> Callable[[tuple[Any, ...], Tensor | None, Tensor | None], Tensor]:
    """The function of (tensors, bias, residual) that returns y + bias, (m, n) in the product's dtype, for the product y. With a
    residual, it updates the residual in place to residual + alpha * (y + bias) and returns that.

    launch: runs the kernel on (*tensors, bias, residual, out). With splits > 1, out is (splits, m, n) float32, and bias and
            residual are None
    """
    m = product.tokens
    n = product.n
    dtype = product.dtype
    if splits == 1:

        def multiply(tensors: tuple[Any, ...], bias: Tensor | None, residual: Tensor | None) -> Tensor:
            out = tensors[0].new_empty(m, n, dtype=dtype) if residual is None else residual
            launch((*tensors, bias, residual, out))
            return out

        return multiply
    pdl = product.is_programmatic
    add = Launch(
        _sum_splits,
        triton.cdiv(m * n, _BLOCK),
        varying=(m, alpha),
        fixed=(n, splits, _BLOCK, pdl),
        options=launch_options(pdl, 4),
    )

    def multiply_and_add(tensors: tuple[Any, ...], bias: Tensor | None, residual: Tensor | None) -> Tensor:
        sums = tensors[0].new_empty(splits, m, n, dtype=torch.float32)
        launch((*tensors, None, None, sums))
        out = tensors[0].new_empty(m, n, dtype=dtype) if residual is None else residual
        add((sums, bias, residual, out))
        return out

    return multiply_and_add
