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
from fa_serve.ops.ops_backend import ExpertWeights, Gate

_NAME = "fa_serve::experts"


def call_operator(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.experts`, whose rows may depend on each other in their last bits."""
    *tensors, gate = experts
    y: Tensor = torch.ops.fa_serve.experts(x, top_k_index, top_k_weights, *tensors, *gate)
    return y


def compute(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *gate: Any,
    invariant: bool = False,
) -> Tensor:
    """What the operator runs. Its arguments are those of `fa_serve.ops.experts`, flat."""
    experts = ExpertWeights(gate_up, gate_up_bias, down, down_bias, Gate(*gate))
    return ops.experts(x, top_k_index, top_k_weights, experts, invariant=invariant)


def _fake(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, bias: Any, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


# `torch.library.custom_op` would cost a call some 20 us more
torch.library.define(
    _NAME,
    "(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, str activation, bool interleaved, float slope, float limit, float offset) -> Tensor",
)
torch.library.impl(_NAME, "CompositeExplicitAutograd", compute)
torch.library.register_fake(_NAME, _fake)
