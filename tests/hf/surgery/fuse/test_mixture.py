"""Mixtures whose shared expert has a gate add their parts to the residual stream in one launch. Others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from generated_hybrids import model_of
from hf_families import tokens
from moe_families import MIXTURES
from torch import Tensor, nn
from torch.nn.functional import sigmoid

from fa_serve import ops
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse.fusion import fuse_layers, fuse_model
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.fuse.mixture import fuse_mixtures

BY_NAME = {family.name: family for family in MIXTURES}


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    return [fused for module in model.modules() if isinstance(fused := vars(module).get("forward"), FusedLayer)]


def model_with_layers(name: str = "qwen2-moe") -> Any:
    """A model whose layers are fused, and whose mixtures are not yet."""
    model = BY_NAME[name].build()
    patch(model)
    assert fuse_layers(model) > 0
    return model


@torch.no_grad()
def test_the_sum_is_that_of_the_mixture() -> None:
    model = model_with_layers()
    assert fuse_mixtures(model) == len(fused_layers(model)) > 0
    for layer in fused_layers(model):
        x, h = torch.randn(2, 7, layer.o.weight.shape[0], generator=torch.Generator().manual_seed(0))
        assert layer.mixture is not None
        expected = x + 0.3 * layer.mlp(h[None])[0]
        torch.testing.assert_close(layer.mixture.add(x, h, 0.3), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "make", [BY_NAME["qwen2-moe"].build, lambda: deepcopy(model_of("qwen3-next"))], ids=["qwen2-moe", "qwen3-next"]
)
def test_an_engine_launches_it_for_each_layer_and_step(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = ops.add_gated
    monkeypatch.setattr(ops, "add_gated", lambda *args, **options: calls.append(args) or compute(*args, **options))
    ids = tokens(1, 9)
    expected = make().generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    model = make()
    config = EngineConfig(device="cpu", num_pages=64, page_size=16, max_model_len=64, max_num_seqs=4)
    engine = Engine(config, model=model)
    calls.clear()
    found = engine.generate([ids[0].tolist()], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    mixtures = sum(layer.mixture is not None for layer in fused_layers(model))
    engine.close()
    assert found[0].token_ids == expected
    assert mixtures > 0
    assert len(calls) == 6 * mixtures, "a prompt, and five tokens"


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "glm4-moe"])
def test_mixtures_without_such_a_gate_are_left_alone(name: str) -> None:
    assert fuse_mixtures(model_with_layers(name)) == 0


def test_deterministic_mode_computes_what_a_training_forward_does() -> None:
    model = BY_NAME["qwen2-moe"].build()
    patch(model)
    assert fuse_model(model, deterministic=True) > 0
    assert all(layer.mixture is None for layer in fused_layers(model))


class GatedTwice(nn.Module):
    """Has the parts of such a mixture, and computes something else."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        for name, module in mixture.named_children():
            setattr(self, name, module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states[0]
        _, weights, chosen = self.gate(x)
        share = sigmoid(self.shared_expert_gate(x))
        return (self.experts(x, chosen, weights) * (1 - share) + share * self.shared_expert(x))[None]


def test_a_mixture_that_computes_something_else_is_left_alone() -> None:
    model = BY_NAME["qwen2-moe"].build()
    for layer in model.model.layers:
        layer.mlp = GatedTwice(layer.mlp)
    patch(model)
    assert fuse_layers(model) > 0
    assert fuse_mixtures(model) == 0


def test_hooks_are_not_passed_over() -> None:
    model = model_with_layers()
    model.model.layers[0].mlp.shared_expert_gate.register_forward_hook(lambda module, args, output: output)
    fuse_mixtures(model)
    assert fused_layers(model)[0].mixture is None


@torch.no_grad()
def test_a_gate_with_another_forward_is_called() -> None:
    """As one with an adapter, which is given to it after the layers have been fused."""
    model = model_with_layers()
    fuse_mixtures(model)
    layer = fused_layers(model)[0]
    assert layer.mixture is not None
    assert layer.mixture.adds_parts
    gate = layer.mlp.shared_expert_gate
    gate.forward = lambda x: torch.zeros(*x.shape[:-1], 1)
    assert not layer.mixture.adds_parts


def test_gradients_run_the_own_code() -> None:
    model = model_with_layers()
    fuse_mixtures(model)
    mixture = fused_layers(model)[0].mixture
    assert mixture is not None
    with torch.enable_grad():
        assert not mixture.adds_parts
