"""What the processor of each type makes of one image, as random numbers in the sizes of every_type.py, without a processor.

model = tiny_model("qwen3_vl", CHANGES["qwen3_vl"])
image = one_image("qwen3_vl", model, seed=1)             # inputs of the towers, with as many image tokens as they make
inputs = whole_prompt("qwen3_vl", ids, [image, other])   # what `generate` takes for a prompt with both
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

IMAGE = 150
"""The image token of the tiny models."""
MOST = 64
FEWEST = {"idefics2": 4}
ONE_IMAGE = {"llava_onevision"}
"""Types of which a prompt has one image at most, because their processors make other tokens of an image beside others."""
Inputs = dict[str, Tensor]


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _picture(*shape: int) -> Callable[[int], Inputs]:
    return lambda seed: {"pixel_values": _draw(seed, *shape)}


def _grid(channels: int, side: int = 4, **others: Tensor) -> Callable[[int], Inputs]:
    """Patches of 14 x 14 pixels, or of what comes to so many numbers."""

    def make(seed: int) -> Inputs:
        grid = torch.tensor([[1, side, side]])
        return {"pixel_values": _draw(seed, side * side, channels), "image_grid_thw": grid, **others}

    return make


_QWEN = 3 * 2 * 14 * 14
_ONE = 3 * 14 * 14
_TOKEN = {"image_token_id": IMAGE}
_INDEX = {"image_token_index": IMAGE}


def _sized(seed: int) -> Inputs:
    return {"pixel_values": _draw(seed, 1, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]])}


def _tiles(seed: int) -> Inputs:
    return {"pixel_values": _draw(seed, 1, 3, 3, 28, 28), "image_sizes": torch.tensor([[28, 56]])}


def _masked(seed: int) -> Inputs:
    return {"pixel_values": _draw(seed, 1, 1, 3, 28, 28), "pixel_attention_mask": torch.ones(1, 1, 28, 28, dtype=torch.bool)}


def _patches(seed: int) -> Inputs:
    return {"pixel_values": _draw(seed, 16, 3, 14, 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def _padded_patches(seed: int) -> Inputs:
    sizes = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    return {"pixel_values": _draw(seed, 1, 16, _ONE), **sizes}


def _placed_patches(seed: int) -> Inputs:
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(1)[None]
    return {"pixel_values": _draw(seed, 1, 36, _ONE).sigmoid(), "image_position_ids": places}


def _unified_patches(seed: int) -> Inputs:
    places = torch.cartesian_prod(torch.arange(2), torch.arange(2)).flip(1)[None]
    return {"pixel_values": _draw(seed, 1, 4, 9 * _ONE).sigmoid(), "image_position_ids": places}


IMAGES: dict[str, Callable[[int], Inputs]] = {
    "aria": _picture(1, 3, 28, 28),
    "aya_vision": _picture(1, 3, 28, 28),
    "chameleon": _picture(1, 3, 32, 32),
    "cohere2_vision": _picture(1, 3, 28, 28),
    "cohere_compass": _grid(_QWEN),
    "cosmos3_edge": _grid(_ONE),
    "cosmos3_omni": _grid(_QWEN),
    "deepseek_vl": _picture(1, 3, 28, 28),
    "ernie4_5_vl_moe": _grid(_ONE),
    "exaone4_5": _grid(_QWEN),
    "fast_vlm": _picture(1, 3, 28, 28),
    "gemma3": _picture(1, 3, 28, 28),
    "gemma4": _placed_patches,
    "gemma4_unified": _unified_patches,
    "glm46v": _grid(_QWEN),
    "glm4v": _grid(_QWEN),
    "glm4v_moe": _grid(_QWEN),
    "glm_ocr": _grid(_QWEN),
    "glmga": _grid(_QWEN),
    "got_ocr2": _picture(1, 3, 28, 28),
    "granite4_vision": _tiles,
    "hunyuan_vl": _grid(3 * 14 * 14),
    "idefics2": _masked,
    "idefics3": _masked,
    "internvl": _picture(1, 3, 28, 28),
    "janus": _picture(1, 3, 28, 28),
    "kimi_k25": _patches,
    "lighton_ocr": _sized,
    "llama4": _picture(1, 3, 28, 28),
    "llava": _picture(1, 3, 28, 28),
    "llava_next": _tiles,
    "llava_next_video": _tiles,
    "llava_onevision": _tiles,
    "mistral3": _sized,
    "muse_glimmer": _grid(_QWEN),
    "ovis2": _picture(1, 3, 28, 28),
    "lfm2_vl": _padded_patches,
    "paddleocr_vl": _patches,
    "paligemma": _picture(1, 3, 28, 28),
    "perception_lm": _picture(1, 1, 3, 28, 28),
    "pp_chart2table": _picture(1, 3, 28, 28),
    "qianfan_ocr": _picture(1, 3, 28, 28),
    "qwen2_5_omni_thinker": _grid(_QWEN),
    "qwen2_5_vl": _grid(_QWEN),
    "qwen2_vl": _grid(_QWEN),
    "qwen3_5": _grid(_QWEN),
    "qwen3_5_moe": _grid(_QWEN),
    "qwen3_omni_moe_thinker": _grid(_QWEN),
    "qwen3_vl": _grid(_QWEN),
    "qwen3_vl_moe": _grid(_QWEN),
    "shieldgemma2": _picture(1, 3, 28, 28),
    "smolvlm": _masked,
    "step3p7": _picture(1, 3, 28, 28),
    "video_llama_3": lambda seed: _grid(_ONE)(seed) | {"image_merge_sizes": torch.tensor([2])},
    "video_llava": lambda seed: {"pixel_values_images": _draw(seed, 1, 3, 28, 28)},
    "vipllava": _picture(1, 3, 28, 28),
}
CHANGES: dict[str, dict[str, Any]] = {name: {**_TOKEN, **_INDEX} for name in IMAGES}


def one_image(name: str, model: PreTrainedModel, seed: int) -> Inputs:
    """The inputs of one image, with as many image tokens as the model makes embeddings of it."""
    from fa_serve.hf.images import ImageReader

    made = IMAGES[name](seed)
    reader = ImageReader(model)
    error: Exception | None = None
    # Idefics 2 does not check that there are as many tokens as embeddings
    for count in range(FEWEST.get(name, 1), MOST):
        inputs = _with_tokens(name, made, torch.full((1, count), IMAGE))
        try:
            reader.encode(inputs)
            return inputs
        except (ValueError, RuntimeError, IndexError) as raised:
            error = raised
    raise AssertionError(f"no number of image tokens fits: {error}")


def _with_tokens(name: str, made: Inputs, ids: Tensor) -> Inputs:
    types = torch.zeros_like(ids) if name == "paligemma" else (ids == IMAGE).long()
    return {"input_ids": ids, **made, "mm_token_type_ids": (ids == IMAGE).int(), "token_type_ids": types}


def _of_text_alone(name: str, num_tokens: int) -> Inputs:
    """What the processor of a type gives for a prompt without images."""
    if name != "idefics":
        return {}
    # a picture that no token sees: its values must not matter
    return {"pixel_values": _draw(3, 1, 1, 3, 28, 28), "image_attention_mask": torch.zeros(1, num_tokens, 1, dtype=torch.long)}


def whole_prompt(name: str, model: PreTrainedModel, ids: Sequence[int], images: Sequence[Inputs]) -> Inputs:
    """The arguments of `generate` for a prompt with these images in the places of its image tokens."""
    import inspect

    tokens = torch.tensor([list(ids)])
    own = {"input_ids", "mm_token_type_ids", "token_type_ids"}
    # a model that takes all images of a row in one dimension has a batch of one
    dim = 1 if name in ("idefics2", "idefics3", "smolvlm", "perception_lm") else 0
    made = {
        key: torch.cat([image[key] for image in images], dim=dim) for key in (images[0] if images else {}) if key not in own
    }
    known = inspect.signature(model.forward).parameters
    given = _with_tokens(name, made, tokens) if images else {"input_ids": tokens, **_of_text_alone(name, tokens.shape[1])}
    return {key: x for key, x in given.items() if key in known} | {"attention_mask": torch.ones_like(tokens)}
