"""Models with towers: what loads them, which part is served, and that no weight stays random."""

from __future__ import annotations

import logging

import pytest
import torch
from every_type import tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BertConfig, LlamaConfig, ViTConfig

from fa_serve.engine import EngineConfig
from fa_serve.engine.start.loading import load_model
from fa_serve.hf.adapter.composites import auto_class, make_served, text_key, text_model
from fa_serve.hf.adapter.register import patch_parts
from fa_serve.spec import ParameterError, UnsupportedModelError


def test_a_model_is_loaded_with_its_towers() -> None:
    assert auto_class(tiny_config("llava")) is AutoModelForImageTextToText
    assert auto_class(tiny_config("qwen3_5")) is AutoModelForImageTextToText, "the causal class would leave out the tower"
    assert auto_class(LlamaConfig()) is AutoModelForCausalLM
    assert auto_class(BertConfig()) is AutoModelForCausalLM
    with pytest.raises(UnsupportedModelError, match="ViTConfig is not the config of a causal language model"):
        auto_class(ViTConfig())


def test_a_tower_that_cannot_be_served_keeps_its_attention(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("got_ocr2")
    assert text_key(config) == "text_config"
    auto = auto_class(config)
    with caplog.at_level(logging.INFO, "fa_serve.hf"):
        model = make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts))
    assert "fa_serve serves only the language model" in caplog.text
    assert model.model.language_model.config._attn_implementation == "fa_serve"
    assert model.model.vision_tower.config._attn_implementation != "fa_serve"
    assert patch_parts(tiny_model("got_ocr2")).model.language_model.config._attn_implementation == "fa_serve"


def test_a_language_model_that_computes_its_attention_itself_keeps_it() -> None:
    config = tiny_config("git")
    auto = auto_class(config)
    model = make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts))
    assert model.config._attn_implementation == "eager"
    assert patch_parts(tiny_model("blip")).text_decoder.config._attn_implementation == "eager"


def test_the_causal_model_inside_of_a_wrapper_is_found() -> None:
    model = tiny_model("blip-2")
    assert text_model(model) is model.language_model
    llava = tiny_model("llava")
    assert text_model(llava) is llava


@pytest.mark.parametrize("part", ["language_model", "vision_tower", "multi_modal_projector"])
def test_a_weight_of_any_part_that_is_missing_is_named(tmp_path, part: str) -> None:
    tiny_model("llava").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    missing = min(name for name in weights if part in name and name.endswith("weight"))
    del weights[missing]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ParameterError, match=r"model must have the tensor \S+ in its files, got '1 missing tensors'"):
        load_model(EngineConfig(model=tmp_path, device="cpu"))


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "qwen3_5", "got_ocr2"])
def test_every_weight_of_a_checkpoint_is_loaded(tmp_path, name: str) -> None:
    saved = tiny_model(name)
    saved.save_pretrained(tmp_path)
    loaded = load_model(EngineConfig(model=tmp_path, device="cpu"))
    assert type(loaded) is type(saved)
    for (key, wanted), (other, found) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert key == other
        assert torch.equal(wanted, found), key
