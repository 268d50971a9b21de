"""The rows of the table that PyTorch's own functions compute: products with matrices, and products of float8 with float8."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.ops.elementwise.addition import launch_add
from fa_serve.ops.ops_backend import RoundedRows
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.torch_ops import product as torch_product


def plan_matmul(product: Product, tile: None, details: Details) -> Multiply:
    alpha = details.alpha

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        return torch_product(x, weight, bias, residual, alpha)

    return multiply


def plan_scaled_mm(product: Product, tile: None, details: Details) -> Multiply:
    alpha = details.alpha

    def multiply(
        x: RoundedRows, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        # no fast accumulation: tensor cores add float8 products in about 14 bits, unless sums are promoted to float32
        y = torch._scaled_mm(
            x.data, weight.data.t(), x.scales, weight.scales.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=False
        )
        return y if residual is None else launch_add(residual, y, alpha)

    return multiply


def plan_torch(product: Product, tile: None, details: Details) -> Multiply:
    """On a GPU, for float8 weights that Triton cannot read. Other devices have `torch_ops.py`."""
    alpha = details.alpha

    def multiply(
        x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return torch_product(x, weight.dequantize(x.dtype), bias, residual, alpha)

    return multiply
