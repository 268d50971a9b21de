"""Vision towers that transformers gives one call of attention in each layer with flash attention, and one for each window
otherwise."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, one_image
from transformers import Mistral3ForConditionalGeneration

import fa_serve
from fa_serve.hf.adapter.flash_branches import read_in_one_call
from fa_serve.hf.images import ImageReader


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "exaone4_5"])
def test_each_layer_of_a_tower_makes_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, CHANGES[name])
    images = [one_image(name, model, seed) for seed in range(2)]
    model.set_attn_implementation("eager")
    apart = [ImageReader(model).encode(inputs) for inputs in images]
    fa_serve.patch(model)
    calls: list[list[int]] = []
    compute = fa_serve.hf.attention_forward

    def count(module: Any, *args: Any, **words: Any) -> Any:
        calls.append(words["cu_seq_lens_q"].tolist())
        return compute(module, *args, **words)

    interface = sys.modules["transformers"].AttentionInterface  # type: ignore[attr-defined]
    monkeypatch.setitem(interface._global_mapping, "fa_serve", count)
    # the form of attention that a reader gives to towers calls no interface
    together = ImageReader(model, speeds_up=False)._encode_joined(images, 0)
    layers = next(x for x in model.modules() if "VisionBlock" in type(x).__name__ or "EncoderLayer" in type(x).__name__)
    assert len(calls) == sum(type(x) is type(layers) for x in model.modules())
    assert all(len(borders) > 2 for borders in calls), "both images are in one call"
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one.embeds, other.embeds, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_no_layer_reads_the_longest_image_itself(name: str) -> None:
    """A GPU waits for the host where it is read, so layers are told."""
    model = tiny_model(name, CHANGES[name])
    image = one_image(name, model, seed=0)
    expected = ImageReader(model).encode(image).embeds
    fa_serve.patch(model)
    reader = ImageReader(model)
    told: list[int] = []
    blocks = [block for block in reader.blocks if "Block" in type(block).__name__]
    for block in blocks:
        block.register_forward_pre_hook(lambda _, __, words: told.append(words["max_seqlen"]), with_kwargs=True)
    torch.testing.assert_close(reader.encode(image).embeds, expected, rtol=1e-4, atol=1e-5)
    assert told == [16] * len(blocks)


def test_other_implementations_and_other_modules_stay_as_they_are() -> None:
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    read_in_one_call(type(model))
    read_in_one_call(type(model))
    module = sys.modules[type(model).__module__]
    config = model.config.vision_config
    borders = torch.tensor([0, 3, 10])
    for name, asks, longest in (("sdpa", False, None), ("fa_serve", True, 7), ("flash_attention_2", True, 7)):
        config._attn_implementation_internal = name
        assert module.is_flash_attention_requested(config) is asks  # type: ignore[attr-defined]
        assert module.get_max_seqlen(borders, config) == longest  # type: ignore[attr-defined]
    config._attn_implementation_internal = "sdpa"
    other = sys.modules[type(tiny_model("mistral3", CHANGES["mistral3"])).__module__]
    names = {*vars(other)}
    read_in_one_call(Mistral3ForConditionalGeneration)
    assert {*vars(other)} == names
