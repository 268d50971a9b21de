"""Pictures of any size for the tiny models of image_inputs.py: what image processors of transformers make of them.

    process = processes("qwen2_5_vl")
    inputs = process(picture(1, width=300, height=40))

A whole processor of some types needs torchvision, and a tokenizer. Only the part for images is used here, with an image token
for each embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from image_inputs import IMAGE
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fa_serve.spec import ParameterError

Inputs = dict[str, Tensor]
_SIDE = 28
_TOKENS = {"llava": 4, "gemma3": 4, "paligemma": 4}


def processes(name: str, pixels: tuple[int, int] = (28 * 28, 252 * 252)) -> Callable[[Any], Inputs]:
    """What makes inputs of one picture. pixels: the fewest and the most, for types whose pictures keep their shape"""
    size = {"height": _SIDE, "width": _SIDE}
    if name.startswith("qwen"):
        images: Any = Qwen2VLImageProcessorPil(min_pixels=pixels[0], max_pixels=pixels[1])
    elif name == "gemma3":
        images = Gemma3ImageProcessorPil(size=size)
    else:
        images = CLIPImageProcessorPil(size=size, crop_size=size)

    def process(picture: Any) -> Inputs:
        try:
            made = {key: torch.as_tensor(x) for key, x in images(picture, return_tensors="pt").items() if key != "num_crops"}
        except ValueError as error:
            raise ParameterError("images", f"be taken ({error})", "another one") from error
        count = int(made["image_grid_thw"].prod()) // 4 if name.startswith("qwen") else _TOKENS[name]
        ids = torch.full((1, count), IMAGE)
        types = torch.ones_like(ids, dtype=torch.int32) * (name != "paligemma")
        return {"input_ids": ids, **made, "mm_token_type_ids": types, "token_type_ids": types}

    return process
