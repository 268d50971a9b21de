"""The experts of a mixture with quantised weights, in a model of transformers, loaded as their checkpoint keeps them.

    module = quantize_experts(experts, scheme, dtype)      # takes the place of transformers' module, before weights are loaded
    module.finish("model.layers.0.mlp.experts")            # its tensors become the weights of fa_serve.ops

transformers' loader stacks the tensors of all experts, and those of gate and up one below the other, by the names of a linear
layer: `experts.0.gate_proj.weight_scale` becomes a part of `experts.gate_up_proj_scale`. gpt-oss' files have stacked tensors.
So each scheme of a linear layer (weight_formats.py) says what the tensors of experts are called, and reads each matrix of each
expert. The gate is read from the module that is replaced, and its code is proven with experts of random floats. Left out: which
experts are quantised (quantization_plan.py), weights that are stored column by column, and static scales of activations, which
are multiplied as they are.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.experts import agrees, gate_of, weights_of
from fa_serve.hf.weight_formats import Scheme, check_loaded
from fa_serve.ops.experts_operator import call_operator
from fa_serve.spec import ParameterError, UnsupportedModelError

PROJECTIONS = {"gate_up_proj": 2, "down_proj": 1}
"""The products of experts, and how many matrices of a checkpoint each of them has."""


class QuantizedExperts(nn.Module):
    """Experts with quantised weights. Until `finish` it has the stacked tensors of its checkpoint as parameters instead.

    scheme:   how the checkpoint keeps each matrix
    weights:  of all experts, after `finish`
    is_transposed: a checkpoint of floats has the transposed matrices
    """

    weights: ops.ExpertWeights
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, experts: Any, gate: ops.Gate, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.hidden, self.width = weights_of(experts, gate).sizes
        self.description = scheme.description
        self.scheme = scheme
        self.gate = gate
        self.is_transposed = bool(experts.is_transposed)
        self.expected: dict[str, Tensor] = {}
        for projection in PROJECTIONS:
            for name, tensor in self._tensors(projection, dtype).items():
                self.expected[name] = tensor
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            bias = f"{projection}_bias"
            self.register_parameter(bias, getattr(experts, bias) if experts.has_bias else None)

    def _sizes(self, projection: str) -> tuple[int, int]:
        """Rows and columns of each matrix of a product in a checkpoint."""
        return (self.width, self.hidden) if projection == "gate_up_proj" else (self.hidden, self.width)

    def _tensors(self, projection: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stacked tensors of a product: (num_experts, matrices * rows of a tensor, ...)."""
        matrices = PROJECTIONS[projection]
        found = {}
        for name, tensor in self.scheme.tensors(*self._sizes(projection), dtype).items():
            if name.startswith("weight"):
                rows, *rest = tensor.shape
                found[_stacked(name, projection)] = tensor.new_empty(self.num_experts, matrices * rows, *rest)
        return found

    def finish(self, layer: str) -> None:
        """Make `weights` of the tensors that have been loaded. Raises ParameterError, which names one with a wrong shape."""
        tensors = check_loaded(self, self.expected, layer)
        found = {}
        for projection in PROJECTIONS:
            try:
                found[projection] = self._read(tensors, projection)
            except ParameterError as error:
                raise ParameterError(f"{layer}.{_stacked(error.field, projection)}", error.rule, error.value) from None
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        self.weights = ops.ExpertWeights(found["gate_up_proj"], biases[0], found["down_proj"], biases[1], self.gate)

    def _read(self, tensors: dict[str, Tensor], projection: str) -> ops.QuantizedWeight:
        """The matrices of all experts as one weight. Takes what it reads out of `tensors`."""
        matrices = PROJECTIONS[projection]
        sizes = self._sizes(projection)
        names = [name for name in self.scheme.tensors(*sizes, torch.float32) if name.startswith("weight")]
        stacked = {name: tensors.pop(_stacked(name, projection)) for name in names}
        parts = []
        for expert in range(self.num_experts):
            halves = {name: tensor[expert].chunk(matrices) for name, tensor in stacked.items()}
            for i in range(matrices):
                parts.append(self.scheme.read({name: half[i] for name, half in halves.items()}, *sizes))
        return ops.merge_rows(parts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Shapes are those of `fa_serve.hf.experts_forward`."""
        return call_operator(hidden_states, top_k_index, top_k_weights, self.weights)

    def extra_repr(self) -> str:
        return f"{self.num_experts} of {self.hidden} -> {self.width} -> {self.hidden}, {self.description}"


def _stacked(name: str, projection: str) -> str:
    """The name of a linear layer's tensor where those of all experts are stacked."""
    return name.replace("weight", projection, 1)


def quantize_experts(experts: nn.Module, scheme: Scheme, dtype: torch.dtype) -> QuantizedExperts:
    """A module for the place of transformers' module of experts, without weights.

    experts: on the device "meta"

    Raises UnsupportedModelError with the reason for experts of a kind that fa_serve does not compute.
    """
    gate = gate_of(experts)
    return QuantizedExperts(experts, gate, scheme, dtype)


def prove_experts(experts: Any) -> None:
    """Raise UnsupportedModelError unless the code of a module of experts on "meta" computes what fa_serve computes."""
    few = copy.copy(experts)
    draw = torch.Generator().manual_seed(0)
    few._parameters = {
        name: nn.Parameter(0.02 * torch.randn(2, *p.shape[1:], generator=draw, device="cpu"), requires_grad=False)
        for name, p in cast(nn.Module, experts).named_parameters(recurse=False)
    }
    few.num_experts = 2
    with torch.device("cpu"):
        if not agrees(few):
            name = type(experts).__name__
            raise UnsupportedModelError(f"the quantised experts of {name} cannot be loaded, because its output would change")
