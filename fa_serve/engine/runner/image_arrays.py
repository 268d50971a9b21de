"""The arrays of a step with images that a CUDA graph replays: positions on several axes, and embeddings at fixed addresses.

    fields = pad_images(rows, positions, tokens)               # on the host, in addition to those of batch_arrays.py
    memory = ImageMemory(max_tokens, hidden, dtype, device)
    memory.fill(images_of_step)              # before the replay
    images = memory.images(fields)           # what the captured forward reads

A step without a graph reads its images directly. Left out: features for inner layers (Qwen3-VL), because the model searches on
the host for the places where it adds them, and blocks that attend both ways. Steps with either run without a graph.
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
    """The fields of a step of `tokens` tokens without an image. axes: number of axes of positions"""
    return {
        "image_rows": np.full(tokens, -1, dtype=np.int64),
        "axis_positions": np.zeros(tokens * axes if axes > 1 else 0, dtype=np.int64),
    }


def pad_images(rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: int) -> dict[str, NDArray[Any]]:
    """The fields of a step, followed by padding up to `tokens` tokens.

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
    """(total,), or (axes, total) for a step with positions on several axes."""
    plain = fields["position_ids"]
    if "axis_positions" not in fields or not len(fields["axis_positions"]):
        return plain
    return fields["axis_positions"].view(-1, len(plain))


class ImageMemory:
    """Owner of the embeddings that captured steps read. max_tokens: maximum number of tokens of a step"""

    def __init__(self, max_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._embeds = torch.zeros(max_tokens, hidden, dtype=dtype, device=device)

    def fill(self, images: StepImages) -> None:
        """Copy in the embeddings of the step that is replayed next."""
        self._embeds[: len(images.embeds)].copy_(images.embeds)

    def images(self, fields: Mapping[str, Tensor]) -> StepImages | None:
        """The images that the forward of a step with these fields reads; None if the step has none."""
        return StepImages(fields["image_rows"], self._embeds) if "image_rows" in fields else None
