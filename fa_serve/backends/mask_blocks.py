"""Which masks are scanned for blocks, and the lists of the masks that were scanned last.

Most blocks of an explicit mask hide everything or nothing: images, prefixes, documents, padding. For each block of queries, a
scan finds the key blocks that are empty, full or mixed. The call then runs over lists of blocks (see `fa_serve.block_lists`),
in which mixed blocks are the partial ones. The scan reads the mask once, and the layers of a forward pass share one mask, so
its lists are kept in `SCANNED` while the mask lives.

    scanned = SCANNED.find(mask, stream) or SCANNED.keep(mask, stream, scan(mask))

`triton.mask_blocks` has the scan. This module leaves out what kernels do with lists.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.block_lists import BlockLists
from fa_serve.kept_values import KeptValues
from fa_serve.spec import AttentionSpec

SCANNED_BLOCK = 128
"""Queries and keys per block of a scanned mask, the blocks of FlexAttention."""
MIN_SCANNED_LENGTH = 2 * SCANNED_BLOCK
"""A mask of fewer queries or keys has too few blocks for a scan to gain more than its two launches cost."""


def cannot_scan(spec: AttentionSpec) -> str | None:
    """Why the mask of a call is not scanned for blocks, or None. `spec.mask` is not None."""
    if spec.op != "attention" or spec.layout != "dense":
        return f"scans only the masks of dense prompts, got op {spec.op!r}, layout {spec.layout!r}"
    _, queries, keys = spec.sizes or (0, 0, 0)
    if min(queries, keys) < MIN_SCANNED_LENGTH:
        return f"scans masks of at least {MIN_SCANNED_LENGTH} queries and keys, got {queries} and {keys}"
    return None


class Spans(NamedTuple):
    """The first and the last block that is not empty, int32 (1 or batch, heads, blocks, 2); if all are empty, the number of
    blocks and -1. The backward pass walks from the first to the last.

    keys:    the span of key blocks for each block of queries
    queries: the span of blocks of queries for each key block
    """

    keys: Tensor
    queries: Tensor


class ScannedMask:
    """The result of a scan.

    lists: the blocks that are not empty; mixed blocks are the partial ones
    kinds: uint8 (1 or batch, heads, query blocks, key blocks), 0 for an empty block
    """

    def __init__(self, lists: BlockLists, kinds: Tensor) -> None:
        self.lists = lists
        self.kinds = kinds
        self._spans: Spans | None = None

    @property
    def spans(self) -> Spans:
        """Computed once, at the first backward pass, by a few small kernels of PyTorch."""
        if self._spans is None:
            self._spans = Spans(_span_of(self.kinds), _span_of(self.kinds.transpose(2, 3)))
        return self._spans


def _span_of(kinds: Tensor) -> Tensor:
    """The first and the last block in each row that is not empty."""
    blocks = torch.arange(kinds.shape[3], device=kinds.device, dtype=torch.int32)
    empty = kinds == 0
    first = blocks.masked_fill(empty, kinds.shape[3]).amin(-1)
    return torch.stack([first, blocks.masked_fill(empty, -1).amax(-1)], -1)


class ScannedMasks:
    """The results of at most `room` scans. A mask is identified by the tensor that owns its memory, by its view of that memory,
    and by its version.

    An in-place operation raises a tensor's version, so the mask is scanned again. Tensors of `torch.inference_mode` have no
    version and are scanned at each call. While a CUDA graph is captured, each call scans its mask, because replays may find
    other numbers in it. Lists are used only on the stream on which they were made.
    """

    def __init__(self, room: int) -> None:
        self._kept: KeptValues[ScannedMask] = KeptValues(room)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, mask: Tensor, stream: int) -> ScannedMask | None:
        """The result that is kept for this mask, or None."""
        return self._kept.find(_owner(mask), _key(mask, stream)) if _has_version(mask) else None

    def keep(self, mask: Tensor, stream: int, scanned: ScannedMask) -> ScannedMask:
        """Keep the result until the mask is gone or `room` other masks were scanned, and return it."""
        return self._kept.keep(_owner(mask), _key(mask, stream), scanned) if _has_version(mask) else scanned

    def clear(self) -> None:
        self._kept.clear()


def _has_version(mask: Tensor) -> bool:
    return not mask.is_inference()


def _owner(mask: Tensor) -> Tensor:
    """The tensor whose memory the mask views. Each layer may slice one mask anew, but all these views have the same owner."""
    return mask if mask._base is None else mask._base


def _key(mask: Tensor, stream: int) -> Hashable:
    view = (mask.storage_offset(), mask.shape, mask.stride(), mask.dtype)
    return (mask._version, view, stream)


SCANNED = ScannedMasks(room=8)
"""A model has one mask for each kind of layer, and few kinds. The bits take an eighth of the memory of a bool mask."""
