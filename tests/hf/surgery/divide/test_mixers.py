"""Modules with states that are divided by heads or channels: ranks together compute the same, and wrong heads are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrids import BY_NAME, HYBRIDS, HybridPages
from rank_threads import run_ranks
from sampled_cases import ALL
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf import model_layers, patch, plan_division
from fa_serve.hf.adapter.paged import OneSequence, paged_forward
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules
from fa_serve.hf.surgery.divide import plan
from fa_serve.hf.surgery.divide.mixers import MixerParts, divide_mixer
from fa_serve.hf.surgery.divide.plan import Division
from fa_serve.hf.surgery.divide.sections import Cut, Section
from fa_serve.hf.surgery.divide.weights import PartOfNorm, divide_model
from fa_serve.hf.surgery.fuse.fusion import fuse_layers
from fa_serve.hf.surgery.states import patch_states
from fa_serve.spec import UnsupportedModelError

CPU = torch.device("cpu")
DIVIDED = [family.name for family in HYBRIDS if family.name != "zamba"]
ON_FOUR = ("qwen3.5", "olmo-hybrid", "bamba", "mamba2", "jamba", "lfm2", "minimax", "recurrent-gemma")
"""Those with as many heads in the tests, or whose heads of keys, groups and norms ranks share."""
IN_STEPS = ("qwen3-next", "kimi-linear", "bamba", "nemotron-h", "jamba", "lfm2", "minimax", "recurrent-gemma")
"""Each kind of state. Two ranks compute these in steps of the engine."""
ON_TWO = DIVIDED if ALL else [name for name in DIVIDED if name not in {*ON_FOUR, *IN_STEPS}]


def patched(name: str, **settings: Any) -> PreTrainedModel:
    model = BY_NAME[name].build(**settings)
    patch(model)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(5, 20)
    return paged_forward(model, ids, torch.arange(15), OneSequence(), torch.arange(15))


def on_ranks(model: PreTrainedModel, size: int, work: Callable[[PreTrainedModel, int], Any], division: Any = None) -> list[Any]:
    planned: Division = division or plan_division(model, size)

    def run(rank: int, all_reduce: Any) -> Any:
        own = copy.deepcopy(model)
        divide_model(own, planned, rank, all_reduce, CPU)
        return work(own, rank)

    return run_ranks(size, run)


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)])
def test_ranks_together_compute_the_same(name: str, size: int) -> None:
    model = patched(name)
    results = on_ranks(model, size, lambda own, _: (logits(own), bytes_of_states(own)))
    check_ranks(results, logits(model), bytes_of_states(model))


def bytes_of_states(model: PreTrainedModel) -> int:
    return sum(spec.bytes_per_state for spec in model_layers(model).states.values())


def check_ranks(results: list[tuple[Tensor, int]], expected: Tensor, whole: int) -> None:
    """results: the logits of each rank, and the bytes of its states, which are `whole` without ranks"""
    for actual, held in results:
        assert torch.equal(actual, results[0][0]), "every rank has the same bits"
        assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
        assert held <= whole / len(results) * 1.2, "heads of keys and groups may be repeated"


STEPS = ({0: 20, 1: 7}, {0: 3, 1: 2}, {0: 1, 1: 10}, {0: 9, 1: 1}, {0: 1, 1: 1})


@torch.no_grad()
def paged_logits(model: PreTrainedModel, spoil: Callable[[HybridPages], None] | None = None) -> Tensor:
    """The logits of two sequences in steps of the engine. spoil: called before the last step"""
    patch_states(model)
    ids = torch.arange(80).view(2, 40) * 7 % 90
    pages = HybridPages(model, count=2)
    found = []
    for number, step in enumerate(STEPS):
        if spoil is not None and number == len(STEPS) - 1:
            spoil(pages)
        first = dict(enumerate(pages.lengths))
        found += pages.step({b: ids[b, first[b] : first[b] + count] for b, count in step.items()}).values()
    return torch.cat(found)


@pytest.mark.parametrize("name", IN_STEPS)
def test_states_of_ranks_in_steps_of_the_engine(name: str) -> None:
    """Prompts in chunks and single tokens, over the end of a page."""
    model = patched(name)
    expected = paged_logits(copy.deepcopy(model))

    def work(own: PreTrainedModel, rank: int) -> tuple[Tensor, int]:
        held = bytes_of_states(own)
        out = paged_logits(own)
        assert all(isinstance(vars(module)["forward"], PatchedMixer) for module in find_state_modules(own))
        return out, held

    check_ranks(on_ranks(model, 2, work), expected, bytes_of_states(model))


def test_the_state_of_a_wrong_head_is_found() -> None:
    """What the test above compares differs by far if one rank has the heads of its states in another order."""
    model = patched("qwen3-next")
    expected = paged_logits(copy.deepcopy(model))

    def turn(pages: HybridPages) -> None:
        for states in pages.states.values():
            if states.pages.dim() == 4:
                states.pages.copy_(states.pages.roll(1, dims=1))

    results = on_ranks(model, 2, lambda own, rank: paged_logits(own, turn if rank else None))
    assert float((results[0] - expected).abs().max()) > 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("qwen3-next", "linear_attn.A_log"),
        ("qwen3.5", "linear_attn.conv1d.weight"),
        ("kimi-linear", "self_attn.forget_gate.dt_bias"),
        ("bamba", "mamba.norm.weight"),
        ("falcon-h1", "mamba.mup_vector"),
        ("jamba", "mamba.x_proj.weight"),
    ],
)
def test_a_wrong_head_of_a_parameter_is_refused(name: str, parameter: str) -> None:
    """Each rank is given the part of the other one."""
    model = patched(name)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "mup_vector"):
                module.mup_vector.copy_(torch.linspace(0.5, 2.0, module.mup_vector.numel()))
            if isinstance(module, nn.Module) and hasattr(module, "norm") and getattr(module.norm, "weight", None) is not None:
                module.norm.weight.copy_(torch.linspace(0.5, 2.0, len(module.norm.weight)))
            if hasattr(module, "A_log"):
                module.A_log.add_(torch.linspace(0.0, 2.0, module.A_log.numel()).view_as(module.A_log))
            if hasattr(module, "dt_bias"):
                module.dt_bias.add_(torch.linspace(0.0, 2.0, len(module.dt_bias)))
    division = plan_division(model, 2)
    layer = division.layers["model.layers.0"]
    cut = layer.cuts[parameter]

    class Turned(Cut):
        def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
            return cut.ranges(size - 1 - rank, size)

    layer.cuts[parameter] = Turned(*cut)
    refusal = r"model.layers.0 \(\w+\) gives a different result when divided: the difference is"
    with pytest.raises(UnsupportedModelError, match=refusal):
        on_ranks(model, 2, lambda own, rank: None, division)
    layer.cuts[parameter] = cut
    on_ranks(model, 2, lambda own, rank: None, division)


def test_a_norm_over_all_heads_adds_up_squares() -> None:
    """Without the other ranks' squares the layer is refused. A norm of groups needs none of them."""
    model = patched("bamba")
    division = plan_division(model, 2)
    layer = division.layers["model.layers.0"]
    assert layer.norms == {"mamba.norm": 128}

    def work(own: PreTrainedModel, rank: int) -> None:
        assert isinstance(own.model.layers[0].mamba.norm.forward, PartOfNorm)

    on_ranks(model, 2, work, division)
    layer.norms.clear()
    with pytest.raises(UnsupportedModelError, match="gives a different result when divided"):
        on_ranks(model, 2, lambda own, rank: None, division)
    grouped = plan_division(patched("nemotron-h"), 2).layers["model.layers.0"]
    assert grouped.norms == {}
    assert grouped.numbers["mixer"]["n_groups"] == 1


