"""cos and sin of a rotary embedding are one op. Embeddings that compute something else are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_families import BY_NAME, assert_same, tokens
from torch import nn

from fa_serve import ops
from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse.fusion import fuse_layers, fuse_model, unfuse_model
from fa_serve.hf.surgery.fuse.rotary_tables import FusedRotaryTables, fuse_rotary_tables


def fused_embeddings(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), FusedRotaryTables)]


def model_with_layers(name: str = "llama", **changes: Any) -> Any:
    """A model whose layers are fused, and whose rotary embedding is not yet."""
    model = BY_NAME[name].build(**changes)
    patch(model)
    assert fuse_layers(model) > 0
    return model


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3-moe", "phi3"])
@torch.no_grad()
def test_cos_and_sin_are_one_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has each angle once."""
    eager = BY_NAME[name].build()
    model = model_with_layers(name)
    assert fuse_rotary_tables(model) == 1
    assert fused_embeddings(model) == ["model.rotary_emb"]
    calls = []
    compute = ops.rotary_tables
    monkeypatch.setattr(ops, "rotary_tables", lambda *args: calls.append(args) or compute(*args))
    for ids in (tokens(2, 12), tokens(1, 1)):
        calls.clear()
        assert_same(model(ids).logits, eager(ids).logits)
        assert len(calls) == 1


@torch.no_grad()
def test_rows_have_their_own_positions() -> None:
    model = model_with_layers()
    positions = torch.tensor([[0, 1, 2], [7, 5, 1 << 20]])
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    expected = model.model.rotary_emb(x, positions)
    fuse_rotary_tables(model)
    found = model.model.rotary_emb(x, positions)
    assert [each.dtype for each in found] == [torch.bfloat16] * 2
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.float(), wanted.float(), atol=0.01, rtol=0)
    assert not torch.equal(found[0][0], found[0][1])


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@torch.no_grad()
def test_a_factor_of_cos_and_sin_counts() -> None:
    model = model_with_layers(rope_parameters=YARN)
    own = model.model.rotary_emb
    assert own.attention_scaling > 1.1
    positions = torch.arange(40)[None]
    expected = own(torch.zeros(1, 40, 4), positions)
    assert fuse_rotary_tables(model) == 1
    for actual, wanted in zip(own(torch.zeros(1, 40, 4), positions), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("parameters", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
@torch.no_grad()
def test_frequencies_that_depend_on_the_length_are_left_to_the_model(parameters: dict[str, Any]) -> None:
    model = model_with_layers(rope_parameters=parameters)
    before = model.model.rotary_emb.inv_freq.clone()
    assert fuse_rotary_tables(model) == 0
    assert torch.equal(model.model.rotary_emb.inv_freq, before), "the proof has changed the frequencies"


def test_embeddings_for_each_kind_of_layer_are_left_alone() -> None:
    """Gemma 3 has frequencies for each kind of layer."""
    assert fuse_rotary_tables(model_with_layers("gemma3")) == 0


class Complex(nn.Module):
    """Returns complex numbers, as in DeepSeek V2."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.inv_freq = own.inv_freq

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angles = position_ids[..., None].float() * self.inv_freq
        return torch.polar(torch.ones_like(angles), angles)


def test_complex_numbers_are_left_alone() -> None:
    model = model_with_layers()
    model.model.rotary_emb = Complex(model.model.rotary_emb)
    assert fuse_rotary_tables(model) == 0


def test_gradients_run_the_own_code_and_modules_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_layers()
    expected = model(tokens(2, 12)).logits
    fuse_rotary_tables(model)
    monkeypatch.setattr(ops, "rotary_tables", None)
    assert torch.equal(model(tokens(2, 12)).logits, expected)
    unfuse_model(model)
    assert fused_embeddings(model) == []


def test_deterministic_mode_computes_what_a_training_forward_does() -> None:
    model = BY_NAME["llama"].build()
    patch(model)
    assert fuse_model(model, deterministic=True) > 0
    assert fused_embeddings(model) == []
