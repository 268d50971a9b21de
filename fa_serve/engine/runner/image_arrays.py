"""The numbers of a step with images that CUDA graphs replay: positions on several axes, and embeddings at fixed addresses.

    fields = image_fields(positions, images_of_step)           # on the host, beside those of batch_arrays.py
    memory = ImageMemory(max_tokens, hidden, dtype, device)
    memory.fill(images_of_step)              # before the replay
    images = memory.images(fields)           # what the captured forward reads

A step without a graph takes its images as they are. Left out: features of inner layers (Qwen3-VL), which the model adds at
places that it looks for on the host, and blocks that attend both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.hf.images import StepImages


def image_padding(tokens: int, axes: int) -> dict[str, NDArray[Any]]:
    """The fields of a step of so many tokens without an image. axes: of positions"""
    return {
        "image_rows": np.full(tokens, -1, dtype=np.int64),
        "axis_positions": np.zeros(tokens * axes if axes > 1 else 0, dtype=np.int64),
    }


def pad_images(rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: int) -> dict[str, NDArray[Any]]:
    """The fields of a step, followed by padding up to so many tokens.

    rows: (total,) as in `StepImages`; positions: (total,) or (axes, total)
    """
    axes = positions.shape[0] if positions.ndim == 2 else 1
    fields = image_padding(tokens, axes)
    fields["image_rows"][: len(rows)] = rows
    if axes == 1:
        plain = np.zeros(tokens, dtype=np.int64)
        plain[: len(rows)] = positions
        return fields | {"position_ids": plain}
    fields["axis_positions"].reshape(axes, tokens)[:, : len(rows)] = positions
    return fields


def axis_positions(fields: Mapping[str, Tensor]) -> Tensor:
    """(total,), or (axes, total) of a step with positions on several axes."""
    plain = fields["position_ids"]
    if "axis_positions" not in fields or not len(fields["axis_positions"]):
        return plain
    return fields["axis_positions"].view(-1, len(plain))


class ImageMemory:
    """Owner of the embeddings that captured steps read. max_tokens: of a step"""

    def __init__(self, max_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._embeds = torch.zeros(max_tokens, hidden, dtype=dtype, device=device)

    def fill(self, images: StepImages) -> None:
        """Take the embeddings of the step that is replayed next."""
        self._embeds[: len(images.embeds)].copy_(images.embeds)

    def images(self, fields: Mapping[str, Tensor]) -> StepImages | None:
        """What the forward of a step with these fields places; None if it has none."""
        return StepImages(fields["image_rows"], self._embeds) if "image_rows" in fields else None
