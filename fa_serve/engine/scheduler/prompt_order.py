"""Which prompt gets the next tokens of a step. Plain Python, no torch.

    order = PromptOrder(prompts, waiting, share)
    while (sequence := order.first()) is not None:
        ...                                  # compute a chunk of it; a sequence without a slot is admitted first
        order.drop()                         # or order.close(): no waiting sequence is admitted in this step

Clients take turns by the tokens that they have received, and each client's own prompts go by how much of them is left. The
prompt of a running sequence has the turn that its client had at its admission, plus the tokens that have been computed since:
this is start-time fair queueing over chunks, so a long prompt of one client does not hold up a short prompt of another. Among
the prompts of one client, each counts as if it had arrived later by the time that the rest of it takes (`PromptShare.delay`).
So the shortest remaining prompt goes first among prompts that arrived together, and every prompt goes before prompts that
arrive long after it: none starves. A partly computed prompt has less left, so it is not put off for a slightly shorter one.

Sources: shortest remaining processing time (Schrage 1968), which minimises the mean wait, plus ageing, as with deadlines.
Left out: how many tokens a prompt gets (prompt_share.py, chunk_lengths.py), and the queue itself (fair_queue.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState

MAX_SEEN = 64
"""Prompts whose expected first tokens a step looks at. They are in order: first tokens of later prompts are rarely later."""


class _Place(NamedTuple):
    """turn: the client's turn, in tokens; rank: the place among the prompts of the client"""

    turn: int
    rank: tuple[float, int]
    sequence: SequenceState


class PromptOrder:
    """The prompts of running sequences, and those that wait, in the order in which they get their tokens in this step.

    prompts: running sequences that lack more than their last token
    share:   knows what prompts cost; None orders them only by their ranks
    """

    def __init__(
        self, prompts: Sequence[SequenceState], waiting: FairQueue[SequenceState], page_size: int, share: PromptShare | None
    ) -> None:
        self._share = share
        self._prompts = prompts
        self._waiting = waiting
        self._is_open = True
        self._next_waits = False
        self._places = _in_order(prompts, page_size, share)
        self._places.reverse()

    def limits(self, batch: ScheduledBatch, num_decoding: int, now: float) -> tuple[int, int]:
        """What `PromptShare.limits` leaves to prompts in addition to so many sequences that decode.

        batch: the step, with the tokens of the decoding sequences; now: the time on the clock of `Request.arrival`
        """
        first = self.first()
        if self._share is None or first is None or not num_decoding:
            return batch.room, batch.room
        seen = islice(chain(self._prompts, self._waiting), MAX_SEEN)
        expected = max((self._expected(each, now) for each in seen if not each.num_output_tokens), default=0.0)
        images = 0 if batch.towers is None else batch.towers.expected
        decoding = batch.size._replace(rows=max(batch.num_tokens, num_decoding), image_tokens=images)
        return self._share.limits(decoding, batch.room, first.num_computed, expected)

    def _expected(self, sequence: SequenceState, now: float) -> float:
        """`PromptShare.expected` of a prompt that is not computed yet."""
        assert self._share is not None
        left = sequence.num_tokens - sequence.num_computed
        return self._share.expected(now - sequence.request.arrival, left, sequence.num_computed)

    def first(self) -> SequenceState | None:
        """The sequence that is next; None if there is none. It has a slot unless `is_waiting`."""
        running = self._places[-1] if self._places else None
        waiting = self._waiting.first() if self._is_open and self._waiting else None
        self._next_waits = waiting is not None and (running is None or self._goes_before(waiting, running))
        if self._next_waits:
            return waiting
        return None if running is None else running.sequence

    def drop(self) -> None:
        """Pass over the sequence that was first: it has its tokens, or gets none in this step. If it waited, it is admitted."""
        if not self._next_waits:
            self._places.pop()

    @property
    def is_waiting(self) -> bool:
        """Whether the sequence that was first waits to be admitted."""
        return self._next_waits

    def close(self) -> None:
        """The waiting sequence that was first waits for another step, and so do all that wait after it."""
        self._is_open = False

    def _goes_before(self, waiting: SequenceState, running: _Place) -> bool:
        if waiting.request.client == running.sequence.request.client:
            return waiting.rank < running.rank
        return (self._waiting.next_turn(), waiting.rank) < (running.turn, running.rank)


def _in_order(prompts: Iterable[SequenceState], page_size: int, share: PromptShare | None) -> list[_Place]:
    """The places of running prompts. The turns of a client are given to its prompts in the order of their ranks."""
    clients: dict[str | None, list[_Place]] = defaultdict(list)
    for sequence in prompts:
        rank = sequence.rank
        if share is not None:
            left = share.delay(sequence.num_tokens - sequence.num_computed, sequence.num_computed)
            rank = (min(sequence.request.rank[0] + left, rank[0]), rank[1])
        turn = sequence.turn + sequence.num_computed - sequence.num_shared * page_size
        clients[sequence.request.client].append(_Place(turn, rank, sequence))
    places: list[_Place] = []
    for own in clients.values():
        turns = sorted(place.turn for place in own)
        ranked = sorted(own, key=lambda place: place.rank)
        places += [place._replace(turn=turn) for place, turn in zip(ranked, turns, strict=True)]
    return sorted(places, key=lambda place: (place.turn, place.rank))
