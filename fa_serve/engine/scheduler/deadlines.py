"""When unfinished sequences run out of time: a heap of deadlines, kept as short as the number of sequences allows."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from fa_serve.engine.errors import RequestError
from fa_serve.engine.scheduler.sequence import SequenceState

LATE = RequestError("timeout", "the request did not finish within its timeout")
"""The error of a sequence whose deadline has passed."""
SPARE = 64
"""Entries of ended sequences that may always stay in the heap. Removing them costs a pass over all entries."""


class Deadlines:
    """Deadlines in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceState]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, sequence: SequenceState) -> None:
        heappush(self._heap, (deadline, next(self._serial), sequence))

    def expired(self, now: float, num_unfinished: int) -> list[SequenceState]:
        """The unfinished sequences whose deadline has passed, each of them once.

        num_unfinished: number of unfinished sequences of any kind; the heap is kept at about twice that size
        """
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence = heappop(self._heap)
            if not sequence.finished:
                late.append(sequence)
        if len(self._heap) > 2 * num_unfinished + SPARE:  # most entries belong to sequences that ended in time
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapify(self._heap)
        return late
