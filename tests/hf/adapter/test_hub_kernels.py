"""Kernels of the Hub, which transformers 5.25 puts into models by default. Any release can be given such forwards by hand."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from hf_families import BY_NAME, tokens
from hybrids import BY_NAME as HYBRIDS
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.hub_kernels import has_hub_forward, restore_own_forwards
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules
from fa_serve.hf.surgery.fuse.fusion import fuse_model, unfuse_model


class HubNorm(nn.Module):
    """A layer as `kernels` requires it: without a constructor, so that its forward serves any module with a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OwnNorm(nn.Module):
    """A class of a user, which has a constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def put_kernels(model: PreTrainedModel, kind: type[nn.Module], layer: type[nn.Module]) -> None:
    """Do as `kernels` does at a load of transformers 5.25."""
    for module in model.modules():
        if isinstance(module, kind):
            module.forward = MethodType(layer.forward, module)
    model._use_kernels = True


@pytest.fixture
def names_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (LlamaRMSNorm, Qwen3_5GatedDeltaNet):
        monkeypatch.setattr(kind, "kernel_layer_name", kind.__name__, raising=False)


@pytest.mark.usefixtures("names_of_kernels")
@pytest.mark.parametrize("layer", [HubNorm, LlamaRMSNorm], ids=["kernel", "fallback"])
@torch.no_grad()
def test_a_model_with_kernels_of_the_hub_is_fused(layer: type[nn.Module]) -> None:
    model = BY_NAME["llama"].build()
    ids = tokens(1, 9)
    expected = model(ids).logits
    put_kernels(model, LlamaRMSNorm, layer)
    model.set_attn_implementation("fa_serve")
    unfuse_model(model)  # as each engine begins
    assert fuse_model(model) == len(model.model.layers)
    unfuse_model(model)
    assert not model._use_kernels
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("names_of_kernels")
def test_recurrences_of_a_model_with_kernels_of_the_hub_are_patched() -> None:
    model = HYBRIDS["qwen3.5"].build()
    put_kernels(model, Qwen3_5GatedDeltaNet, Qwen3_5GatedDeltaNet)
    model.set_attn_implementation("fa_serve")
    hf.check_model(model)
    assert all(has_hub_forward(module) for module in find_state_modules(model))  # a check changes nothing
    fa_serve.patch(model)
    assert all(isinstance(vars(module)["forward"], PatchedMixer) for module in find_state_modules(model))


@pytest.mark.usefixtures("names_of_kernels")
def test_a_forward_that_somebody_else_put_there_stays() -> None:
    norm = LlamaRMSNorm(4)
    for forward in (MethodType(OwnNorm.forward, norm), MethodType(lambda self, x: x, norm), torch.sin):
        norm.forward = forward
        restore_own_forwards(norm)
        assert vars(norm)["forward"] is forward
