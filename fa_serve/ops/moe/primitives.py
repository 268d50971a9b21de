"""What the kernels of a mixture's experts share: gates, rows of weights, and how a weight is passed to a kernel.

Kernels take a weight as data, scales and zero points. A matrix has strides instead of scales, so the constants that describe
quantised weights (GROUP, VALUES, PARTS, see products/quantised/primitives.py) mean nothing for it. Left out: kernels and tiles.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.plans import facts
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import Gate, Weight
from fa_serve.ops.products.problem import Product, converts_float8
from fa_serve.ops.products.quantised.primitives import kernel_values
from fa_serve.ops.products.quantised.tiles import count_parts, unit_columns
from fa_serve.ops.products.quantised.weight import BLOCK_COLUMNS, QuantizedWeight


@triton.jit
def gated_values(gate, up, slope, limit, offset, KIND: tl.constexpr):
    """`ops.Gate` of float32 values. Comparisons, unlike minimum and maximum, keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    return activate(gate * slope, KIND) / slope * (up + offset)


@triton.jit
def rows_of_weights(columns, GATED: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr):
    """The rows of the weights in the columns of a tile. If GATED, two neighbouring columns give one output."""
    rows = columns
    if GATED and UP != 1:  # interleaved rows are neighbours already, and contiguous where the weights are transposed
        rows = columns // 2 * STEP + columns % 2 * UP
    return rows


def gate_numbers(gate: Gate | None) -> tuple[float, float, float]:
    """The slope, limit and offset of a gate. A product without a gate ignores them."""
    return (1.0, math.inf, 0.0) if gate is None else (gate.slope, gate.limit, gate.offset)


def rows_of_outputs(gate: Gate | None, width: int) -> tuple[bool, int, int, int]:
    """GATED, STEP, UP and KIND of the kernels: the rows of the weights that an output is gated from, and the activation."""
    if gate is None:
        return (False, 1, 0, 0)
    step, up = (2, 1) if gate.interleaved else (1, width)
    return (True, step, up, ACTIVATION_KINDS[gate.activation])


def weight_strides(weight: Weight, bias: Tensor | None) -> tuple[int, ...]:
    """The strides of a matrix, which are 0 for quantised weights, and of its bias."""
    of_weight = (0, 0, 0) if isinstance(weight, QuantizedWeight) else weight.stride()
    return (*of_weight, 0 if bias is None else bias.stride(0))


def weight_facts(weight: Weight) -> tuple[object, ...]:
    """Everything about a weight that a plan depends on."""
    if isinstance(weight, QuantizedWeight):
        aligned = weight.data.data_ptr() % 16 == 0
        return (*facts(weight.data, weight.scales, weight.zeros), weight.group_size, weight.width, aligned)
    return (*facts(weight), weight.data_ptr() % 16 == 0)


def expert_tensors(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a kernel reads of a weight: data, scales and zero points."""
    if isinstance(weight, QuantizedWeight):
        as_bytes = weight.values == "float8" and not converts_float8(spec.arch_of(weight.device))
        return weight.data.view(torch.uint8) if as_bytes else weight.data, weight.scales, weight.zeros
    return weight, None, None


def kernel_constants(product: Product, *, by_rows: bool = False) -> tuple[int, int, int]:
    """GROUP, VALUES and PARTS of the kernels. by_rows: columns are read in units instead of blocks"""
    if product.values == "float":
        return 0, 0, 1
    unit = unit_columns(product) if by_rows else BLOCK_COLUMNS
    return product.group, kernel_values(product), count_parts(product, unit)
