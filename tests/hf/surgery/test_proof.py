"""The proof that a replacement computes the same: what is one kind, what agrees, what is observed, and what stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import make_model
from torch import Tensor, nn

from fa_serve.hf import OneSequence, patch
from fa_serve.hf.surgery.proof import (
    POSITIONS,
    TOLERANCE,
    NotReplacedError,
    check_untouched,
    float32_copy,
    functions_agree,
    kind_of,
    largest_difference,
    observe_inputs,
    replace_forwards,
    results_agree,
)


def layers_of(model: Any) -> list[Any]:
    return list(model.model.layers)


def test_layers_that_differ_in_their_weights_and_number_are_of_one_kind() -> None:
    first, second = layers_of(make_model())
    assert first.self_attn.layer_idx != second.self_attn.layer_idx
    assert kind_of(first) == kind_of(second)
    assert kind_of(first, {"left": 3}) == kind_of(second, {"left": 3}) != kind_of(second, {"left": 4})


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def replace_forward(layer: Any) -> None:
    layer.mlp.forward = partial(type(layer.mlp).forward, layer.mlp)


def change_config(layer: Any) -> None:
    layer.self_attn.config = copy.copy(layer.self_attn.config)
    layer.self_attn.config.attention_dropout = 0.5


CHANGES: dict[str, Callable[[Any], object]] = {
    "type": lambda layer: setattr(layer.mlp, "act_fn", Other()),
    "number": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "function": lambda layer: setattr(layer.mlp, "act", torch.relu),
    "list": lambda layer: setattr(layer.mlp, "limits", [1.0, 2.0]),
    "hook": lambda layer: layer.mlp.register_forward_hook(lambda module, args, output: output),
    "hook-before": lambda layer: layer.mlp.register_forward_pre_hook(lambda module, args: None),
    "hook-of-accelerate": lambda layer: setattr(layer.mlp, "_hf_hook", Other()),
    "forward": replace_forward,
    "config": change_config,
    "shape": lambda layer: setattr(layer.mlp.up_proj, "weight", nn.Parameter(layer.mlp.up_proj.weight[1:])),
    "dtype": lambda layer: layer.mlp.up_proj.bfloat16(),
    "buffer": lambda layer: layer.mlp.register_buffer("scales", torch.ones(2)),
    "training": lambda layer: layer.mlp.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_else_differs_makes_another_kind(change: Callable[[Any], object]) -> None:
    first, second = layers_of(make_model())
    change(second)
    assert kind_of(first) != kind_of(second)


def test_results_agree_up_to_another_order_of_summation() -> None:
    expected = torch.tensor([[4.0, -8.0], [1.0, 0.0]])
    off = expected.clone()
    off[1, 1] = 0.9 * TOLERANCE * 8
    assert results_agree(off, expected)
    off[1, 1] = 1.1 * TOLERANCE * 8
    assert not results_agree(off, expected)
    assert largest_difference(off, expected) == pytest.approx(1.1 * TOLERANCE)
    assert largest_difference(expected[:1], expected) == math.inf, "another shape"
    assert largest_difference(torch.zeros(3), torch.zeros(3)) == 0.0
    assert largest_difference(torch.ones(3), torch.zeros(3)) == math.inf
    for number in (math.nan, math.inf):
        assert not results_agree(torch.full((3,), number), torch.full((3,), number)), "no finite number"


def test_a_single_row_is_compared_as_well() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert functions_agree(torch.sin, torch.sin, x)
    assert not functions_agree(torch.sin, lambda x: torch.sin(x) + (len(x) == 1), x)
    assert not functions_agree(torch.sin, lambda x: torch.sin(x) + (len(x) > 1), x)
    assert functions_agree(lambda x, y: x + y, lambda x, y: y + x, x, x), "each input has a row for each result"


def test_hooks_and_replaced_forwards_are_found_at_any_depth() -> None:
    model = make_model()
    first, second = layers_of(model)
    check_untouched(model)
    replace_forward(first)
    check_untouched(first, forwards=False)
    with pytest.raises(NotReplacedError, match=r"the forward of its LlamaMLP is replaced by .*LlamaMLP.forward"):
        check_untouched(first)
    second.self_attn.q_proj.register_forward_hook(Other().forward)
    with pytest.raises(NotReplacedError, match=r"its Linear has hooks, which would not be called \(.*Other.forward\)"):
        check_untouched(second, forwards=False)


@pytest.mark.parametrize("computing", [True, False])
@torch.no_grad()
def test_what_layers_are_given_is_observed(computing: bool) -> None:
    model = make_model()
    patch(model)
    first, second = layers_of(model)
    second.forward = own = partial(type(second).forward, second)
    inputs = observe_inputs(model, [first, second, nn.Linear(2, 2)], OneSequence(), computing=computing)
    assert set(inputs) == {first, second}, "a module that is not called is given nothing"
    embedded = model.model.embed_tokens(torch.arange(1, 1 + len(POSITIONS)))[None]
    assert torch.equal(inputs[first].hidden, embedded)
    assert torch.equal(inputs[second].hidden, embedded) != computing, "a layer that does not compute gives its input on"
    assert inputs[second].kwargs["position_ids"].tolist() == [list(POSITIONS)]
    assert not {"hidden_states", "fa_serve_batch"} & inputs[second].kwargs.keys()
    assert "forward" not in vars(first)
    assert second.forward is own
    assert not first._forward_pre_hooks
    whole = inputs[first].run(first, OneSequence())
    if computing:
        assert torch.equal(whole, inputs[second].hidden)


@torch.no_grad()
@pytest.mark.parametrize("reads", [lambda x: x[:, -1:], lambda x: x[0], lambda x: next(iter(x))])
def test_models_read_what_layers_return_in_their_ways(reads: Any) -> None:
    """As a tensor that they index, as Gemma 3n does, or as a tuple that begins with one."""
    model = make_model()
    patch(model)
    first, second = layers_of(model)
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(reads(x) + 0)
    assert set(observe_inputs(model, [first, second], OneSequence(), computing=False)) == {first, second}


@torch.no_grad()
def test_both_forms_compute_in_float32() -> None:
    model = make_model().bfloat16()
    patch(model)
    first, _ = layers_of(model)
    inputs = observe_inputs(model, [first], OneSequence())[first]
    wide = inputs.in_float32()
    assert (inputs.hidden.dtype, wide.hidden.dtype) == (torch.bfloat16, torch.float32)
    assert wide.kwargs["position_ids"].dtype == torch.int64
    assert [x.dtype for x in wide.kwargs["position_embeddings"]] == [torch.float32] * 2
    copied = float32_copy(first)
    assert wide.run(copied, OneSequence()).dtype == torch.float32
    assert first.mlp.up_proj.weight.dtype == torch.bfloat16, "the model keeps its weights"
    assert torch.equal(copied.mlp.up_proj.weight, first.mlp.up_proj.weight.float())


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_each_kind_is_proven_once_and_refused_once() -> None:
    modules = [Scale(factor) for factor in (1.0, 2.0, 1.0, 3.0, 2.0, 4.0)]
    proven: list[float] = []
    refused: list[tuple[float, str]] = []

    def prove(module: Scale) -> Callable[[Scale], Callable[..., Any]]:
        proven.append(module.factor)
        if module.factor >= 2.0:
            raise NotReplacedError("it is too large" if module.factor < 4.0 else "it is much too large")
        return lambda other: lambda x: other.factor * x

    assert replace_forwards(modules, prove, lambda module, reason: refused.append((module.factor, reason))) == 2
    assert proven == [1.0, 2.0, 3.0, 4.0]
    assert refused == [(2.0, "it is too large"), (4.0, "it is much too large")], "each reason once"
    assert ["forward" in vars(module) for module in modules] == [True, False, True, False, False, False]


def test_a_kind_of_which_a_module_cannot_be_built_is_not_tried_again() -> None:
    modules = [Scale(1.0) for _ in range(3)]

    def build(module: Scale) -> Callable[..., Any]:
        if module is modules[1]:
            raise RuntimeError("out of memory")
        return module.forward

    refused: list[str] = []
    assert replace_forwards(modules, lambda module: build, lambda module, reason: refused.append(reason)) == 1
    assert refused == ["out of memory"]
    assert ["forward" in vars(module) for module in modules] == [True, False, False]
