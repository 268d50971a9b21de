"""Adapters of experts and routers, against the sum of the weights of the base and of the adapter."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from fa_serve.hf import patch, take_experts
from fa_serve.hf.lora.format import AdapterConfig, LoraAdapter
from fa_serve.hf.lora.parameters import AdaptedExperts, AdaptedRouter, ParameterModules, bytes_of
from fa_serve.hf.lora.product import LoraStep, StepHolder
from fa_serve.hf.surgery.fuse.fusion import fuse_model
from fa_serve.ops import LoraBatch
from fa_serve.spec import ParameterError

EXPERTS = "model.layers.0.mlp.experts"
GATE = "model.layers.0.mlp.gate"
SIZES = {"gate_up_proj": (6, 48, 32), "down_proj": (6, 32, 24)}
CONFIG = AdapterConfig(rank=2, alpha=1.0)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def pair(count: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(count * 2, columns, seed=seed), randn(rows, count * 2, seed=seed + 1)


def make():
    model = make_model("qwen3-moe")
    patch(model)
    take_experts(model)
    fuse_model(model)
    holder = StepHolder()
    return model, holder, ParameterModules(model, holder)


def step(tokens: list[int], total: int) -> LoraStep:
    none = [torch.zeros(0, dtype=torch.int32) for _ in range(4)]
    return LoraStep(LoraBatch(torch.zeros(total, dtype=torch.int32), *none, 16), [(3, torch.tensor(tokens), torch.tensor([0]))])


@torch.no_grad()
def test_experts_and_router_are_those_of_merged_weights() -> None:
    model, holder, modules = make()
    pairs = [pair(*SIZES["down_proj"], seed=1), pair(*SIZES["gate_up_proj"], seed=3)]
    parts = modules.pack(LoraAdapter(parameters={EXPERTS: pairs, GATE: [pair(1, 6, 32, seed=5)]}, config=CONFIG))
    assert bytes_of(parts) > 0
    modules.write(3, parts)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.experts.forward, AdaptedExperts)
    assert isinstance(mlp.gate.forward, AdaptedRouter)
    x = randn(1, 5, 32, seed=9)
    base = mlp(x)[0]
    with holder.serving(step([1, 4], 5)):
        found = mlp(x)[0]
    merged = make_model("qwen3-moe").model.layers[0].mlp
    for name, (a, b) in zip(("down_proj", "gate_up_proj"), pairs, strict=True):
        count = SIZES[name][0]
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), -1, count), a.view(count, -1, a.shape[1]))
        getattr(merged.experts, name).add_(delta * 0.5)
    a, b = pair(1, 6, 32, seed=5)
    merged.gate.weight.add_(b @ a * 0.5)
    expected = merged(x)[0]
    torch.testing.assert_close(found[[1, 4]], expected[[1, 4]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[[0, 2, 3]], base[[0, 2, 3]])
    assert not torch.allclose(found[[1, 4]], base[[1, 4]], atol=1e-2)
    modules.write(3, None)
    with holder.serving(step([1, 4], 5)):
        torch.testing.assert_close(mlp(x)[0], base)


@pytest.mark.parametrize(
    ("name", "pairs", "field"),
    [
        (EXPERTS, [pair(6, 32, 23, seed=1)], EXPERTS),
        (EXPERTS, [pair(5, 32, 24, seed=1)], EXPERTS),
        (EXPERTS, [pair(6, 32, 24, seed=1), pair(6, 32, 24, seed=2)], EXPERTS),
        ("model.layers.0.mlp", [pair(6, 32, 24, seed=1)], "target_parameters"),
    ],
)
def test_what_does_not_fit_is_refused(name, pairs, field) -> None:
    _, _, modules = make()
    with pytest.raises(ParameterError) as caught:
        modules.pack(LoraAdapter(parameters={name: pairs}, config=CONFIG))
    assert caught.value.field == field


def test_other_rows_than_those_of_the_step_are_refused() -> None:
    model, holder, modules = make()
    modules.write(3, modules.pack(LoraAdapter(parameters={EXPERTS: [pair(*SIZES["down_proj"], seed=1)]}, config=CONFIG)))
    with holder.serving(step([1], 4)), torch.no_grad(), pytest.raises(RuntimeError, match="5 rows in a step of 4 tokens"):
        model.model.layers[0].mlp(randn(1, 5, 32, seed=9))