def test_a_norm_whose_gate_comes_last() -> None:
    model = patched("falcon-h1", mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=1)
    expected = logits(model)
    for actual in on_ranks(model, 2, lambda own, _: logits(own)):
        assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_divided_mixers_are_fused_by_each_rank_alone(name: str) -> None:
    """As many layers as of the whole model."""

    def fused(own: PreTrainedModel) -> tuple[int, Tensor]:
        patch_states(own)
        return fuse_layers(own), logits(own)

    count, expected = fused(patched(name))
    for actual, out in on_ranks(patched(name), 2, lambda own, _: fused(own)):
        assert actual == count
        assert float((out - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


def test_key_heads_that_are_fewer_than_ranks_are_repeated() -> None:
    mixer = patched("qwen3.5").model.layers[0].linear_attn
    parts = divide_mixer(mixer, 4)
    assert parts is not None
    assert parts.rows["in_proj_qkv"] == (Section(32, 2, shared=True), Section(32, 2, shared=True), Section(64, 4))
    assert parts.numbers[""] == {"num_k_heads": 1, "num_v_heads": 1, "key_dim": 16, "value_dim": 16, "conv_dim": 48}


def test_what_does_not_divide_is_named() -> None:
    refusals = {
        "zamba": r"model.layers.0.mamba \(ZambaMambaMixer\) keeps its state in a form that cannot be divided",
        "qwen3-next": r"the 2 heads of model.layers.0.linear_attn.in_proj_qkvz \(rule 'by heads'\) cannot be divided by 4",
        "nemotron-h": r"the 2 heads of model.layers.0.mixer.norm.weight \(rule 'by heads'\) cannot be divided by 4",
    }
    for name, refusal in refusals.items():
        with pytest.raises(UnsupportedModelError, match=f"cannot be divided between 4 ranks: {refusal}"):
            plan_division(patched(name), 4)


def test_a_parameter_of_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module, size: int) -> MixerParts | None:
        parts = divide_mixer(module, size)
        return None if parts is None else replace(parts, rows=parts.rows | {"A_log": (Section(6, 6),)})

    monkeypatch.setattr(plan, "divide_mixer", wrong)
    with pytest.raises(UnsupportedModelError, match=r"linear_attn.A_log has the shape \(4,\), in which no dimension is 6"):
        plan_division(patched("qwen3.5"), 2)


def test_layers_that_return_tuples_are_observed_before_their_weights_are_read() -> None:
    """Bamba unpacks what a layer returns, and Falcon H1 takes the first of it. Both are divided."""
    for name in ("bamba", "falcon-h1"):
        on_ranks(patched(name), 2, lambda own, rank: None)


def test_projections_without_a_plan_are_found_by_their_names() -> None:
    lfm = plan_division(patched("lfm2-moe"), 2)
    first = lfm.layers["model.layers.0"]
    assert {"conv.in_proj.weight", "feed_forward.w1.weight", "feed_forward.w2.weight"} <= first.cuts.keys()
    second = lfm.layers["model.layers.1"]
    assert {"self_attn.out_proj.weight", "feed_forward.experts.gate_up_proj"} <= second.cuts.keys()
    assert second.sums == ["self_attn.out_proj", "feed_forward.experts"]
    assert second.attention == {"self_attn": (2, 1)}
    kimi = plan_division(patched("kimi-linear"), 2).layers["model.layers.1"]
    assert "self_attn.kv_b_proj.weight" in kimi.cuts, "the plan of transformers says nothing about its attention"
