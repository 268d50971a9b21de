"""Which images the towers (a model's image encoders) encode next, and which sequences wait for them. No torch.

    if towers.add(sequence, start): queue.add(sequence)          # at once, if it has something to compute without its images
    towers.begin_step()
    for sequence in towers.encode(batch, prompts, num_decoding, share, now): queue.add(sequence)
    end = towers.barrier(sequence)           # tokens from here on wait for an image
    towers.passed(sequence)                  # its chunk has been scheduled: it no longer needs the images before that point

Encoding images is separate from computing tokens: clients take turns by the embeddings that they have received (fair_queue.py),
and a step encodes as many as it has time for. A sequence computes the tokens before its first image that is not encoded. If
there are too few of them, it waits outside the queue, where it holds up nobody and takes no slot and no pages.

Embeddings are held until the sequence has computed the tokens that they stand for. If held embeddings fill the cache, the
towers wait, unless no sequence that holds an image can go on. Then one more image is encoded, for a running sequence if there
is one. So there is always progress.

Left out: the embeddings (images/encoder.py), and how much time a step has for the towers (prompt_share.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from fa_serve.engine.errors import RequestError
from fa_serve.engine.images.prompt import PlacedImage
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.engine.scheduler.prompt_share import MAX_IMAGE_TOKENS, MIN_PROMPT_TOKENS, PromptShare
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch, TowerWork
from fa_serve.engine.scheduler.sequence import SequenceState

SLICES = 8
"""While sequences decode, images that begin together take about this many steps. With more steps, images are encoded more
efficiently; with fewer, they are ready sooner."""
MAX_SEEN = 64
"""A step looks at no more sequences outside the queue than this, to see how long they have waited."""
NOWHERE = sys.maxsize
"""The barrier of a sequence that waits for no image."""


class Encoder(Protocol):
    """The interface that the queue needs from the owner of the embeddings."""

    @property
    def capacity(self) -> int:
        """Embeddings that the cache has room for."""

    @property
    def is_busy(self) -> bool:
        """Whether images are on their way."""

    def is_encoded(self, key: bytes) -> bool: ...

    def has_failed(self, key: bytes) -> bool: ...

    def hold(self, key: bytes) -> None: ...

    def retry(self, key: bytes) -> None: ...

    def release(self, key: bytes) -> None: ...

    def release_all(self) -> None: ...


@dataclass(slots=True, eq=False)
class WantedImage:
    """An image that a sequence needs.

    ready: every step that is scheduled from now on finds its embeddings
    holds: the encoder keeps its embeddings for this sequence, or will keep them once they exist
    """

    sequence: SequenceState
    placed: PlacedImage
    rank: tuple[float, int]
    turn: int = 0
    charge: int = 0
    ready: bool = False
    holds: bool = False

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def key(self) -> bytes:
        return self.placed.image.key

    @property
    def count(self) -> int:
        """The number of its embeddings."""
        return len(self.placed.places)

    @property
    def first(self) -> int:
        """Its first place in the prompt."""
        return int(self.placed.places[0])

    @property
    def end(self) -> int:
        """The place after its last one."""
        return int(self.placed.places[-1]) + 1


class TowerQueue:
    """Knows which images sequences still need, and which of them are encoded.

    encoder: None for an engine without images
    """

    def __init__(self, encoder: Encoder | None = None) -> None:
        self._encoder = encoder
        self._queue: FairQueue[WantedImage] = FairQueue()
        self._needs: dict[SequenceState, list[WantedImage]] = {}
        self._aside: dict[SequenceState, int] = {}  # sequences outside of the queue, and their cached tokens
        self._begun: list[WantedImage] = []
        self._num_done = 0  # embeddings of `_begun` for which steps have been given time so far
        self._uses: Counter[bytes] = Counter()
        self._counts: dict[bytes, int] = {}  # embeddings of the images that are held
        self._spent: list[WantedImage] = []  # images that only the newest step still reads
        self._newest: ScheduledBatch | None = None

    def __len__(self) -> int:
        return len(self._aside)

    def __iter__(self) -> Iterator[SequenceState]:
        """The sequences outside of the queue."""
        return iter(self._aside)

    def __contains__(self, sequence: SequenceState) -> bool:
        """Whether a sequence waits outside of the queue."""
        return sequence in self._aside

    def renewed(self) -> TowerQueue:
        """An empty queue with the same encoder, for a new scheduler. The state of this queue may be inconsistent."""
        if self._encoder is not None:
            self._encoder.release_all()
        return TowerQueue(self._encoder)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be encoded."""
        return not self._queue and not self._begun

    def add(self, sequence: SequenceState, start: int) -> bool:
        """A sequence with images has arrived. Returns whether it may join the queue; otherwise `encode` returns it later.

        start: number of its tokens that the prefix cache has
        """
        self._release_spent()  # sequences arrive between steps
        if self._encoder is not None and sequence.request.images is not None:
            for each in sequence.request.images.placed:  # an image that failed for earlier sequences is tried again
                self._encoder.retry(each.image.key)
        self.want(sequence, start)
        if self._may_join(sequence, start):
            return True
        self._aside[sequence] = start
        return False

    def failures(self) -> dict[SequenceState, RequestError]:
        """The sequences that have to end because an image could not be encoded. Call this after each launch."""
        failed: dict[SequenceState, RequestError] = {}
        if self._encoder is not None:
            for each in chain(self._spent, *self._needs.values()):
                if self._encoder.has_failed(each.key) and not each.sequence.finished:
                    failed.setdefault(each.sequence, _error_of(each.request, each.placed))
        return failed

    def failures_among(self, sequences: Iterable[SequenceState]) -> dict[SequenceState, RequestError]:
        """Those of these sequences that have an image which could not be encoded, needed or found in the prefix cache."""
        failed: dict[SequenceState, RequestError] = {}
        for sequence in sequences:
            images = sequence.request.images
            for each in () if images is None else images.placed:
                if self._encoder is not None and self._encoder.has_failed(each.image.key):
                    failed.setdefault(sequence, _error_of(sequence.request, each))
        return failed

    def want(self, sequence: SequenceState, start: int) -> None:
        """A sequence is to be computed from token `start` on: it needs the images that end after this token."""
        images = sequence.request.images
        if self._encoder is None or images is None:
            return
        placed = [each for each in images.placed if len(each.places) and each.places[-1] >= start]
        before = self._needs.get(sequence, [])
        if [each.placed for each in before] == placed:
            return
        self._needs[sequence] = [WantedImage(sequence, each, sequence.rank) for each in placed]
        for each in self._needs[sequence]:
            self._look_for(each)
        for each in before:
            self._give_up(each)
        if not placed:
            del self._needs[sequence]

    def awaits(self, sequence: SequenceState) -> bool:
        """Whether a sequence needs an image that is not encoded."""
        return any(not each.ready for each in self._needs.get(sequence, ()))

    def barrier(self, sequence: SequenceState) -> int:
        """The first token that has to wait for an image: of the image, or of a two-way block with it; NOWHERE if none waits."""
        for each in self._needs.get(sequence, ()):
            if not each.ready:
                assert sequence.request.images is not None
                return sequence.request.images.last_cut(each.first)
        return NOWHERE

    def set_aside(self, waiting: FairQueue[SequenceState], num_cached: Callable[[SequenceState], int]) -> None:
        """Take the first sequence out of the queue, again and again, as long as it could only wait there for an image.

        num_cached: how many of a sequence's tokens the prefix cache has
        """
        while waiting and self.awaits(first := waiting.first()):
            if first.num_pending or self.barrier(first) > (start := num_cached(first)):
                return
            self._aside[first] = start
            waiting.remove(first)

    def begin_step(self) -> None:
        """The previous step has been launched: it has the embeddings that it reads, and its share of the encoding is done."""
        if self._encoder is None:
            return
        waiting = []
        for each in self._begun:
            each.ready = self._encoder.is_encoded(each.key)
            if not each.ready:
                waiting.append(each)
            elif not self._is_wanted(each):
                self._let_go(each)
        self._begun = waiting
        if waiting and not self._encoder.is_busy:  # the step has failed, or the work was given up
            self._begun = []
            for each in waiting:
                self._let_go(each)
                if self._is_wanted(each):
                    self._queue.add(each)
        self._release_spent()

    def encode(
        self,
        batch: ScheduledBatch,
        prompts: Iterable[SequenceState],
        num_decoding: int,
        share: PromptShare | None,
        now: float,
    ) -> list[SequenceState]:
        """Let a step encode what it has time for in addition to decoding and prompts: a part of an image, or many images.

        prompts: running and waiting sequences with prompts to compute; num_decoding: number of sequences that decode;
                 now: the time on the clock of `Request.arrival`

        Returns the sequences that may join the queue now.
        """
        before = self._newest
        self._newest = batch
        if not self._needs and not self._queue and not self._begun:
            return []
        limit = None
        # the device begins with these images while it still computes the previous step, so they delay that step's rows too
        num_waiting = num_decoding if before is None else max(num_decoding, before.size.rows)
        if share is not None and num_waiting:
            late = max((now - each.request.arrival for each in islice(self._aside, MAX_SEEN)), default=0.0)
            decoding = batch.size._replace(rows=max(batch.num_tokens, num_waiting))
            with_text = any(self._may_join(each, begin) for each, begin in self._aside.items())
            with_text = with_text or any(each.num_computed < self.barrier(each) for each in prompts)
            with_text = with_text or (before is not None and before.num_prompt_tokens > 0)
            limit = share.image_limit(decoding, late, beside_prompts=with_text)
        batch.towers = self._plan(limit)
        joined = [sequence for sequence, begin in self._aside.items() if self._may_join(sequence, begin)]
        for sequence in joined:
            del self._aside[sequence]
        return joined

    def _plan(self, limit: int | None) -> TowerWork | None:
        """What this step encodes; None if nothing is to be encoded.

        limit: embeddings that it has time for; None if no decoding sequence waits for it
        """
        encoder = self._encoder
        if encoder is None or self.is_idle:
            return None
        begins = not self._begun
        if begins:
            self._begin(MAX_IMAGE_TOKENS if limit is None else min(limit * SLICES, MAX_IMAGE_TOKENS))
        images = {each.key: each.placed.image for each in self._begun}
        if not images:
            return None
        left = max(sum(self._counts[key] for key in images) - self._num_done, 1)
        is_read = limit is None
        if limit is None:
            for each in self._begun:
                each.ready = True  # this step encodes them before it reads them
        elif left <= limit:
            limit = None
        copies = begins and limit is not None  # this step only copies the pixels, and encodes nothing yet
        count = 0 if copies else min(limit or left, left)
        self._num_done += count
        return TowerWork([*images.values()], limit, count, is_read)

    def passed(self, sequence: SequenceState) -> None:
        """Tokens of a sequence have been scheduled: it no longer needs the images that end with them."""
        needs = self._needs.get(sequence)
        if needs is None:
            return
        while needs and needs[0].end <= sequence.num_computed:
            spent = needs.pop(0)
            if spent.ready:
                self._spent.append(spent)
            else:
                self._give_up(spent)
        if not needs:
            del self._needs[sequence]

    def in_need(self, work: TowerWork | None) -> list[SequenceState]:
        """The sequences that need an image of a step's work."""
        keys = {image.key for image in work.images} if work is not None else set()
        return [sequence for sequence, needs in self._needs.items() if any(each.key in keys for each in needs)]

    def remove(self, sequence: SequenceState) -> None:
        """A sequence has ended, wherever it was."""
        self._aside.pop(sequence, None)
        for each in self._needs.pop(sequence, ()):
            self._give_up(each)

    def forget(self) -> None:
        """No image counts as encoded any more, because the weights have changed."""
        self._queue = FairQueue()
        for each in self._begun:  # also those whose sequences have ended meanwhile
            self._let_go(each)
        self._begun = []
        for needs in self._needs.values():
            for each in needs:
                self._let_go(each)
                each.ready = False
                self._queue.add(each)

    def check_integrity(self) -> None:
        """Assert that every image that a sequence needs is queued, on its way or ready, and that it is held unless queued."""
        wanted = [each for needs in self._needs.values() for each in needs]
        queued = {*self._queue}
        begun = {*self._begun}
        for each in wanted:
            assert (each in queued) + (each in begun or each.ready) == 1, "an image is lost"
            assert each.holds == (each not in queued)
        assert queued <= {*wanted}, "an image is encoded for nobody"
        assert self._uses == Counter(each.key for each in {*wanted, *self._spent, *begun} if each.holds)
        assert {*self._aside} <= {*self._needs}

    def _may_join(self, sequence: SequenceState, start: int) -> bool:
        """Whether a sequence's first image is ready, or enough text comes before it to be worth a slot meanwhile."""
        needs = self._needs.get(sequence)
        barrier = self.barrier(sequence)
        return needs is None or barrier > needs[0].first or barrier - start >= MIN_PROMPT_TOKENS

    def _look_for(self, wanted: WantedImage) -> None:
        """Find an image in the cache or among the images that have begun, or queue it."""
        assert self._encoder is not None
        wanted.ready = self._encoder.is_encoded(wanted.key)
        begun = next((each for each in self._begun if each.key == wanted.key), None)
        if begun is not None and not wanted.ready:
            self._begun.append(wanted)
            wanted.ready = begun.ready
        elif not wanted.ready:
            self._queue.add(wanted)
            return
        self._hold(wanted)

    def _begin(self, room: int) -> None:
        """Take images out of the queue, at least one if there is room in the cache."""
        assert self._encoder is not None
        self._num_done = 0
        keys: set[bytes] = set()
        while (wanted := self._next()) is not None:
            known = wanted.key in keys
            if keys and not known and wanted.count > room and not self._encoder.is_encoded(wanted.key):
                return
            self._take(wanted)
            self._hold(wanted)
            wanted.ready = self._encoder.is_encoded(wanted.key)
            if not wanted.ready:
                self._begun.append(wanted)
                room -= 0 if known else wanted.count
                keys.add(wanted.key)

    def _next(self) -> WantedImage | None:
        """The image that is next, if the cache has room for it."""
        if not self._queue:
            return None
        first = self._queue.first()
        held = sum(self._counts.values())
        assert self._encoder is not None
        if not held or first.key in self._counts or held + first.count <= self._encoder.capacity:
            return first
        holders = [sequence for sequence, needs in self._needs.items() if any(each.holds for each in needs)]
        running = [sequence for sequence in self._needs if sequence.slot >= 0]
        stuck = {sequence for sequence in running if self.barrier(sequence) <= sequence.num_computed}
        served = {each.sequence for each in self._begun}  # they may go on when the images on their way are encoded
        if any(each in served or (each.slot >= 0 and each not in stuck) for each in holders):
            return None
        if stuck:
            return next((each for each in self._queue if each.sequence in stuck), None)
        return first if all(each in self._aside for each in holders) else None

    def _take(self, wanted: WantedImage) -> None:
        """Take an image out of the queue, and charge its client."""
        if wanted is not self._queue.first():
            self._queue.remove(wanted)
            return
        wanted.charge = wanted.count
        wanted.turn = self._queue.admit(wanted.count)
        self._queue.settle(wanted, 0)

    def _give_up(self, wanted: WantedImage) -> None:
        """The sequence no longer needs the image. An image that is on its way is encoded all the same."""
        if not wanted.holds:
            self._queue.remove(wanted)
        elif wanted not in self._begun:
            self._let_go(wanted)

    def _is_wanted(self, image: WantedImage) -> bool:
        """Whether its sequence still needs it."""
        return image in self._needs.get(image.sequence, ())

    def _hold(self, wanted: WantedImage) -> None:
        assert self._encoder is not None
        wanted.holds = True
        self._uses[wanted.key] += 1
        self._counts[wanted.key] = wanted.count
        self._encoder.hold(wanted.key)

    def _let_go(self, wanted: WantedImage) -> None:
        if not wanted.holds:
            return
        assert self._encoder is not None
        wanted.holds = False
        self._uses[wanted.key] -= 1
        if not self._uses[wanted.key]:
            del self._uses[wanted.key]
            del self._counts[wanted.key]
            self._encoder.release(wanted.key)

    def _release_spent(self) -> None:
        for each in self._spent:
            self._let_go(each)
        self._spent = []


def _error_of(request: Request, failed: PlacedImage) -> RequestError:
    """The error of a request of which this image could not be encoded."""
    assert request.images is not None
    placed = request.images.placed
    number = 1 + next(n for n, each in enumerate(placed) if each is failed)
    which = f"image {number} of {len(placed)}"
    return RequestError("image_failed", f"the vision tower could not encode {which} (see the log); send a different image")
