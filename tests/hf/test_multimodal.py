"""Multimodal models: vision towers, image blocks that attend both ways, prefix masks, cross-attention to sound."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import assert_same, check_pages
from hf_multimodal import MODELS, build

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.masks import ImplicitMask


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_forward_and_generate(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, config, inputs = make()
    eager = build(name, config)
    ours = fa_serve.patch(copy.deepcopy(eager))
    reached = set()

    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        reached.add(type(module).__name__)
        return hf.attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(importlib.import_module("transformers").AttentionInterface._global_mapping, "fa_serve", noting)
    assert_same(ours(**inputs).logits, eager(**inputs).logits, inputs.get("attention_mask"))
    assert len(reached) == (1 if name.startswith("Whisper") else 2), "the tower and the text each have their own attention"
    inputs.pop("labels", None)
    if "decoder_input_ids" not in inputs:
        options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
        assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))


@pytest.mark.parametrize("family", [name for name in MODELS if name != "whisper"])
@torch.no_grad()
def test_text_on_a_paged_cache(family: str) -> None:
    name, config, _ = MODELS[family]()
    eager = build(name, config)
    check_pages(fa_serve.patch(copy.deepcopy(eager)), eager)


def _causal_and_padding_alone(*args: Any, attention_mask: Any = None, **kwargs: Any) -> ImplicitMask:
    """The mask of an implementation that knows only causality and padding."""
    return (
        attention_mask
        if isinstance(attention_mask, ImplicitMask)
        else ImplicitMask((-1, 0), key_mask=None if attention_mask is None else attention_mask[:, None, None])
    )


@pytest.mark.parametrize("name", ["gemma3", "paligemma-prefix"])
@torch.no_grad()
def test_blocks_that_attend_both_ways_are_not_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, inputs = MODELS[name]()
    eager = build(model, config)
    ours = fa_serve.patch(copy.deepcopy(eager))
    expected = eager(**inputs).logits
    valid = inputs["attention_mask"]
    assert_same(ours(**inputs).logits, expected, valid)
    masks = importlib.import_module("transformers").AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, "fa_serve", _causal_and_padding_alone)
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        assert_same(ours(**inputs).logits, expected, valid)


@pytest.mark.parametrize("served", ["text_config", "vision_config"])
@torch.no_grad()
def test_one_part_alone(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, inputs = MODELS["gemma3"]()
    eager = build(model, config)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation({served: "fa_serve"})
    reached = set()

    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        reached.add(type(module).__name__)
        return hf.attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(importlib.import_module("transformers").AttentionInterface._global_mapping, "fa_serve", noting)
    assert_same(ours(**inputs).logits, eager(**inputs).logits, inputs["attention_mask"])
    assert reached == {{"text_config": "Gemma3Attention", "vision_config": "SiglipAttention"}[served]}
