"""The experts of a mixture with quantised weights, in a model of transformers, loaded in the format of their checkpoint.

    module = quantize_experts(experts, scheme, dtype)      # replaces transformers' module, before weights are loaded
    module.finish("model.layers.0.mlp.experts")            # converts its tensors to the weights of fa_serve.ops

transformers has rules by which its loader stacks the weights of all experts, with the rows of gate above those of up.
`rules_for_experts` makes such rules for the other tensors of quantised matrices: `experts.0.gate_proj.weight_scale` becomes a
part of `experts.gate_up_proj_scale`, and `experts.0.gate_proj.qzeros` a part of `experts.gate_up_proj_qzeros`. The files of
gpt-oss already contain stacked tensors. In both cases, the scheme of a linear layer (weights/formats.py) gives the names of the
tensors of experts, and reads each matrix of each expert. The gate is identified from the replaced module, whose code is
compared with fa_serve on experts of random floats. Left out: which experts are quantised (quantization_plan.py), act-order, and
static scales of activations, because the products of experts do not quantise activations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter, WeightTransform

from fa_serve import ops
from fa_serve.hf.surgery.experts.mixtures import experts_agree, gate_of, weights_of
from fa_serve.hf.weights.formats import Scheme, check_loaded
from fa_serve.ops.moe.operator import call_operator
from fa_serve.spec import ParameterError, UnsupportedModelError

PROJECTIONS = {"gate_up_proj": 2, "down_proj": 1}
"""The products of experts, and the number of matrices in a checkpoint that each of them merges."""


class QuantizedExperts(nn.Module):
    """Experts with quantised weights. Before `finish`, the module has the stacked tensors of its checkpoint as parameters.

    scheme:   how the checkpoint stores each matrix
    weights:  the weights of all experts, after `finish`
    is_transposed: whether a checkpoint of floats stores the matrices transposed
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

    def sizes(self, projection: str) -> tuple[int, int]:
        """Rows and columns of each matrix of a product in a checkpoint."""
        return (self.width, self.hidden) if projection == "gate_up_proj" else (self.hidden, self.width)

    def _tensors(self, projection: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stacked tensors of a product: (num_experts, ...), with the rows of its matrices one after the other."""
        matrices = PROJECTIONS[projection]
        found = {}
        for name, tensor in self.scheme.tensors(*self.sizes(projection), dtype).items():
            shape = list(tensor.shape)
            shape[_row_axis(self.scheme, tensor)] *= matrices
            found[stacked_name(name, projection)] = tensor.new_empty(self.num_experts, *shape)
        return found

    @property
    def is_finished(self) -> bool:
        """Whether `finish` has made `weights`."""
        return "weights" in vars(self)

    def finish(self, layer: str) -> None:
        """Convert the loaded tensors to `weights`. Raises ParameterError, which names a tensor that does not fit."""
        tensors = check_loaded(self, self.expected, layer)
        found = {}
        for projection in PROJECTIONS:
            try:
                found[projection] = self._read(tensors, projection)
            except ParameterError as error:
                raise ParameterError(f"{layer}.{stacked_name(error.field, projection)}", error.rule, error.value) from None
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        self.weights = ops.ExpertWeights(found["gate_up_proj"], biases[0], found["down_proj"], biases[1], self.gate)

    def _read(self, tensors: dict[str, Tensor], projection: str) -> ops.QuantizedWeight:
        """The matrices of all experts as one weight. Removes the tensors that it reads from `tensors`."""
        matrices = PROJECTIONS[projection]
        sizes = self.sizes(projection)
        names = self.scheme.tensors(*sizes, torch.float32)
        stacked = {name: tensors.pop(stacked_name(name, projection)) for name in names}
        parts = []
        for expert in range(self.num_experts):
            own = {name: tensor[expert] for name, tensor in stacked.items()}
            halves = {name: tensor.chunk(matrices, dim=_row_axis(self.scheme, tensor)) for name, tensor in own.items()}
            for i in range(matrices):
                parts.append(self.scheme.read({name: half[i] for name, half in halves.items()}, *sizes))
                if parts[-1].columns is not None:
                    raise ParameterError(
                        "g_idx", "assign columns to groups in ascending order (no act-order)", f"expert {expert}"
                    )
        return ops.merge_rows(parts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts. Shapes are those of `fa_serve.hf.experts_forward`."""
        return call_operator(hidden_states, top_k_index, top_k_weights, self.weights)

    def extra_repr(self) -> str:
        return f"{self.num_experts} of {self.hidden} -> {self.width} -> {self.hidden}, {self.description}"


def stacked_name(name: str, projection: str) -> str:
    """The name of the stacked tensor of all experts. name: that of the tensor in a linear layer"""
    return projection + name.removeprefix("weight") if name.startswith("weight") else f"{projection}_{name}"


def _row_axis(scheme: Scheme, tensor: Tensor) -> int:
    """The axis of one expert's tensor along which the rows of its matrices lie."""
    return min(scheme.row_axis, tensor.dim() - 1)


class _ScalesInLists(ConversionOps):
    """Gives an axis to the scale of a whole matrix, which may be a number without axes: transformers writes it so."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        return {name: [part.reshape(part.shape or (1,)) for part in parts] for name, parts in input_dict.items()}


def rules_for_scales(schemes: Iterable[Scheme]) -> list[WeightTransform]:
    """Rules that read the scale of a whole matrix of a linear layer. From 5.18 on, transformers compares its shape.

    schemes: the schemes of the model's linear layers
    """
    tensors = {name: tensor for scheme in schemes for name, tensor in scheme.tensors(256, 256, torch.float32).items()}
    scales = [f".{name}" for name, tensor in tensors.items() if tensor.shape == (1,)]
    return [WeightConverter([scale], [scale], [_ScalesInLists()]) for scale in scales]


def rules_for_experts(rules: Sequence[WeightTransform], schemes: Iterable[Scheme]) -> list[WeightTransform]:
    """Rules for the tensors of quantised experts, followed by transformers' rules for the tensors of a checkpoint.

    rules:   transformers' rules for a model. The new rules are modelled on those that stack the tensors `weight` of experts
    schemes: the schemes of the model's experts
    """
    tensors = {name: (scheme, tensor) for scheme in schemes for name, tensor in scheme.tensors(256, 256, torch.float32).items()}
    made = []
    for rule in rules:
        sources = [source.removesuffix("$") for source in rule.source_patterns]
        if not isinstance(rule, WeightConverter) or not all(source.endswith(".weight") for source in sources):
            continue
        kinds = [type(operation) for operation in rule.operations]
        if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            continue
        for name, (scheme, tensor) in tensors.items():
            if name == "weight":
                continue
            stacking = [MergeModulelist(dim=0), Concatenate(dim=1 + _row_axis(scheme, tensor))]
            named = WeightConverter(
                [source.removesuffix("weight") + name for source in sources],
                [stacked_name(name, target) for target in rule.target_patterns],
                [_ScalesInLists(), *stacking[: len(kinds)]],
            )
            named.scope_prefix = rule.scope_prefix
            named.base_model_prefix = rule.base_model_prefix
            made.append(named)
    # the loader of transformers 5.17 takes the first rule whose pattern is a prefix of a name, so longer patterns come first
    return [*sorted(made, key=lambda rule: -len(rule.source_patterns[0])), *rules]


def quantize_experts(experts: nn.Module, scheme: Scheme, dtype: torch.dtype) -> QuantizedExperts:
    """Make the module that replaces transformers' module of experts, without weights.

    experts: on the device "meta"

    Raises UnsupportedModelError with the reason for experts of a kind that fa_serve does not compute.
    """
    gate = gate_of(experts)
    return QuantizedExperts(experts, gate, scheme, dtype)


def prove_experts(experts: Any) -> None:
    """Raise UnsupportedModelError unless the code of a module of experts on "meta" computes the same as fa_serve."""
    few = copy.copy(experts)
    draw = torch.Generator().manual_seed(0)
    few._parameters = {
        name: nn.Parameter(0.02 * torch.randn(2, *p.shape[1:], generator=draw, device="cpu"), requires_grad=False)
        for name, p in cast(nn.Module, experts).named_parameters(recurse=False)
    }
    few.num_experts = 2
    with torch.device("cpu"):
        if not experts_agree(few):
            name = type(experts).__name__
            raise UnsupportedModelError(f"the quantised experts of {name} cannot be loaded, because their output would change")
