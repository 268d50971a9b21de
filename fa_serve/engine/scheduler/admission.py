"""Whether there is room for a waiting sequence. Plain Python, no torch.

    admission = Admission(waiting, running, prefix, slots)     # of a scheduler, which changes them
    shared = admission.prefix_of(sequence)   # None: it has to wait
    admission.has_room()                     # for the first sequence of the queue

Left out: what sequences take when they are admitted, and which ones are preempted (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fa_serve.engine.cache.prefix import NOTHING, Prefix, Room, SharedPrefix
from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.engine.scheduler.sequence import SequenceState


class Admission:
    """Reads what the scheduler owns. slots: the free ones"""

    def __init__(
        self, waiting: FairQueue[SequenceState], running: Sequence[SequenceState], prefix: Prefix, slots: Sequence[int]
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._prefix = prefix
        self._slots = slots

    def has_room(self) -> bool:
        """Whether the first waiting sequence needs no preemption: it has room, or waits for a token or copies from the host."""
        first = self._waiting.first()
        shared = self._prefix.shared(first)
        if first.num_pending or shared.is_coming:
            return True
        return bool(self._slots) and self.fits(first, shared, self._prefix.growth(self._running))

    def prefix_of(self, sequence: SequenceState) -> SharedPrefix | None:
        """What a waiting sequence shares if it is admitted now; None if it has to wait."""
        if sequence.num_pending:
            return None  # it was preempted with a pending token, which the device keeps for no sequence without a slot
        shared = self._prefix.shared(sequence)
        if shared.awaited or not self.fits(sequence, shared):
            return None
        shared = self._prefix.complete(sequence, shared)
        return None if shared.awaited else shared

    def fits(self, sequence: SequenceState, shared: SharedPrefix, growth: Room = NOTHING) -> bool:
        """Whether the room suffices for a waiting sequence after the running ones have taken `growth`.

        A reserve is left for the running sequences to grow into, or the newcomer might be preempted at once. The newcomer of a
        client that runs nothing needs no reserve: the client with the most sequences is preempted before it.
        """
        crowded = self._waiting.crowding(self._running) is not None
        reserve = NOTHING if crowded else self._prefix.reserve(len(self._running))
        return self._prefix.available().holds(self._prefix.need(sequence, shared), reserve, growth)
