"""Routers with fused kernels choose what the models' own routers choose. Other routers are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_families import Family, assert_same, tokens
from moe_families import MIXTURES
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from fa_serve import ops
from fa_serve.hf.surgery.fuse.router import FusedRouter, fuse_routers

ROUTERS = {
    "qwen3-moe": ops.Router(2),
    "mixtral": ops.Router(2, renormalise=True),
    "gpt-oss": ops.Router(2, renormalise=True),
    "deepseek-v3": ops.Router(2, sigmoid=True, renormalise=True, scale=2.5, num_groups=2, top_groups=1),
    "qwen2-moe": ops.Router(3),
    "olmoe": ops.Router(3),
    "granitemoe": ops.Router(3, renormalise=True),
    "glm4-moe": ops.Router(2, sigmoid=True, renormalise=True, num_groups=2, top_groups=1),
    "ernie4.5-moe": ops.Router(3, renormalise=True),
    "cohere2-moe": ops.Router(3, renormalise=True),
}
OWN = ("phimoe", "minimax-m2", "gemma4-moe", "hunyuan-moe")
BY_NAME = {family.name: family for family in MIXTURES}


def corrections(model: nn.Module) -> list[Tensor]:
    return [x for name, x in (*model.named_buffers(), *model.named_parameters()) if "correction" in name]


@torch.no_grad()
def built(family: Family, **changes: Any) -> PreTrainedModel:
    """A model whose corrections of scores, which are 0 in a new model, decide about experts."""
    model = family.build(**changes)
    for x in corrections(model):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) / 4)
    return model


def routers(model: nn.Module) -> list[FusedRouter]:
    return [vars(m)["forward"] for m in model.modules() if isinstance(vars(m).get("forward"), FusedRouter)]


@pytest.mark.parametrize(("name", "router"), ROUTERS.items(), ids=ROUTERS)
@torch.no_grad()
def test_routers_are_found_by_what_they_compute(name: str, router: ops.Router) -> None:
    eager = built(BY_NAME[name])
    ours = built(BY_NAME[name])
    assert fuse_routers(ours) == len(routers(ours)) > 0
    assert {fused.router for fused in routers(ours)} == {router}
    assert len([fused for fused in routers(ours) if fused.correction is not None]) == len(corrections(ours))
    for ids in (tokens(2, 12), tokens(1, 1)):
        assert_same(ours(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_other_routers_run_as_they_are(name: str) -> None:
    eager = built(BY_NAME[name])
    ours = built(BY_NAME[name])
    assert fuse_routers(ours) == 0
    assert torch.equal(ours(tokens(2, 12)).logits, eager(tokens(2, 12)).logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        {"n_group": 1, "norm_topk_prob": False},
    ],
    ids=["four-groups", "no-groups"],
)
@torch.no_grad()
def test_groups_are_found(changes: dict[str, Any]) -> None:
    ours = built(BY_NAME["deepseek-v3"], **changes)
    expected = ours(tokens(2, 12)).logits
    fuse_routers(ours)
    [fused] = routers(ours)
    assert (fused.router.num_groups, fused.router.top_groups) == (changes["n_group"], changes.get("topk_group", 1))
    assert fused.router.renormalise == changes.get("norm_topk_prob", True)
    assert_same(ours(tokens(2, 12)).logits, expected)


@pytest.mark.parametrize(("name", "wide"), [("deepseek-v3", True), ("granitemoe", False), ("qwen3-moe", False)])
@torch.no_grad()
def test_logits_are_computed_in_the_dtype_of_the_router(name: str, wide: bool) -> None:
    """DeepSeek multiplies in float32; Granite multiplies in the dtype of its weights and casts then."""
    ours = built(BY_NAME[name]).bfloat16()
    ids = tokens(2, 12)
    expected = ours(ids).logits
    fuse_routers(ours)
    assert {fused.weight.dtype for fused in routers(ours)} == {torch.float32 if wide else torch.bfloat16}
    actual = ours(ids).logits
    assert float((actual - expected).abs().max()) <= 0.02 * float(expected.abs().max())


def test_a_router_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MixtralTopKRouter.forward

    def other(self: Any, hidden_states: Tensor) -> Any:
        logits, weights, index = forward(self, hidden_states)
        return logits, weights * (1 + 0.01 * index), index

    monkeypatch.setattr(MixtralTopKRouter, "forward", other)
    assert fuse_routers(built(BY_NAME["mixtral"])) == 0


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of a single token is checked, and the choice on the device of the model."""
    compute = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, *rest: compute(x, *rest) * (1.01 if len(x) == 1 else 1.0))
    assert fuse_routers(built(BY_NAME["mixtral"])) == 0


def test_hooks_are_not_passed_over() -> None:
    model = built(BY_NAME["mixtral"])
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: output)
    assert fuse_routers(model) <= 1
    assert "forward" not in vars(model.model.layers[0].mlp.gate)


def test_gradients_and_graphs_run_the_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(BY_NAME["qwen3-moe"])
    expected = model(tokens(2, 12)).logits
    fuse_routers(model)
    monkeypatch.setattr(ops, "route", None)
    assert torch.equal(model(tokens(2, 12)).logits, expected)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model.model.layers[0].mlp.gate, fullgraph=True, backend="eager")
        _, _, index = compiled(torch.ones(3, 64))
    assert index.shape == (3, 2)


def test_the_engine_fuses_routers(make_engine) -> None:
    engine = make_engine("qwen3-moe")
    assert len(routers(engine._runner.model)) == 2
    assert len(routers(make_engine("qwen3-moe", deterministic=True)._runner.model)) == 2


def test_routers_that_would_copy_their_numbers_are_left_to_a_trainer() -> None:
    model = built(BY_NAME["deepseek-v3"]).to(torch.bfloat16)
    assert fuse_routers(model, live=True) == 0
    assert fuse_routers(model) > 0
