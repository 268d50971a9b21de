"""The norm behind the last layer is one op. Norms that compute something else, and other modules, are left alone."""

from __future__ import annotations

import pytest
import torch
from hf_families import BY_NAME, assert_same, tokens
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse.fusion import fuse_layers, fuse_model, unfuse_model
from fa_serve.hf.surgery.fuse.last_norm import FusedNorm, fuse_last_norms


def fused_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), FusedNorm)]


def model_with_layers(name: str = "llama") -> nn.Module:
    """A model whose layers are fused, and whose last norm is not yet."""
    model = BY_NAME[name].build()
    patch(model)
    assert fuse_layers(model) > 0
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
@torch.no_grad()
def test_the_last_norm_is_one_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma adds 1 to its weights."""
    eager = BY_NAME[name].build()
    model = model_with_layers(name)
    assert fuse_last_norms(model) == 1
    assert fused_norms(model) == ["model.norm"]
    calls = []
    compute = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda *args, **options: calls.append(args) or compute(*args, **options))
    for ids in (tokens(2, 12), tokens(1, 1)):
        calls.clear()
        assert_same(model(ids).logits, eager(ids).logits)
        assert len(calls) == 1


@torch.no_grad()
def test_it_is_the_norm_of_weights_that_change() -> None:
    model = model_with_layers()
    fuse_last_norms(model)
    before = model(tokens(1, 5)).logits
    model.model.norm.weight.mul_(2.0)
    torch.testing.assert_close(model(tokens(1, 5)).logits, 2.0 * before)


class Tripled(nn.Module):
    """Has the parts of a norm, and computes something else."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * x * self.weight * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("make", [Tripled, lambda norm: nn.LayerNorm(len(norm.weight))], ids=["tripled", "layer norm"])
def test_other_norms_are_left_alone(make) -> None:
    model = BY_NAME["llama"].build()
    model.model.norm = make(model.model.norm)
    patch(model)
    assert fuse_layers(model) > 0
    assert fuse_last_norms(model) == 0


def test_hooks_are_not_passed_over() -> None:
    model = model_with_layers()
    model.model.norm.register_forward_hook(lambda module, args, output: output)
    assert fuse_last_norms(model) == 0


def test_a_model_without_fused_layers_keeps_its_norm() -> None:
    model = BY_NAME["llama"].build()
    assert fuse_last_norms(model) == 0


@torch.no_grad()
def test_numbers_of_another_dtype_go_through_the_own_code() -> None:
    """A norm whose weights stay in float32 returns what its own code returns for them."""
    model = model_with_layers()
    fuse_last_norms(model)
    x = torch.randn(1, 3, len(model.model.norm.weight)).bfloat16()
    assert torch.equal(model.model.norm(x), type(model.model.norm).forward(model.model.norm, x))


def test_gradients_run_the_own_code_and_norms_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_layers()
    expected = model(tokens(2, 12)).logits
    fuse_last_norms(model)
    monkeypatch.setattr(ops, "rms_norm", None)
    assert torch.equal(model(tokens(2, 12)).logits, expected)
    unfuse_model(model)
    assert fused_norms(model) == []


def test_deterministic_mode_computes_what_a_training_forward_does() -> None:
    model = BY_NAME["llama"].build()
    patch(model)
    assert fuse_model(model, deterministic=True) > 0
    assert fused_norms(model) == []
    unfuse_model(model)
    fuse_model(model)
    assert fused_norms(model) == ["model.norm"]
