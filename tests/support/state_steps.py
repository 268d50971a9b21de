"""A small engine's part of states for tests: it gives sequences state pages and slots, and makes the batch of each step.

    table = StateSteps(kind.spec(rows, weights), page_size=16)
    batch = table.begin([Part(sequence=0, rows=16), Part(sequence=1, rows=3, dropped=1)])
    out = kind.step(rows, weights, table.states, batch)
    table.end()

All memory holds NaN at first. `dropped` rows at the end of a part are drafts that are rejected: they do not count afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from fa_serve.ops import FEW_ROWS, PIECE_ROWS, StateBatch, StateSpec


@dataclass(frozen=True)
class Part:
    """A sequence's rows in a step.

    stores:   positions whose states are kept besides the last multiple of the page size, for chunks
    padding:  it is one that pads a graph: of slot 0, without a length
    """

    sequence: int
    rows: int
    dropped: int = 0
    stores: tuple[int, ...] = ()
    padding: bool = False


@dataclass
class _Sequence:
    slot: int
    length: int = 0
    source: int = -1
    kept: dict[int, int] = field(default_factory=dict)


class StateSteps:
    def __init__(self, spec: StateSpec, page_size: int = 16, num_states: int = 64, slots: int = 8, device: str = "cpu") -> None:
        self.page_size = page_size
        self.device = device
        self.states = spec.allocate(num_states, slots, page_size, device)
        for x in (self.states.pages, *self.states.tails):
            x.fill_(torch.nan)
        self.sequences = dict[int, _Sequence]()
        self._free = list(range(num_states))[::-1]
        self.parts: list[Part] = []

    def add(self, number: int, slot: int, source: int = -1, length: int = 0) -> None:
        """A sequence that begins at a position whose state is in a page."""
        self.sequences[number] = _Sequence(slot, length, source)

    def begin(self, parts: list[Part]) -> StateBatch:
        """The batch of a step. Sequences that are not known begin at 0, in the slot of their number."""
        self.parts = parts
        bounds = [0]
        sources = []
        targets = []
        slots = []
        lengths = []
        chunks = list[list[int]]()
        for b, part in enumerate(parts):
            bounds.append(bounds[-1] + part.rows)
            if part.padding:
                sources.append(-1)
                targets.append(-1)
                slots.append(0)
                lengths.append(0)
                continue
            sequence = self.sequences.setdefault(part.sequence, _Sequence(part.sequence))
            sequence.kept.clear()
            end = sequence.length + part.rows
            last = end // self.page_size * self.page_size
            start = sequence.length // self.page_size * self.page_size
            is_chunk = part.rows > FEW_ROWS
            for position in {last, *part.stores}:
                if position > start:
                    sequence.kept[position] = self._free.pop()
            sources.append(sequence.source)
            targets.append(-1 if is_chunk else sequence.kept.get(last, -1))
            slots.append(sequence.slot)
            lengths.append(end)
            if is_chunk:
                first = sequence.length
                grid = {*range(first // PIECE_ROWS * PIECE_ROWS + PIECE_ROWS, end, PIECE_ROWS), *sequence.kept, first, end}
                for low, high in pairwise(sorted(grid)):
                    chunks.append([bounds[b] + low - first, high - low, b, sequence.kept.get(high, -1)])
        chunks.append([0, 0, -1, -1])

        def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        table = ints(chunks).view(-1, 4)  # type: ignore[arg-type]
        most = 1 if max(part.rows for part in parts if not part.padding) == 1 else FEW_ROWS
        return StateBatch(
            self.page_size, ints(sources), ints(targets), ints(slots, torch.int64), ints(bounds), ints(lengths), table, most
        )

    def end(self) -> None:
        """The step has run: states move on as far as rows are accepted."""
        for part in self.parts:
            if part.padding:
                continue
            sequence = self.sequences[part.sequence]
            sequence.length += part.rows - part.dropped
            start = sequence.length // self.page_size * self.page_size
            if start in sequence.kept:
                sequence.source = sequence.kept[start]
