"""Layers of hybrid models are fused with their mixers, and those that compute something else keep their own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrids import BY_NAME
from torch import nn

from fa_serve.hf import model_layers, patch_states
from fa_serve.hf.adapter.step_cache import StateKey
from fa_serve.hf.surgery.fuse.fusion import cached_states, fuse_layers, unfuse_model
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention
from fa_serve.hf.surgery.fuse.mixers import DeltaMixer, OwnMixer


def patched(name: str, **changes: Any) -> Any:
    model: Any = BY_NAME[name].build(vocab_size=300, **changes)
    model.set_attn_implementation("fa_serve")
    patch_states(model)
    return model


def kinds(model: nn.Module) -> list[type]:
    return [type(m.forward.attention) for m in model.modules() if isinstance(m.forward, FusedLayer)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3.5", [DeltaMixer, HeadsAttention]),
        ("qwen3.5-moe", [DeltaMixer, HeadsAttention]),
        ("qwen3-next", [DeltaMixer, HeadsAttention]),
        ("olmo-hybrid", [OwnMixer, HeadsAttention]),
        ("kimi-linear", [OwnMixer]),
        ("mamba", []),
    ],
)
def test_which_layers_are_fused(name: str, expected: list[type]) -> None:
    """Whether they give the tokens of `generate` is tested through the engine (tests/engine/test_hybrids.py)."""
    model = patched(name)
    assert fuse_layers(model) == len(expected)
    assert kinds(model) == expected
    gated = [
        m.forward.attention.gated for m in model.modules() if isinstance(getattr(m.forward, "attention", None), HeadsAttention)
    ]
    assert gated == [name.startswith("qwen")] * len(gated)
    unfuse_model(model)
    assert kinds(model) == []


def test_a_fused_mixer_keeps_the_keys_of_groups() -> None:
    """transformers 5.17 repeats keys for each head of values, so that the module's own code would keep them several times."""
    model = patched("qwen3.5")
    before = model_layers(model).states
    fuse_layers(model)
    after = cached_states(model, before)
    key = StateKey(0, 1)
    mixer = next(m for m in model.modules() if hasattr(m, "A_log"))
    heads, groups = (mixer.__dict__[f"num_{x}_heads"] for x in "vk")
    assert heads > groups
    shapes = {row.name: row.shape for row in before[key].tail}, {row.name: row.shape for row in after[key].tail}
    repeats = "repeat_interleave" in inspect.unwrap(type(mixer).forward).__code__.co_names
    assert shapes[0]["k"][0] == (heads if repeats else groups)
    assert shapes[1]["k"] == (groups, shapes[0]["k"][1])
    assert {name: shape for name, shape in shapes[1].items() if name != "k"} == {
        name: shape for name, shape in shapes[0].items() if name != "k"
    }
    assert {k: v for k, v in after.items() if k != key} == {k: v for k, v in before.items() if k != key}


def _negate(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return -output


def _own_norm(module: Any) -> None:
    module.norm.forward = lambda x, gate: x * gate


def _another_activation(module: Any) -> None:
    module.norm.activation = "gelu"


def _hook(module: Any) -> None:
    module.in_proj_z.register_forward_hook(_negate)


def _another_order(module: Any) -> None:
    """A projection that computes more than its weights say."""
    module.in_proj_b.forward = lambda x: nn.functional.linear(x, module.in_proj_b.weight).flip(-1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_activation, "output would change"),
        (_hook, "has hooks"),
        (_another_order, "the forward of a projection is replaced"),
        (_own_norm, "output would change"),
    ],
)
def test_a_mixer_that_computes_something_else_is_not_fused(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = patched("qwen3.5")
    mixer = next(m for m in model.modules() if hasattr(m, "A_log"))
    change(mixer)
    fuse_layers(model)
    assert kinds(model) == [HeadsAttention]
    assert reason in caplog.text


def test_attention_without_its_gate_is_not_taken_for_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof sees a gate that is left out."""
    model = patched("qwen3.5")
    monkeypatch.setattr("fa_serve.ops.gate_heads", lambda x, gate, activation, *, norm=None: x)
    fuse_layers(model)
    assert kinds(model) == []
