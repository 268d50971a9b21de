"""The sizes of captured steps, and the arrays of a step padded to them.

    shape = Shape(tokens=16, batch=2, queries=8, keys=1024)      # two sequences with up to 7 drafts each
    steps = PaddedSteps(device, states=False)
    padded = steps.padded(arrays.inputs, shape)                  # to be sent into the block of the graphs
    steps.stage(shape)                                           # while the device computes: the padding of the next step

A step most likely has the shape of the one before it. Its padding is therefore laid out in the memory from which it is sent
before the step is known, and only the fields of the step are left to be written. Left out: which shapes there are, and their
graphs (cuda_graphs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fa_serve.engine.config import MAX_DRAFTS
from fa_serve.engine.runner.group_arrays import group_padding
from fa_serve.engine.runner.image_arrays import image_padding, pad_images
from fa_serve.engine.runner.lora_arrays import lora_padding, name_padding
from fa_serve.engine.runner.state_arrays import padding_state_arrays
from fa_serve.engine.runner.transfer import StagedArrays

STAGED_BYTES = 1 << 12
"""Bytes of host memory that are kept for what is sent after the fields of `padding`. A step with more takes new memory."""


class Shape(NamedTuple):
    """The padded sizes of a captured step.

    tokens, batch: numbers of tokens and of sequences
    queries, keys: maximum numbers of tokens and keys of one sequence; queries is 1 if every sequence computes a single token
    lora, groups:  sequences may have adapters; sequences may share pages that are read once
    axes:          axes of positions in a step with embeddings of images; 0 for a step without images
    """

    tokens: int
    batch: int
    queries: int
    keys: int
    lora: bool = False
    groups: bool = False
    axes: int = 0

    @property
    def kind(self) -> str:
        """What the step computes in addition to the last token of each sequence: "nothing", "drafts" or "prompts"."""
        if self.queries == 1:
            return "nothing"
        few = self.queries <= MAX_DRAFTS + 1 and self.tokens == self.batch * self.queries
        return "drafts" if few else "prompts"

    @property
    def rows(self) -> int:
        """Rows of logits: one for each sequence, or with drafts one for each token."""
        return self.tokens if self.kind == "drafts" else self.batch


class PaddedSteps:
    """Owner of the padding of the next step.

    device: where steps are sent; states: the model keeps states, so that steps have the fields of `state_arrays`
    """

    def __init__(self, device: torch.device, states: bool) -> None:
        self._device = device
        self._states = states
        self._staged: tuple[Shape, StagedArrays] | None = None

    def padded(self, arrays: Mapping[str, NDArray[Any]], shape: Shape) -> StagedArrays:
        """The fields of a step, followed by padding up to `shape`. arrays: must have "image_rows" if the shape has axes"""
        if self._staged is None or self._staged[0] != shape:
            self.stage(shape)
        assert self._staged is not None
        staged = self._staged[1]
        self._staged = None
        _fill(staged, arrays, shape)
        return staged

    def stage(self, shape: Shape) -> None:
        """Make the padding of the next step, which is expected to have this shape."""
        self._staged = (shape, StagedArrays(padding(shape, states=self._states), self._device, STAGED_BYTES))


def padding(shape: Shape, *, states: bool = False) -> dict[str, NDArray[Any]]:
    """The fields of a step that consists of padding: its sequences have no keys and write nothing. Each has one token, until
    all tokens are used up. states: include the fields of `state_arrays`"""
    tokens = shape.tokens
    batch = shape.batch
    of_states = padding_state_arrays(batch, tokens, shape.kind == "prompts") if states else {}
    return {
        "input_ids": np.zeros(tokens, dtype=np.int64),
        "position_ids": np.zeros(tokens, dtype=np.int64),
        "slot_mapping": np.full(tokens, -1, dtype=np.int64),
        "slots": np.zeros(batch, dtype=np.int64),
        "seqused_k": np.zeros(batch, dtype=np.int32),
        "cu_seqlens_q": np.minimum(np.arange(batch + 1, dtype=np.int32), tokens),
        "logits_indices": np.zeros(shape.rows, dtype=np.int64),
        **of_states,
        **(lora_padding(tokens, batch, shape.queries) if shape.lora else {}),
        **(group_padding(batch) if shape.groups else {}),
        **(image_padding(tokens, shape.axes) if shape.axes else {}),
    }


def _fill(padded: Mapping[str, NDArray[Any]], arrays: Mapping[str, NDArray[Any]], shape: Shape) -> None:
    """Write the fields of a step over padding of this shape."""
    if shape.axes:
        for name, array in pad_images(arrays["image_rows"], arrays["position_ids"], shape.tokens).items():
            padded[name][...] = array
    batch = len(arrays["slots"])
    for name, array in arrays.items():
        if shape.axes and name in ("image_rows", "position_ids"):
            continue
        padded[name][: len(array)] = array
    if shape.lora:
        name_padding(padded, len(arrays["input_ids"]), len(arrays["lora_tiles"]), shape.queries)
    ends = padded["cu_seqlens_q"]
    if len(ends) > batch + 1:
        ends[batch:] = np.minimum(ends[batch] + np.arange(len(ends) - batch), shape.tokens)
    if shape.groups:
        padded["group_ends"][len(arrays["group_ends"]) :] = arrays["group_ends"][-1]
