"""What the kernels of a mixture's experts share: gates, rows of weights, prefetches, and how a weight is passed to a kernel.

Kernels take a weight as data, scales and zero points. A matrix has strides instead of scales, so the constants that describe
quantised weights (GROUP, VALUES, PARTS, see quantized_primitives.py) say nothing about it. Left out: kernels and tiles.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.plan import facts
from fa_serve.ops.activation_kernel import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import Gate, Weight
from fa_serve.ops.quantized_choice import converts_float8
from fa_serve.ops.quantized_primitives import count_parts, kernel_values, unit_columns
from fa_serve.ops.quantized_weight import BLOCK, QuantizedWeight

_PREFETCHED = 32 << 20
"""The most bytes that a launch requests for the L2 cache, which has 50 MB on H100 and H200. This is not measured."""


@triton.jit
def gated_values(gate, up, slope, limit, offset, KIND: tl.constexpr):
    """`ops.Gate` of float32 values. Comparisons, unlike minimum and maximum, keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    return activate(gate * slope, KIND) / slope * (up + offset)


@triton.jit
def rows_of_weights(columns, GATED: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr):
    """The rows of the weights in the columns of a tile. Gated, two columns that are neighbours give one output."""
    rows = columns
    if GATED and UP != 1:  # interleaved rows are neighbours already, and contiguous where the weights are transposed
        rows = columns // 2 * STEP + columns % 2 * UP
    return rows


@triton.jit
def prefetch_share(w_ptr, index_ptr, block, blocks, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARE: tl.constexpr):
    """Request a share of the weights of each of a token's experts for the L2 cache, in one instruction for an expert.

    SHARE: its bytes, a multiple of 16, and the bytes of an expert. Where rows are contiguous, it is what a program reads
    """
    BYTES: tl.constexpr = SHARE[0]
    EXPERT_BYTES: tl.constexpr = SHARE[1]
    # each thread has one element, or it would repeat the request of another
    place = tl.arange(0, tl.extra.cuda.num_threads())
    expert = tl.load(index_ptr + place, mask=place < TOP_K, other=-1, cache_modifier=".cg").to(tl.int64)
    begin = block.to(tl.int64) * EXPERT_BYTES // blocks
    address = (w_ptr.to(tl.int64) + expert * EXPERT_BYTES + begin) & -16
    size = tl.where((expert >= 0) & (expert < NUM_EXPERTS), BYTES, 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.b32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    """The strides of a matrix, of which quantised weights have none, and of its bias."""
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


def kernel_constants(weight: Weight, *, by_rows: bool = False) -> tuple[int, int, int]:
    """GROUP, VALUES and PARTS of the kernels. by_rows: columns are read in units, and not in blocks"""
    if isinstance(weight, QuantizedWeight):
        unit = unit_columns(weight) if by_rows else BLOCK
        return weight.group_size, kernel_values(weight), count_parts(weight, unit)
    return 0, 0, 1


def prefetched_share(weight: Weight, num_experts: int, pairs: int, blocks: int) -> tuple[int, int]:
    """SHARE of `prefetch_share`: nothing, if an expert is not one piece of memory."""
    data = weight.data if isinstance(weight, QuantizedWeight) else weight
    of_expert = data.nbytes // num_experts
    if isinstance(weight, Tensor) and weight.stride(0) * weight.element_size() != of_expert:
        return (0, 0)
    return (min(of_expert, _PREFETCHED // pairs) // blocks // 16 * 16, of_expert)
