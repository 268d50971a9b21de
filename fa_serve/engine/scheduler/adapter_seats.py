"""Sequences that wait outside the queue until their adapter is in memory. Plain Python, no torch.

    if seats.add(sequence): queue.add(sequence)          # at once, if it has no adapter or a loaded one
    joined, failed = seats.arrivals()        # adapters are in memory now, or could not be loaded
    seats.remove(sequence)                   # it has ended

A sequence holds its adapter from the moment when the adapter has a place in the pool until the sequence ends, so that no
adapter is evicted while a sequence waits for pages or is preempted. Sequences whose adapter has no place wait in the order of
their arrival. Sequences whose adapter is in memory pass them, but the first one that waits is passed MAX_PASSED times at most.
Otherwise an adapter that is always in demand would never leave the pool. Left out: which adapter is evicted (lora/pool.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_serve.engine.errors import RequestError
from fa_serve.engine.lora.pool import Adapter, LoraPool
from fa_serve.engine.scheduler.sequence import SequenceState

MAX_PASSED = 64
"""Sequences with an adapter in memory that may pass the first sequence whose adapter is not in memory."""


class AdapterSeats:
    """Owner of the sequences that wait for their adapter.

    pool: None for an engine without adapters
    """

    def __init__(self, pool: LoraPool | None = None) -> None:
        self._pool = pool
        self._unplaced: dict[SequenceState, None] = {}
        self._loading: dict[SequenceState, None] = {}
        self._held: dict[SequenceState, Adapter] = {}
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._unplaced) + len(self._loading)

    def __iter__(self) -> Iterator[SequenceState]:
        """The sequences that wait."""
        yield from self._unplaced
        yield from self._loading

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._loading or sequence in self._unplaced

    def renewed(self) -> AdapterSeats:
        """`AdapterSeats` with the same pool and no sequences, for a new scheduler."""
        if self._pool is not None:
            self._pool.release_all()
        return AdapterSeats(self._pool)

    def add(self, sequence: SequenceState) -> bool:
        """A sequence has arrived. Returns whether it may join the queue; otherwise it is one of `arrivals` later."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        assert self._pool is not None, "a request with an adapter reached an engine without adapters"
        self._pool.join(adapter)
        self._unplaced[sequence] = None
        self._place_waiting()
        try:
            return self._settle(sequence)
        except Exception:  # `arrivals` reports it
            return False

    def arrivals(self) -> tuple[list[SequenceState], list[tuple[SequenceState, RequestError]]]:
        """The sequences that may join the queue now, and those whose adapter could not be loaded."""
        if not self:
            return [], []
        assert self._pool is not None
        self._pool.loader.settle()
        self._place_waiting()
        joined = []
        failed = []
        for sequence in [*self._loading]:
            try:
                if self._settle(sequence):
                    joined.append(sequence)
            except Exception as error:
                name = self._held[sequence].name
                failed.append((sequence, RequestError("adapter_failed", f"the adapter {name!r} could not be loaded: {error}")))
        return joined, failed

    def remove(self, sequence: SequenceState) -> None:
        """A sequence has ended, wherever it was."""
        self._unplaced.pop(sequence, None)
        self._loading.pop(sequence, None)
        held = self._held.pop(sequence, None)
        adapter = sequence.request.adapter
        if adapter is not None and self._pool is not None:
            if held is not None:
                self._pool.release(held)
            self._pool.leave(adapter)

    def check_integrity(self) -> None:
        """Assert that the pool's references are those of the sequences here."""
        if self._pool is not None:
            self._pool.check_integrity([*self._held.values()])

    def _place_waiting(self) -> None:
        """Give sequences a place in the pool, in turn."""
        assert self._pool is not None
        waits = False
        for sequence in [*self._unplaced]:
            adapter = sequence.request.adapter
            assert adapter is not None
            if waits and (adapter not in self._pool or self._num_passed >= MAX_PASSED):
                continue
            if not self._pool.hold(adapter):
                waits = True
                continue
            if waits:
                self._num_passed += 1
            else:
                self._num_passed = 0
            del self._unplaced[sequence]
            self._held[sequence] = adapter
            self._loading[sequence] = None

    def _settle(self, sequence: SequenceState) -> bool:
        """Whether the adapter of a sequence is in memory; the sequence then stops waiting. Raises what loading raised."""
        if sequence not in self._loading:
            return False
        assert self._pool is not None
        ready = self._pool.is_ready(self._held[sequence])
        if ready:
            del self._loading[sequence]
        return ready
