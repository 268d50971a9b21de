"""The plan of a division: which rows and columns a rank keeps, and the models that have no plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_type import tiny_model
from hf_families import BY_NAME
from image_inputs import CHANGES
from tiny_models import make_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from fa_serve.hf.surgery.divide.plan import plan_division
from fa_serve.hf.surgery.divide.sections import Cut, Section
from fa_serve.spec import UnsupportedModelError


def on_meta(**settings: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 32}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes | settings))


def test_ranges_of_sections() -> None:
    queries = Section(32, 8)
    keys = Section(8, 2, shared=True)
    cut = Cut(0, (queries, keys))
    assert [cut.ranges(rank, 2) for rank in range(2)] == [[(0, 16), (32, 4)], [(16, 16), (36, 4)]]
    assert [cut.ranges(rank, 4)[1] for rank in range(4)] == [(32, 4), (32, 4), (36, 4), (36, 4)], "two ranks share a head"
    kept = cut.kept(torch.arange(40), 3, 4)
    assert [x.tolist() for x in kept] == [list(range(24, 32)), list(range(36, 40))]


def test_a_llama_is_divided_by_heads_and_by_the_width_of_its_mlp() -> None:
    division = plan_division(on_meta(num_key_value_heads=2, attention_bias=True), 4)
    [(path, layer)] = division.layers.items()
    assert path == "model.layers.0"
    assert layer.cuts == {
        "self_attn.q_proj.weight": Cut(0, (Section(64, 8),)),
        "self_attn.q_proj.bias": Cut(0, (Section(64, 8),)),
        "self_attn.k_proj.weight": Cut(0, (Section(16, 2, shared=True),)),
        "self_attn.k_proj.bias": Cut(0, (Section(16, 2, shared=True),)),
        "self_attn.v_proj.weight": Cut(0, (Section(16, 2, shared=True),)),
        "self_attn.v_proj.bias": Cut(0, (Section(16, 2, shared=True),)),
        "self_attn.o_proj.weight": Cut(1, (Section(64, 8),)),
        "mlp.gate_proj.weight": Cut(0, (Section(96, 96),)),
        "mlp.up_proj.weight": Cut(0, (Section(96, 96),)),
        "mlp.down_proj.weight": Cut(1, (Section(96, 96),)),
    }
    assert layer.sums == ["self_attn.o_proj", "mlp.down_proj"]
    assert layer.once == ["self_attn.o_proj.bias"], "only rank 0 adds it"
    assert layer.attention == {"self_attn": (2, 1)}


def test_merged_projections_and_norms_over_all_heads() -> None:
    phi = plan_division(BY_NAME["phi3"].build(), 2).layers["model.layers.0"]
    assert phi.cuts["self_attn.qkv_proj.weight"].sections == (Section(64, 4), Section(32, 2, True), Section(32, 2, True))
    assert phi.cuts["mlp.gate_up_proj.weight"].sections == (Section(96, 96), Section(96, 96))
    olmo = plan_division(BY_NAME["olmo2"].build(), 2).layers["model.layers.0"]
    assert olmo.narrowed == {
        "self_attn.q_norm": Cut(-1, (Section(64, 4),)),
        "self_attn.k_norm": Cut(-1, (Section(32, 2, True),)),
    }
    assert "self_attn.q_proj.weight" not in olmo.cuts, "a norm over all heads needs all heads"
    assert "self_attn.v_proj.weight" in olmo.cuts


@pytest.mark.parametrize(
    ("settings", "size", "reason"),
    [
        ({}, 3, r"the 8 heads of model.layers.0.self_attn.q_proj \(rule 'colwise'\) cannot be divided by 3"),
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            r"the 3 heads of model.layers.0.self_attn.k_proj \(rule 'colwise'\) cannot be divided by 2",
        ),
        (
            {"intermediate_size": 99},
            2,
            r"the 99 rows or columns of model.layers.0.mlp.gate_proj \(rule 'colwise'\) cannot be divided by 2",
        ),
    ],
    ids=["heads", "kv-heads", "width"],
)
def test_what_does_not_divide_is_named(settings: dict[str, Any], size: int, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM cannot be divided between {size} ranks: {reason}"):
        plan_division(on_meta(**settings), size)


def test_rules_and_modules_that_are_not_known_are_named() -> None:
    model = on_meta()
    model.model.layers[0].mlp.up_proj = torch.nn.Bilinear(1, 1, 1, device="meta")
    with pytest.raises(
        UnsupportedModelError, match=r"mlp.up_proj must be an nn.Linear of floats, or .* rule 'colwise', got Bilinear"
    ):
        plan_division(model, 2)
    model = on_meta()
    model.tp_plan = {"model.layers.*.mlp.down_proj": "sequence_parallel"}
    with pytest.raises(
        UnsupportedModelError, match=r"the rule 'sequence_parallel' of model.layers.0.mlp.down_proj is not supp"
    ):
        plan_division(model, 2)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel cannot .* has no tensor-parallel plan for its layers"):
        plan_division(BY_NAME["gpt2"].build(), 2)


@pytest.mark.parametrize("name", ["gemma4", "ernie4_5_vl_moe"])
def test_towers_stay_whole(name: str) -> None:
    """Also those of types for which transformers has a plan, by rules that would not do here."""
    model = tiny_model(name, CHANGES[name])
    decoder = {*model.get_decoder().modules()}
    division = plan_division(model, 2)
    assert any(layer.cuts for layer in division.layers.values())
    assert {model.get_submodule(path) for path in division.layers} <= decoder


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_without_a_rule_are_divided_as_well(name: str) -> None:
    """From 5.25 on, plans of transformers have rules for attention and dense layers alone."""
    model = BY_NAME[name].build()
    with_rules = plan_division(model, 2)
    model._tp_plan = {path: rule for path, rule in model.tp_plan.items() if "experts" not in path}
    assert plan_division(model, 2) == with_rules
    assert with_rules.layers["model.layers.0"].cuts["mlp.experts.down_proj"].dim == 2


def test_experts_in_other_forms_stay_whole_without_a_rule() -> None:
    """The matrices of GPT-OSS are transposed, and have biases."""
    model = BY_NAME["gpt-oss"].build()
    attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    model._tp_plan = {f"model.layers.*.self_attn.{name}": rule for name, rule in attention.items()}
    assert "mlp.experts" not in plan_division(model, 2).layers["model.layers.0"].sums


def test_experts_are_summed_where_a_plan_names_their_weights_alone() -> None:
    """As for Qwen3-Omni of transformers 5.17, whose plan has no rule for the module of the experts."""
    name = "qwen3_omni_moe_thinker"
    layer = next(iter(plan_division(tiny_model(name, CHANGES[name]), 2).layers.values()))
    assert (layer.sums, layer.cuts["mlp.experts.down_proj"].dim) == (["self_attn.o_proj", "mlp.experts"], 2)
    with_rule = plan_division(make_model("qwen3-moe"), 2).layers["model.layers.0"]
    assert with_rule.sums.count("mlp.experts") == 1
