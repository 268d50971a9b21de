"""`fa_serve.ops.experts` as an operator of PyTorch, `torch.ops.fa_serve.experts`.

    y = call_operator(x, top_k_index, top_k_weights, weights)

A graph records the operator as one node, which runs what an eager call runs. Deterministic mode sees it among the operators of
a model and asks for invariant rows. Left out: gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.ops_backend import ExpertWeights, Gate, Weight
from fa_serve.ops.products.quantised.weight import QuantizedWeight

_NAME = "fa_serve::experts"


def call_operator(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.experts`. The last bits of a row may depend on the other rows."""
    gate_up, gate_up_bias, down, down_bias, gate = experts
    weights = (*_flat(gate_up), gate_up_bias, *_flat(down), down_bias)
    y: Tensor = torch.ops.fa_serve.experts(x, top_k_index, top_k_weights, *weights, *gate)
    return y


def compute(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_zeros: Tensor | None,
    gate_up_group: int,
    gate_up_width: int,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_zeros: Tensor | None,
    down_group: int,
    down_width: int,
    down_bias: Tensor | None,
    *gate: Any,
    invariant: bool = False,
) -> Tensor:
    """What the operator runs. Its arguments are those of `fa_serve.ops.experts`, flattened."""
    first = _weight(gate_up, gate_up_scales, gate_up_zeros, gate_up_group, gate_up_width)
    second = _weight(down, down_scales, down_zeros, down_group, down_width)
    experts = ExpertWeights(first, gate_up_bias, second, down_bias, Gate(*gate))
    return ops.experts(x, top_k_index, top_k_weights, experts, invariant=invariant)


def _flat(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    """A weight as arguments of the operator. A matrix has a width of 0."""
    if isinstance(weight, QuantizedWeight):
        return weight.data, weight.scales, weight.zeros, weight.group_size, weight.width
    return weight, None, None, 0, 0


def _weight(data: Tensor, scales: Tensor | None, zeros: Tensor | None, group_size: int, width: int) -> Weight:
    return data if scales is None else QuantizedWeight(data, scales, group_size, width, zeros)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# `torch.library.custom_op` would cost a call some 20 us more
_WEIGHT = "Tensor {0}, Tensor? {0}_scales, Tensor? {0}_zeros, int {0}_group, int {0}_width, Tensor? {0}_bias, "
torch.library.define(
    _NAME,
    f"(Tensor x, Tensor top_k_index, Tensor top_k_weights, {_WEIGHT.format('gate_up')}{_WEIGHT.format('down')}"
    "str activation, bool interleaved, float slope, float limit, float offset) -> Tensor",
)
torch.library.impl(_NAME, "CompositeExplicitAutograd", compute)
torch.library.register_fake(_NAME, _fake)
