"""The pages of every running sequence, by slot: a table on the host and its copy on the device.

    table.clear(slot)                        # another sequence has got the slot
    table.fill(slot, sequence.pages)
    sent = send({..., **table.changes()}, device)
    table.apply(sent)                        # now the device knows the pages too
    block_table = table.rows(slots, width)   # (n, width) int32, on the device

A step sends only the pages that are new since the previous step. Left out: which sequence holds which page (pages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BlockTable:
    """(num_slots, max_pages) page ids. Entries past a sequence's last page are never read."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.max_pages = max_pages
        self._host = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._num_filled = [0] * num_slots
        self._device = torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device)
        self._changed: list[tuple[int, int, int]] = []  # (slot, first, last): columns that the device does not have yet

    def clear(self, slot: int) -> None:
        """The slot belongs to another sequence now."""
        self._num_filled[slot] = 0

    def fill(self, slot: int, pages: Sequence[int]) -> None:
        """The sequence in this slot has these pages: the pages that the table has already, and maybe more."""
        first = self._num_filled[slot]
        last = len(pages)
        if first != last:
            self._host[slot, first:last] = pages[first:]
            self._num_filled[slot] = last
            self._changed.append((slot, first, last))

    def pages(self, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The page ids at (slots, columns), from the host's table."""
        return self._host[slots, columns].astype(np.int64)

    def changes(self) -> dict[str, NDArray[Any]]:
        """What the device's table lacks, as arrays to send: places in the flattened table, and the pages there."""
        if not self._changed:
            return {}
        # A slot may be in the list twice if a step failed before its changes were sent. Then the pages are the same.
        places = [np.arange(slot * self.max_pages + first, slot * self.max_pages + last) for slot, first, last in self._changed]
        index = np.concatenate(places)
        return {"table_index": index, "table_pages": self._host.reshape(-1)[index]}

    def apply(self, sent: Mapping[str, Tensor]) -> None:
        """Write the changes, which have been sent, into the device's table."""
        if self._changed:
            self._device.view(-1).index_copy_(0, sent["table_index"], sent["table_pages"])
            self._changed.clear()

    def rows(self, slots: Tensor, width: int) -> Tensor:
        """(len(slots), width) int32: the first pages of these slots. slots: (n,) int64, on the device."""
        return self._device[:, :width].index_select(0, slots)
