"""Experts that every token takes compute with two products what their own code computes. Other modules are left alone."""

from __future__ import annotations

import pytest
import torch
from hf_families import assert_same, tokens
from moe_families import MIXTURES
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.fusion import unfuse_model
from fa_serve.hf.surgery.fuse.unit import FusedUnit, fuse_units

BY_NAME = {family.name: family for family in MIXTURES}
SHARED = ("qwen2-moe", "deepseek-v3", "glm4-moe", "ernie4.5-moe")


def units(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), FusedUnit)]


@pytest.mark.parametrize("name", SHARED)
@torch.no_grad()
def test_units_are_found_by_what_they_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = BY_NAME[name].build()
    ours = BY_NAME[name].build()
    assert fuse_units(ours) == len(units(ours)) > 0
    products = []
    compute = ops.linear
    monkeypatch.setattr(ops, "linear", lambda *args, **kwargs: products.append(args) or compute(*args, **kwargs))
    for ids in (tokens(2, 12), tokens(1, 1)):
        assert_same(ours(ids).logits, eager(ids).logits)
    assert len(products) == 4 * len(units(ours)), "two products for each forward"


@torch.no_grad()
def test_merged_weights_take_no_additional_memory() -> None:
    model = BY_NAME["deepseek-v3"].build()
    fuse_units(model)
    for module in units(model):
        merged = module.forward.gate_up.weight
        assert module.gate_proj.weight.data_ptr() == merged.data_ptr()
        assert module.up_proj.weight.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_mixtures_without_them_have_none(name: str) -> None:
    assert fuse_units(BY_NAME[name].build()) == 0


class Doubled(nn.Module):
    """Has the projections of a gated unit, and computes something else."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        for name, module in unit.named_children():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1.01


def test_units_that_compute_something_else_are_left_alone() -> None:
    model = BY_NAME["deepseek-v3"].build()
    replaced = 0
    for module in model.modules():
        if hasattr(module, "shared_experts"):
            module.shared_experts = Doubled(module.shared_experts)
            replaced += 1
    assert replaced > 0
    assert fuse_units(model) == 0


def test_a_kernel_that_fails_for_one_token_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, *args, **kwargs: compute(x, *args, **kwargs) * (1.01 if len(x) == 1 else 1.0))
    assert fuse_units(BY_NAME["deepseek-v3"].build()) == 0


def test_hooks_are_not_passed_over() -> None:
    model = BY_NAME["deepseek-v3"].build()
    hooked = next(m.shared_experts for m in model.modules() if hasattr(m, "shared_experts"))
    hooked.down_proj.register_forward_hook(lambda module, args, output: output)
    fuse_units(model)
    assert "forward" not in vars(hooked)


def test_gradients_run_the_own_code_and_units_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["deepseek-v3"].build()
    expected = model(tokens(2, 12)).logits
    fuse_units(model)
    monkeypatch.setattr(ops, "linear", None)
    assert torch.equal(model(tokens(2, 12)).logits, expected)
    unfuse_model(model)
    assert units(model) == []
