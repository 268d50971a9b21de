"""`take_scaled_experts`: the chosen experts give what all experts give, and mixtures of another kind are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_families import assert_same, tokens
from moe_families import MIXTURES
from tiny_models import make_model
from torch import nn

from fa_serve import hf
from fa_serve.hf.surgery.experts import scaled as scaled_experts


def mixtures(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), hf.ScaledExperts)]


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 12), (1, 1)], ids=["tokens", "one token"])
def test_chosen_experts_give_what_all_experts_give(shape: tuple[int, int]) -> None:
    own = make_model("llama4")
    ours = make_model("llama4")
    assert hf.take_scaled_experts(ours) == len(mixtures(ours)) == 1
    ids = tokens(*shape)
    assert_same(ours(ids).logits, own(ids).logits)


def test_only_pairs_of_a_token_and_a_chosen_expert_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama4")
    hf.take_scaled_experts(model)
    seen: list[tuple[int, ...]] = []
    call = scaled_experts.call_operator
    monkeypatch.setattr(scaled_experts, "call_operator", lambda x, *rest: seen.append(tuple(x.shape)) or call(x, *rest))
    with torch.no_grad():
        model(tokens(2, 12))
    assert seen == [(2 * 12 * 2, 32)]
    assert model(tokens(1, 3)).logits.requires_grad
    assert len(seen) == 1, "gradients are computed by the mixture's own code"


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.name)
def test_mixtures_of_another_kind_are_left_alone(family: Any) -> None:
    assert hf.take_scaled_experts(family.build()) == 0


def test_experts_that_compute_something_else_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    model = make_model("llama4")
    mixture = model.model.layers[1].feed_forward
    own = type(mixture).forward
    monkeypatch.setattr(type(mixture), "forward", lambda self, x: tuple(1.01 * y for y in own(self, x)))
    assert hf.take_scaled_experts(model) == 0
    assert "its output would change" in caplog.text
    mixture.experts.act_fn = nn.Softsign()
    assert hf.take_scaled_experts(model) == 0


def test_each_kind_of_mixture_is_proven(caplog: Any) -> None:
    """The second layer has another activation than the first, which no gate of ours computes."""
    model = make_model("llama4")
    first = model.model.layers[1].feed_forward
    second = copy.deepcopy(first)
    model.model.layers[0].feed_forward = second
    first, second = second, first
    second.experts.act_fn = nn.Softsign()
    assert hf.take_scaled_experts(model) == 1
    assert mixtures(model) == [first]
    assert "Llama4TextMoe computes all of its experts, not only the chosen ones: it gates its experts in a way" in caplog.text


def test_hooks_are_not_passed_over() -> None:
    model = make_model("llama4")
    model.model.layers[1].feed_forward.experts.register_forward_hook(lambda module, args, output: output)
    assert hf.take_scaled_experts(model) == 0
