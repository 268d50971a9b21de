"""Projections, norms and gated units as ops take them, and which modules no op stands for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fa_serve import ops
from fa_serve.hf.surgery.fuse.parts import activation_of, gated_unit, merge_products, norm_of, product_of
from fa_serve.hf.surgery.proof import NotReplacedError


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x)


class Unit(nn.Module):
    def __init__(self, act_fn: Any, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 12, bias=bias)
        self.up_proj = nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.act_fn = act_fn


def test_projections_are_merged_without_additional_memory() -> None:
    unit = Unit(nn.SiLU(), bias=True)
    gate = unit.gate_proj.weight.clone()
    up = unit.up_proj.weight.clone()
    merged = merge_products(unit, "gate_proj", "up_proj")
    assert torch.equal(merged.weight, torch.cat([gate, up]))
    assert torch.equal(merged.bias, torch.cat([unit.gate_proj.bias, unit.up_proj.bias]))
    assert unit.up_proj.weight.data_ptr() == merged.weight[12:].data_ptr()
    assert torch.equal(unit.gate_proj.weight, gate)
    assert unit.gate_proj.weight.requires_grad
    assert merge_products(unit, "down_proj").weight is unit.down_proj.weight, "one projection stays as it is"


def test_projections_of_which_some_have_a_bias_are_not_merged() -> None:
    with pytest.raises(NotReplacedError, match=r"all or none of \('gate_proj', 'up_proj'\) must have a bias"):
        merge_products(Unit(nn.SiLU()), "gate_proj", "up_proj")


class Tied(nn.Linear): ...


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda linear: setattr(linear, "forward", lambda x: x), "the forward of a projection is replaced by function"),
        (
            lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(4, 6).t())),
            r"must be contiguous, got strides \(1, 6\)",
        ),
        (
            lambda linear: setattr(linear, "__class__", Tied),
            r"must be a plain torch.nn.Linear of floats, got \S+test_parts.Tied",
        ),
    ],
    ids=["forward", "strides", "class"],
)
def test_a_projection_that_no_op_computes_is_refused(change: Any, reason: str) -> None:
    linear = nn.Linear(4, 6)
    change(linear)
    with pytest.raises(NotReplacedError, match=reason):
        product_of(linear)


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_a_norm_is_read_with_its_offset(kind: Any, offset: float) -> None:
    module = kind(16, eps=1e-3)
    module.weight.copy_(torch.rand(16))
    norm = norm_of(module)
    assert (norm.eps, norm.offset) == (1e-3, offset)
    assert norm.weight is module.weight
    module.forward = gelu
    with pytest.raises(NotReplacedError, match="the forward of a norm is replaced by function"):
        norm_of(module)


def test_an_activation_is_read_from_its_values() -> None:
    """The two forms of GELU differ by less than a proof may let pass."""
    for function, name in ((nn.SiLU(), "silu"), (gelu, "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh")):
        assert activation_of(Unit(function)) == name
        assert name in ops.ACTIVATIONS
    with pytest.raises(NotReplacedError, match=r"its activation must be one of .*, got Tanh"):
        activation_of(Unit(nn.Tanh()))


def test_a_module_without_the_projections_of_a_gated_unit_is_none() -> None:
    unit = gated_unit(Unit(nn.SiLU(), bias=True))
    assert unit is not None
    assert (tuple(unit.gate_up.weight.shape), unit.activation) == ((24, 8), "silu")
    assert gated_unit(SimpleNamespace(down_proj=nn.Identity())) is None
