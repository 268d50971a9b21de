"""Tiny multimodal models with random weights and inputs for them: vision towers, image blocks, prefixes, a sound encoder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from hf_families import here
from torch import Tensor
from transformers import PreTrainedModel

TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
IMAGE = 91
START = 92
END = 93
VIDEO = 94


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(here())


def prompt(length: int, images: list[slice]) -> dict[str, Tensor]:
    """Text with image tokens at these places, one list entry a row; the first row is padded on the left."""
    ids = torch.randint(3, 90, (len(images), length), generator=torch.Generator().manual_seed(0), device="cpu").to(here())
    for row, image in zip(ids, images, strict=True):
        row[image] = IMAGE
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def whisper() -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    config = {
        **TOKENS,
        "num_mel_bins": 8,
        "d_model": 64,
        "max_source_positions": 20,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
        "dropout": 0.0,
        **{
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
        },
    }
    ids = prompt(11, [slice(0), slice(0)])["input_ids"]
    return "WhisperForConditionalGeneration", config, {"input_features": draw(2, 8, 40), "decoder_input_ids": ids}


def gemma3() -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    text = {
        **TEXT,
        "head_dim": 32,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = {
        "text_config": text,
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    }
    inputs = prompt(24, [slice(6, 10), slice(11, 15)])
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return "Gemma3ForConditionalGeneration", config, {**inputs, "pixel_values": draw(2, 3, 16, 16)}


def paligemma(prefix: bool) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    config = {
        "text_config": {"model_type": "gemma", **TEXT, "head_dim": 16},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER, "projection_dim": 64},
        "image_token_id": IMAGE,
        "projection_dim": 64,
        "hidden_size": 64,
    }
    inputs = prompt(30, [slice(2, 18), slice(0, 16)])
    if prefix:
        inputs["token_type_ids"] = (torch.arange(30) >= 24).long().expand(2, -1)
        inputs["labels"] = inputs["input_ids"]
    return "PaliGemmaForConditionalGeneration", config, {**inputs, "pixel_values": draw(2, 3, 16, 16)}


def qwen_vl(version: str, **tower: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    config = {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **tower,
        },
        **TOKENS,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": VIDEO,
    }
    grid = torch.tensor([[1, 8, 8], [1, 4, 8]])
    inputs = prompt(30, [slice(4, 20), slice(3, 11)])
    inputs["input_ids"][0, 3] = START
    inputs["input_ids"][1, 2] = START
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return f"{version}ForConditionalGeneration", config, {**inputs, "pixel_values": draw(96, 96), "image_grid_thw": grid}


MODELS: dict[str, Callable[[], tuple[str, dict[str, Any], dict[str, Tensor]]]] = {
    "whisper": whisper,
    "gemma3": gemma3,
    "paligemma": lambda: paligemma(prefix=False),
    "paligemma-prefix": lambda: paligemma(prefix=True),
    "qwen2-vl": lambda: qwen_vl("Qwen2VL", embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2.5-vl": lambda: qwen_vl(
        "Qwen2_5_VL", hidden_size=32, out_hidden_size=64, intermediate_size=48, window_size=16, fullatt_block_indexes=[1]
    ),
}


def build(name: str, config: dict[str, Any]) -> PreTrainedModel:
    model_class = getattr(importlib.import_module("transformers"), name)
    torch.manual_seed(0)
    config = model_class.config_class(**config)
    config._attn_implementation = "eager"
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.2 * parameter[0].numel() ** -0.5)
    return model
