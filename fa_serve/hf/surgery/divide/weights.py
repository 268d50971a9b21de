"""Divides the weights of a model between the ranks, and proves for each kind of layer that the ranks together compute the same.

    model = AutoModelForCausalLM.from_pretrained(...)       # on the CPU: weights are mapped from their files, but not yet read
    divide_model(model, plan_division(model, size=2), rank=0, all_reduce=all_reduce, device=device)

Each rank copies its part of each weight to its device. So it reads only its part of the files, unless transformers converts or
merges the weights of a checkpoint while it loads them. Quantised weights are converted on the device layer by layer, and then
each rank keeps its part. The first layer of each kind is computed in float32 twice: undivided on each rank, and divided by all
ranks together. A model with layers whose results differ is refused. Left out: which rows and columns a rank keeps (plan.py),
and the comparison (surgery/proof.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf.adapter.paged import OneSequence
from fa_serve.hf.surgery.divide.plan import Division, LayerDivision
from fa_serve.hf.surgery.divide.sections import Cut, RankPart, set_rank_part
from fa_serve.hf.surgery.proof import TOLERANCE, LayerInputs, float32_copy, kind_of, largest_difference, observe_inputs
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear, finish_weights
from fa_serve.ops.collectives.all_reduce import AllReduce, AllReduceError
from fa_serve.ops.products.quantised.weight import QuantizedWeight, merge_rows
from fa_serve.spec import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PartOfSum:
    """Replaces the `forward` of a module whose output is this rank's part of a sum: it returns the sum.

    partial: the module's own forward
    """

    partial: Callable[..., Tensor]
    all_reduce: AllReduce

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.all_reduce(self.partial(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class PartOfOutput:
    """Replaces the `forward` of a module that every rank computes whole, and returns this rank's part of its output."""

    whole: Callable[..., Tensor]
    cut: Cut
    rank: int
    size: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat(self.cut.kept(self.whole(*args, **kwargs), self.rank, self.size), dim=-1)


