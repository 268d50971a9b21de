"""The lower bound of a step counts the weights that the step reads."""

from __future__ import annotations

import pytest
from profile_engine import weights_of_step
from tiny_models import make_model


def test_weights_of_a_dense_model_are_all_but_the_embedding() -> None:
    model = make_model("llama")
    expected = sum(x.nbytes for x in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert weights_of_step(model, 1) == weights_of_step(model, 64) == expected


def test_weights_of_a_mixture_are_those_of_the_experts_that_are_met() -> None:
    """3 of 6 experts: one token meets half of them, two tokens three quarters."""
    model = make_model("qwen3-moe")
    experts = sum(x.nbytes for layer in model.model.layers for x in layer.mlp.experts.parameters())
    others = sum(x.nbytes for x in model.parameters()) - model.get_input_embeddings().weight.nbytes - experts
    assert weights_of_step(model, 1) == pytest.approx(others + experts / 2)
    assert weights_of_step(model, 2) == pytest.approx(others + experts * 3 / 4)
    assert weights_of_step(model, 64) == pytest.approx(others + experts)
