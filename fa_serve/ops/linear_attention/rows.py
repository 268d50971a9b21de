"""Rows of packed sequences as tensors with a dimension of sequences, and back: what every fallback of this room needs.

    for group in packed_groups(sequences, device):    # a call of the functional form
        out = group.scatter(out, compute(group.gather(q), ...))
    for group in step_groups(batch):                               # a step of the engine
        state = group.start_state(states.pages)
        ...
        group.write_tail(states.tails, rows)

Sequences of equal length are computed together, and so are all sequences with few rows. Padding rows are zeros. Such a token
changes no state: its key, its input and its log gate are 0. Left out: what is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fa_serve.ops.linear_attention.problem import FEW_ROWS, Sequences, StateBatch


class PackedGroup:
    """Sequences of a call that are computed together.

    sequences: (n,) int64: the numbers of the sequences
    rows:      (n, most) int64: the packed row of each of their tokens; any row where a sequence has no token
    valid:     (n, most) bool: where a sequence has a token
    """

    def __init__(self, sequences: Sequence[int], bounds: Sequence[int], device: torch.device) -> None:
        first = torch.tensor([bounds[b] for b in sequences], device=device)
        self.lengths = torch.tensor([bounds[b + 1] - bounds[b] for b in sequences], device=device)
        self.sequences = torch.tensor(sequences, device=device)
        self.offsets = torch.arange(max(bounds[b + 1] - bounds[b] for b in sequences), device=device)
        self.valid = self.offsets < self.lengths[:, None]
        self.rows = first[:, None] + self.offsets.where(self.valid, 0)

    def gather(self, x: Tensor) -> Tensor:
        """Packed rows (tokens, ...) as (n, most, ...), with zeros where a sequence has no token."""
        return masked(x[self.rows], self.valid)

    def scatter(self, out: Tensor, values: Tensor) -> Tensor:
        """`out` (tokens, ...) with the rows of these sequences replaced by those of `values` (n, most, ...)."""
        return out.index_put((self.rows[self.valid],), values[self.valid].to(out.dtype))


class StepGroup(PackedGroup):
    """Sequences of a step that are computed together.

    first, start, end: (n,) positions: of the first row of the step, of the state that is read, and past the last row
    tail_positions:    (n, width): the positions from `start` on; `in_tail` says which of them have a row in the tail
    """

    def __init__(self, sequences: Sequence[int], bounds: Sequence[int], batch: StateBatch) -> None:
        super().__init__(sequences, bounds, batch.slots.device)
        self.slots = batch.slots[self.sequences].long()
        self.sources = batch.sources[self.sequences].long()
        self.end = batch.seqused_k[self.sequences].long()
        self.first = self.end - self.lengths
        self.start = self.first // batch.page_size * batch.page_size
        width = int((self.first - self.start).max())
        self.tail_positions = self.start[:, None] + torch.arange(width, device=self.slots.device)
        self.in_tail = self.tail_positions < self.first[:, None]
        self.positions = self.first[:, None] + self.offsets
        self.stores = [*self._targets(batch), *self._pieces(batch)]

    def start_state(self, pages: Tensor) -> Tensor:
        """The states before `start`, (n, *page): zeros where there is no page."""
        return masked(pages[self.sources.clamp(min=0)], self.sources >= 0)

    def read_tail(self, ring: Tensor) -> Tensor:
        """The rows of one tensor of the tail from `start` to `first`, (n, width, ...); zeros after them."""
        rows = ring[self.slots[:, None], self.tail_positions % ring.shape[1]]
        return masked(rows, self.in_tail)

    def write_tail(self, rings: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write rows (n, most, ...) to the tails: for each sequence, its last rows, as many as fit into the ring."""
        for ring, rows in zip(rings, values, strict=True):
            kept = self.valid & (self.positions >= self.end[:, None] - ring.shape[1])
            slots = self.slots[:, None].expand_as(kept)[kept]
            ring[slots, self.positions[kept] % ring.shape[1]] = rows[kept].to(ring.dtype)

    def _targets(self, batch: StateBatch) -> Iterator[tuple[int, int, int]]:
        """(index in the group, position, page) for the sequences of few rows whose page fills."""
        targets = batch.targets[self.sequences].tolist()
        for i, (page, start, end) in enumerate(zip(targets, self.start.tolist(), self.end.tolist(), strict=True)):
            position = end // batch.page_size * batch.page_size
            if page >= 0 and position > start and len(self.offsets) <= FEW_ROWS:
                yield i, position, page

    def _pieces(self, batch: StateBatch) -> Iterator[tuple[int, int, int]]:
        """(index in the group, position, page) for the pieces of chunks whose state is kept."""
        index_of = {sequence: i for i, sequence in enumerate(self.sequences.tolist())}
        for row, count, sequence, page in batch.chunks.tolist():
            if page >= 0 and count > 0 and sequence in index_of:
                i = index_of[sequence]
                yield i, int(self.first[i]) + row + count - int(batch.cu_seqlens[sequence]), page


def packed_groups(sequences: Sequences, device: torch.device) -> list[PackedGroup]:
    """The sequences of a call of the functional form. Their bounds are read back from the device."""
    bounds = sequences.bounds(device).tolist()
    return [PackedGroup(alike, bounds, device) for alike in _alike(bounds, range(len(bounds) - 1))]


def step_groups(batch: StateBatch) -> list[StepGroup]:
    """The sequences of a step, without those that pad a CUDA graph. `batch` is read back from the device."""
    bounds = batch.cu_seqlens.tolist()
    used = [b for b, length in enumerate(batch.seqused_k.tolist()) if length > 0]
    return [StepGroup(sequences, bounds, batch) for sequences in _alike(bounds, used)]


def masked(x: Tensor, valid: Tensor) -> Tensor:
    """x with zeros where `valid`, which has the first dimensions of x, is False. x may be NaN there."""
    return x.where(valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())), x.new_zeros(()))


def _alike(bounds: Sequence[int], sequences: Sequence[int]) -> list[list[int]]:
    """The sequences that have rows, in groups: one for all with few rows, and one for each larger number of rows."""
    found = defaultdict[int, list[int]](list)
    for b in sequences:
        rows = bounds[b + 1] - bounds[b]
        if rows > 0:
            found[max(rows, FEW_ROWS)].append(b)
    return list(found.values())