@dataclass(frozen=True, slots=True)
class PartOfNorm:
    """Replaces the `forward` of a gated RMS norm over the features of all ranks, some of which this rank has.

    norm:     the module, with this rank's weights. It applies the gate before the norm unless its `norm_before_gate` is set
    features: number of features of all ranks
    """

    norm: Any
    features: int
    all_reduce: AllReduce

    def __call__(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = hidden.float()
        factor = None if gate is None else nn.functional.silu(gate.float())
        gate_comes_last = getattr(self.norm, "norm_before_gate", False)
        if factor is not None and not gate_comes_last:
            wide = wide * factor
        squares = self.all_reduce(wide.square().sum(-1))[..., None]  # one row for the kernel, not one for each token
        wide = wide * torch.rsqrt(squares / self.features + self.norm.variance_epsilon)
        out: Tensor = self.norm.weight * wide.to(hidden.dtype)
        return out if factor is None or not gate_comes_last else (out * factor).to(hidden.dtype)


DIVIDED_MODULES = (PartOfSum, PartOfOutput, PartOfNorm)
"""The forwards that `_divide_layer` gives to modules."""


def sums_paused(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the modules of a divided model return this rank's parts of sums, without waiting for other ranks.

    Replacements are proven like this, because the proof may fail on one rank while it continues on another.
    """
    sums = [m.forward.all_reduce for m in model.modules() if isinstance(m.forward, PartOfSum)]
    return sums[0].paused() if sums else nullcontext()


@dataclass(frozen=True, slots=True)
class PartOfEmbeddings:
    """Replaces the `forward` of embeddings: this rank looks up `count` ids from `start` on. The ranks' results are added up."""

    own: Callable[[Tensor], Tensor]
    start: int
    count: int
    all_reduce: AllReduce

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self.start
        found = self.own(own.clamp(0, self.count - 1))
        return self.all_reduce(found.masked_fill(((own < 0) | (own >= self.count))[..., None], 0))


@dataclass(frozen=True, slots=True)
class PartOfLogits:
    """Replaces the `forward` of the head: this rank computes some of the logits, and gets the others from other ranks."""

    own: Callable[[Tensor], Tensor]
    vocab_size: int
    all_reduce: AllReduce

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.all_reduce.gather(self.own(hidden)[0])[None]


def vocab_size(model: PreTrainedModel) -> int:
    """The number of logits of a causal model, divided or not."""
    head: Any = cast(Any, model).get_output_embeddings()
    part = vars(head).get("forward")
    if isinstance(part, PartOfLogits):
        return part.vocab_size
    return int(head.out_features if isinstance(head, QuantizedLinear) else head.weight.shape[0])


@torch.no_grad()
def divide_model(model: PreTrainedModel, division: Division, rank: int, all_reduce: AllReduce, device: torch.device) -> None:
    """Keep this rank's part of the weights of each layer, on `device`. All ranks must call this together.

    Weights that are not divided stay where they are. Raises UnsupportedModelError if the ranks together do not compute the same
    as an undivided layer, and AllReduceError if another rank has ended.
    """
    refusal = f"{type(model).__name__} cannot be divided between {division.size} ranks: "
    try:
        layers = {path: model.get_submodule(path) for path in division.layers}
        # weights are on no device yet, so no layer computes
        inputs = observe_inputs(model, layers.values(), OneSequence(), computing=False)
    except Exception as error:
        raise UnsupportedModelError(
            f"{refusal}a forward in which no layer computes fails with {type(error).__name__}: {error}"
        ) from error
    proven: set[str] = set()
    for path, own in division.layers.items():
        layer = layers[path]
        _finish_layer(layer, path, device)
        kind = kind_of(layer, own)
        if kind not in proven and layer in inputs:
            what = f"{refusal}{path} ({type(layer).__name__})"
            try:
                difference = _difference(layer, own, inputs[layer], division.size, rank, all_reduce, device)
            except AllReduceError:
                raise
            except Exception as error:
                raise UnsupportedModelError(f"{what} fails with {type(error).__name__}: {error}") from error
            if not difference <= TOLERANCE:
                raise UnsupportedModelError(
                    f"{what} gives a different result when divided: the difference is {difference:.3g} times the largest "
                    f"value, at most {TOLERANCE:g} is allowed. Use --tensor-parallel 1, or report this model"
                )
            proven.add(kind)
        _divide_layer(layer, own, division.size, rank, all_reduce, device)
    if division.vocabulary is not None:
        _divide_vocabulary(model, division.vocabulary, division.size, rank, all_reduce, device)


def _divide_vocabulary(
    model: PreTrainedModel, cut: Cut, size: int, rank: int, all_reduce: AllReduce, device: torch.device
) -> None:
    """Keep this rank's rows of the embeddings and of the head, which may be tied."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = cast(Any, model).get_output_embeddings()
    tied = embeddings.weight is head.weight
    head.forward = PartOfLogits(head.forward, head.out_features, all_reduce)
    [(start, count)] = cut.ranges(rank, size)
    embeddings.forward = PartOfEmbeddings(embeddings.forward, start, count, all_reduce)
    embeddings.num_embeddings = count
    embeddings.padding_idx = None  # only gradients need it, and it may be another rank's row
    for module in (head, embeddings):
        _replace(module, "weight", torch.cat(cut.kept(module.weight.detach(), rank, size)).to(device))
        set_rank_part(module, "weight", RankPart(cut, rank, size))
    if tied:
        embeddings.weight = head.weight


def _divide_layer(
    layer: nn.Module, own: LayerDivision, size: int, rank: int, all_reduce: AllReduce, device: torch.device
) -> None:
    for name, cut in own.cuts.items():
        module, parameter = _find(layer, name)
        if isinstance(module, QuantizedExperts):
            _divide_experts(module, cut, cut.ranges(rank, size))
        elif isinstance(parameter, QuantizedWeight):
            module.weight = _part_of_quantized(parameter, cut.dim, cut.ranges(rank, size))
        else:
            _replace(module, name, torch.cat(cut.kept(parameter.detach(), rank, size), dim=cut.dim).to(device))
        set_rank_part(module, name.rpartition(".")[2], RankPart(cut, rank, size))
        if isinstance(module, nn.Linear | QuantizedLinear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv1d):  # depthwise: each channel is a group
            module.in_channels = module.out_channels = module.groups = len(module.weight)
    for name in own.once if rank else ():
        module, parameter = _find(layer, name)
        _replace(module, name, torch.zeros_like(parameter))
    for path in own.sums:
        module = layer.get_submodule(path)
        module.forward = PartOfSum(module.forward, all_reduce)
    for path, cut in own.narrowed.items():
        module = layer.get_submodule(path)
        module.forward = PartOfOutput(module.forward, cut, rank, size)
    for path, heads in own.attention.items():
        _set_heads(layer.get_submodule(path), *heads)
    for path, numbers in own.numbers.items():
        module = layer.get_submodule(path)
        for name in numbers.keys() & vars(module).keys():
            setattr(module, name, numbers[name])
    for path, features in own.norms.items():
        module = layer.get_submodule(path)
        module.forward = PartOfNorm(module, features, all_reduce)


def _finish_layer(layer: nn.Module, path: str, device: torch.device) -> None:
    """Convert the quantised weights of a layer on the device. Its other tensors stay where they are."""
    for name, module in layer.named_modules(prefix=path):
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            finish_weights(module.to(device), name)


def _divide_experts(experts: QuantizedExperts, cut: Cut, ranges: list[tuple[int, int]]) -> None:
    """Keep rows of both halves of each expert's first product, or columns of the second."""
    weights = experts.weights
    assert isinstance(weights.gate_up, QuantizedWeight)
    assert isinstance(weights.down, QuantizedWeight)
    if cut.dim == 1:
        rows = weights.gate_up.shape[0] // experts.num_experts
        every = [(expert * rows + start, count) for expert in range(experts.num_experts) for start, count in ranges]
        experts.weights = weights._replace(gate_up=_part_of_quantized(weights.gate_up, 0, every))
    else:
        experts.weights = weights._replace(down=_part_of_quantized(weights.down, 1, ranges))
        experts.width = experts.weights.sizes.width


def _part_of_quantized(weight: QuantizedWeight, dim: int, ranges: list[tuple[int, int]]) -> QuantizedWeight:
    """A copy of some rows (dim 0) or columns (dim 1). ranges: (start, count) of each part"""
    if dim == 0:
        return merge_rows([weight.rows(start, start + count) for start, count in ranges])
    try:
        [(start, count)] = ranges
        return weight.columns_between(start, start + count)
    except ValueError as error:  # a checkpoint may have act-order even if its config does not say so
        raise UnsupportedModelError(f"quantised weights cannot be divided between ranks: {error}") from None


def _set_heads(attention: Any, num_heads: int, num_kv_heads: int) -> None:
    """Set the numbers of heads in the attributes of an attention module, and in a copy of its config."""
    numbers = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_key_value_groups": num_heads // num_kv_heads,
    }
    attention.config = copy.copy(attention.config)
    for owner in (attention, attention.config):
        for name, number in numbers.items():
            if name in vars(owner):
                setattr(owner, name, number)


def _find(layer: nn.Module, name: str) -> tuple[Any, Any]:
    """The module that has a parameter, and the Tensor or QuantizedWeight of this name; None for quantised experts."""
    path, _, own = name.rpartition(".")
    module = layer.get_submodule(path)
    return module, getattr(module, own, None)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    own = name.rpartition(".")[2]
    before = cast(Tensor, getattr(module, own))
    setattr(module, own, nn.Parameter(value, requires_grad=before.requires_grad) if isinstance(before, nn.Parameter) else value)


def _difference(
    layer: nn.Module, own: LayerDivision, inputs: LayerInputs, size: int, rank: int, all_reduce: AllReduce, device: torch.device
) -> float:
    """The difference in float32 between the result of all ranks together and that of the undivided layer.

    Quantised weights are dequantised for this, because products in float8 round activations.
    """
    copied = float32_copy(layer, device)
    wide = inputs.in_float32(device)
    with _dequantised(copied):
        expected = _output(wide.run(copied, OneSequence()))
    _divide_layer(copied, own, size, rank, all_reduce, device)
    with _dequantised(copied):
        return largest_difference(_output(wide.run(copied, OneSequence())), expected)


@contextmanager
def _dequantised(layer: nn.Module) -> Iterator[None]:
    """Inside, quantised linear layers have matrices of float32."""
    quantised: list[tuple[Any, QuantizedWeight]] = [(m, m.weight) for m in layer.modules() if isinstance(m, QuantizedLinear)]
    for module, weight in quantised:
        module.weight = weight.dequantize(torch.float32)
    yield
    for module, weight in quantised:
        module.weight = weight


def _output(value: Any) -> Tensor:
    return cast(Tensor, value[0] if isinstance(value, tuple) else value)
