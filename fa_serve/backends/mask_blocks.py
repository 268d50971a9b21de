"""Which masks are scanned for blocks, and the lists of the masks that were scanned last.

A mask of elements is most often made of blocks that hide everything or nothing: images, prefixes, documents, padding. A scan
finds for each block of queries the key blocks that are empty, full or mixed, and the call runs over lists of blocks (see
`fa_serve.block_lists`), in which mixed blocks are the partial ones. The scan reads the mask once, and the layers of a forward
pass share one mask, so its lists are kept in `SCANNED` for as long as the mask lives.

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
"""A mask of fewer queries or keys has too few blocks for the two launches of a scan to gain anything."""


def cannot_scan(spec: AttentionSpec) -> str | None:
    """Why the mask of a call is not scanned for blocks, or None. `spec.mask` is not None."""
    if spec.op != "attention" or spec.layout != "dense":
        return f"scans the masks of dense prompts, got op {spec.op!r}, layout {spec.layout!r}"
    _, queries, keys = spec.sizes or (0, 0, 0)
    if min(queries, keys) < MIN_SCANNED_LENGTH:
        return f"scans masks of at least {MIN_SCANNED_LENGTH} queries and keys, got {queries} and {keys}"
    return None


class Spans(NamedTuple):
    """Where the blocks lie that are not empty, int32 (1 or batch, heads, blocks, 2): the first of them and the last, or the
    number of blocks and -1 if all are empty. The backward pass walks from one to the other.

    keys:    key blocks, for each block of queries
    queries: blocks of queries, for each key block
    """

    keys: Tensor
    queries: Tensor


class ScannedMask:
    """What a scan has found.

    lists: the blocks that are not empty, of which the mixed ones are partial
    kinds: uint8 (1 or batch, heads, query blocks, key blocks), 0 for an empty block
    """

    def __init__(self, lists: BlockLists, kinds: Tensor) -> None:
        self.lists = lists
        self.kinds = kinds
        self._spans: Spans | None = None

    @property
    def spans(self) -> Spans:
        """They are computed once, at the first backward pass, in some small kernels of PyTorch."""
        if self._spans is None:
            self._spans = Spans(_span_of(self.kinds), _span_of(self.kinds.transpose(2, 3)))
        return self._spans


def _span_of(kinds: Tensor) -> Tensor:
    """The first and the last block of each row that is not empty."""
    blocks = torch.arange(kinds.shape[3], device=kinds.device, dtype=torch.int32)
    empty = kinds == 0
    first = blocks.masked_fill(empty, kinds.shape[3]).amin(-1)
    return torch.stack([first, blocks.masked_fill(empty, -1).amax(-1)], -1)


class ScannedMasks:
    """What was found in at most `room` masks, each known by the tensor that owns its memory, its view of it, and its version.

    An operation in place raises a tensor's version, and it is scanned anew. Tensors of `torch.inference_mode` have no
    version and are scanned at each call. So are the masks of a CUDA graph while it is captured, because its replays may find
    other numbers in them. Lists belong to the stream that they were made on.
    """

    def __init__(self, room: int) -> None:
        self._kept: KeptValues[ScannedMask] = KeptValues(room)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, mask: Tensor, stream: int) -> ScannedMask | None:
        """What was kept of this mask, or None."""
        return self._kept.find(_owner(mask), _key(mask, stream)) if _has_version(mask) else None

    def keep(self, mask: Tensor, stream: int, scanned: ScannedMask) -> ScannedMask:
        """Keep what was found until the mask is gone, or `room` others were scanned, and return it."""
        return self._kept.keep(_owner(mask), _key(mask, stream), scanned) if _has_version(mask) else scanned

    def clear(self) -> None:
        self._kept.clear()


def _has_version(mask: Tensor) -> bool:
    return not mask.is_inference()


def _owner(mask: Tensor) -> Tensor:
    """A slice that each layer takes of one mask is another object; the tensor that it is a view of is the same."""
    return mask if mask._base is None else mask._base


def _key(mask: Tensor, stream: int) -> Hashable:
    view = (mask.storage_offset(), mask.shape, mask.stride(), mask.dtype)
    return (mask._version, view, stream)


SCANNED = ScannedMasks(room=8)
"""A model has a mask for each kind of layer, and few kinds. Bits take an eighth of the memory of a bool mask."""
