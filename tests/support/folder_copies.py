"""A host's memory of real bytes for the devices of `scheduling`, and a folder behind it whose files fail where a test says."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

from host_copies import PlannedCopies, PlannedCopy

from fa_serve.engine.cache.folder_files import FileName, FolderFiles
from fa_serve.engine.cache.folder_tier import FolderTier
from fa_serve.engine.cache.host_tier import HostTier, Lane
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable

AT_ONCE = (0, False, "")
IDENTITY = bytes(16)


class ByteCopies(PlannedCopies):
    """Slots that hold what rows of the device contain as bytes, as memory does."""

    row_bytes = 512

    def __init__(self, num_slots: int, plan: Iterator[tuple[int, bool, str]]) -> None:
        super().__init__(num_slots, plan)
        self.memory = bytearray(num_slots * self.row_bytes)

    def slot_bytes(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * self.row_bytes : (slot + 1) * self.row_bytes]

    def to_host(self, rows: Sequence[int], slots: Sequence[int]) -> PlannedCopy:
        def copy() -> None:
            for row, slot in zip(rows, slots, strict=True):
                content = pickle.dumps(self.read(row))
                self.slot_bytes(slot)[:] = content.ljust(self.row_bytes, b"\0")

        return self._copy(copy)

    def to_device(self, slots: Sequence[int], rows: Sequence[int]) -> PlannedCopy:
        def copy() -> None:
            for slot, row in zip(slots, rows, strict=True):
                self.write(row, pickle.loads(self.slot_bytes(slot)))

        return self._copy(copy)


class FailingFiles(FolderFiles):
    """Files that cannot be written or read sometimes, that are altered or removed by others, or torn. rate: of each"""

    def __init__(self, folder: Path, random: Random, rate: float) -> None:
        super().__init__(folder, IDENTITY)
        self.random = random
        self.rate = rate

    def _happens(self) -> bool:
        return self.random.random() < self.rate

    def write(self, name: FileName, data: memoryview) -> None:
        if self._happens():
            raise OSError("planted")
        super().write(name, data)
        if self._happens():
            self._spoil(self.path_of(name))

    def read(self, name: FileName, into: memoryview) -> None:
        if self._happens():
            into[:] = bytes(len(into))
            raise OSError("planted")
        super().read(name, into)

    def _spoil(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        kind = self.random.choice(["altered", "torn", "removed"])
        if kind == "altered":
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        elif kind == "torn":
            del content[self.random.randrange(len(content)) :]
        path.write_bytes(content)
        if kind == "removed":
            path.unlink()


def make_folder_tier(
    files: FolderFiles,
    num_slots: int,
    num_state_slots: int,
    plan: Iterator[tuple[int, bool, str]] | None = None,
    depth: int = 64,
    budget: int = 1 << 30,
) -> Callable[[PageTable, StateTable | None], HostTier]:
    """What `scheduling.make_scheduler` takes."""
    planned: Iterator[Any] = plan or repeat(AT_ONCE)

    def make(pages: PageTable, states: StateTable | None) -> HostTier:
        pages._salt = files.secret
        lanes = [Lane(pages, ByteCopies(num_slots, planned), min(depth, pages.num_pages))]
        if states is not None:
            lanes.append(Lane(states, ByteCopies(num_state_slots, planned), states.num_states))
        return HostTier(lanes[0], lanes[1] if states is not None else None, FolderTier(files, budget))

    return make
