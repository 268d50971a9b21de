"""Which models run on a paged cache, and what their layers keep. `test_families.py` and `test_every_type.py` compare values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_type import tiny_config, tiny_model
from hf_families import BY_NAME
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.hf.adapter.probe import Probe
from fa_serve.hf.adapter.translate import translate
from fa_serve.spec import ParameterError, UnsupportedModelError


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (
            "xlstm",
            {"num_heads": 4, "embedding_dim": 64, "num_blocks": 2},
            "it keeps more than keys and values|its forward takes no",
        ),
        ("bart", {}, "takes no"),
        ("t5", {}, "not the config of a causal language model"),
        ("bert", {}, "needs a mask beyond causality"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depends on the longest"),
        ("bloom", {}, "computes its attention itself"),
        ("diffllama", {"num_key_value_heads": 4}, "attends more than once"),
        (
            "roberta",
            {"is_decoder": True, "pad_token_id": None},
            "numbers its positions from the padding token's id, but its config has no pad_token_id",
        ),
    ],
)
def test_configs_that_are_refused(model_type: str, changes: dict[str, Any], reason: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModelError, match=reason):
        hf.check_model(AutoConfig.for_model(model_type, **small, **changes))


def test_layers_are_found_from_a_config_alone() -> None:
    family = BY_NAME["gpt-oss"]
    layers = list(hf.model_layers(family.build().config).attention.values())
    assert [(s.window_size, s.sinks, s.head_dim, s.num_heads, s.num_kv_heads) for s in layers] == [
        ((4, 0), True, 32, 4, 2),
        ((-1, 0), True, 32, 4, 2),
    ]
    large = LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=3)
    assert [s.head_dim for s in hf.model_layers(large).attention.values()] == [128] * 3


def test_releases_that_mark_no_model_as_stateful_have_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.25 has no `_is_stateful`."""
    monkeypatch.delattr(PreTrainedModel, "_is_stateful", raising=False)
    assert len(hf.model_layers(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)).attention) == 2


@pytest.mark.parametrize("name", ["aria_text", "jetmoe", "longcat_flash"])
def test_mixtures_that_read_the_choice_of_their_router_need_no_weights(name: str) -> None:
    """The choice has no value on the meta device, so the config alone is tried out with zeros as weights."""
    found = hf.model_layers(tiny_config(name)).attention
    model = tiny_model(name)
    hf.patch_parts(model)
    # from some release after 5.17 on, Aria's code reads no values, and its config is tried out on the meta device
    assert {layer: replace(spec, device="cpu") for layer, spec in found.items()} == hf.model_layers(model).attention
    assert len(found) >= 2
    if name == "aria_text":
        assert len(hf.plan_division(model, 2).layers) == 2
        return
    if name == "longcat_flash" and not any("experts" in rule for rule in model.tp_plan):
        # from 5.25 on, experts that return their input are no part of the module of experts, and no rule names them
        assert "mlp.experts" in hf.plan_division(model, 2).layers["model.layers.0"].sums
        return
    with pytest.raises(UnsupportedModelError, match=f"cannot be divided between 2 ranks: {NOT_DIVIDED[name]}"):
        hf.plan_division(model, 2)


NOT_DIVIDED = {
    "jetmoe": "transformers has no tensor-parallel plan",
    "longcat_flash": "the rule 'moe_identity_expert' of",
}


def test_layers_whose_prompts_have_float8_products() -> None:
    """Every layer, with new keys and with keys in pages, of the model's dtype or float8."""
    llama = LlamaConfig(hidden_size=2048, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=2)
    layers = [replace(x, device="cuda", arch=90, dtype=torch.bfloat16) for x in hf.model_layers(llama).attention.values()]
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cached = [replace(x, kv_dtype=kv_dtype) for x in layers]
        hf.check_attention_precision(cached, 16, "fp8")
        wide = replace(cached[1], head_dim=256, head_dim_v=256)
        hf.check_attention_precision([cached[0], wide], 16, "qk8")
        told = "hopper supports head sizes 64 and 128 with precision 'fp8', got 256"
        with pytest.raises(ParameterError, match=told) as error:
            hf.check_attention_precision([cached[0], wide], 16, "fp8")
        assert error.value.field == "attention_precision"
        with pytest.raises(ParameterError, match=r"got compute capability 8\.0"):
            hf.check_attention_precision([replace(x, arch=80) for x in cached], 16, "qk8")


PROBED = {
    "causal": (ImplicitMask((-1, 0)), {}, (-1, 0)),
    "the layer's window": (ImplicitMask((4, 0)), {"sliding_window": 5}, (4, 0)),
    "no mask, causal": (None, {"is_causal": True}, (-1, 0)),
    "no mask, not causal": (None, {}, None),
    "both ways": (ImplicitMask((-1, -1)), {}, None),
    "a window in the mask alone": (ImplicitMask((4, 0)), {}, (4, 0)),
    "a window in the words alone": (ImplicitMask((-1, 0)), {"sliding_window": 5}, None),
    "a tensor": (torch.ones(1, 1, 1, 1, dtype=torch.bool), {}, None),
}


@pytest.mark.parametrize(("mask", "words", "window"), PROBED.values(), ids=PROBED)
def test_a_layer_must_say_without_its_mask_what_it_says_with_it(
    mask: Any, words: dict[str, Any], window: tuple[int, int] | None
) -> None:
    module = torch.nn.Module()
    module.layer_idx = 3  # type: ignore[assignment]
    query = torch.zeros(1, 4, 1, 16)
    key = torch.zeros(1, 2, 1, 16)
    call = translate(module, query, key, key[..., :8], mask, **words)
    probe = Probe()
    if window is None:
        with pytest.raises(UnsupportedModelError, match=r"layer 3 \(Module\) needs a mask beyond causality"):
            probe.attend(call)
        return
    assert probe.attend(call).shape == (1, 1, 4, 8)
    assert probe.layers[3].window_size == window
    # `PagedBatch` gets no mask, and the same window
    assert translate(module, query, key, key[..., :8], None, **words).window_size[0] == window[0]
    with pytest.raises(UnsupportedModelError, match=r"layer 3 \(Module\) attends more than once"):
        probe.attend(call)


def test_positions_among_further_arguments_must_be_handed_down() -> None:
    """Evolla's forward takes position_ids in **kwargs and hands them to the model inside. One that drops them is refused."""
    model: Any = fa_serve.patch(tiny_model("evolla"))
    assert list(hf.model_layers(model).attention) == [0, 1]
    forward = type(model).forward

    class Dropping(type(model)):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, use_cache=None, logits_to_keep=0, **kwargs):
            kwargs.pop("position_ids", None)
            return forward(self, input_ids, attention_mask, use_cache=use_cache, logits_to_keep=logits_to_keep, **kwargs)

    model.__class__ = Dropping
    with pytest.raises(UnsupportedModelError, match="does not pass position_ids on to its layers"):
        hf.model_layers(model)
