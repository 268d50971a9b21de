"""What an EAGLE-3 head takes of each token that the model has computed, kept in the pages of the KV cache.

    kept = KeptFeatures(model, head)
    kept.allocate(num_pages * page_size)
    with kept.keeping(batch):                # a PagedBatch
        logits = paged_forward(model, ...)
    features = kept.read(slot_mapping)       # (total, hidden)

A feature is the head's projection (`fc`) of the hidden states of three layers: as many numbers as one hidden state. It lies
where the keys and values of its token lie, in a tensor with the same pages. So a prefix that is found in the cache brings its
features along, those of a wrong draft are overwritten with its keys, and those of a preempted sequence are lost with its pages.
Reading and writing have fixed addresses and sizes, which CUDA graphs need. Left out: what is done with them (draft_head.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa_serve.hf import HiddenStateReader, PagedBatch

if TYPE_CHECKING:
    from fa_serve.hf.eagle3 import Eagle3Head


class KeptFeatures:
    """Owner of the features. Raises UnsupportedModelError for a model whose hidden states cannot be read.

    model: a PreTrainedModel
    """

    def __init__(self, model: Any, head: Eagle3Head) -> None:
        self._reader = HiddenStateReader(model, head.depths)
        self._head = head
        self._features = self._rows(0)

    @property
    def bytes_per_token(self) -> int:
        return self._features.shape[1] * self._features.itemsize

    def allocate(self, num_slots: int) -> None:
        """Make room for so many slots of the KV cache. What was kept is lost."""
        self._features = self._rows(num_slots)

    @contextmanager
    def keeping(self, batch: PagedBatch) -> Iterator[None]:
        """Keep the features of a forward of the model within this context."""
        with self._reader.reading() as states:
            yield
        if len(states) < len(self._head.depths):
            return  # a forward of few layers, which stand for all in the warm-up
        last = len(self._features) - 1  # takes what belongs to no token
        slots = torch.where(batch.slot_mapping < 0, last, batch.slot_mapping)
        self._features.index_copy_(0, slots, self._head.combine(states))

    def read(self, slot_mapping: Tensor) -> Tensor:
        """(total,) slots of the cache -> (total, hidden), anything where there is no slot"""
        return self._features.index_select(0, slot_mapping.clamp(min=0))

    def _rows(self, num_slots: int) -> Tensor:
        """The slots, and one row more. Zeros, because a draft may read what has never been written."""
        head = self._head
        return torch.zeros(num_slots + 1, head.config.hidden_size, dtype=head.dtype, device=head.device)
