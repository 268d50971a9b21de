"""A small model or a head that guesses what the large model will draw: the drafter of "draft=MODEL" and "eagle3=HEAD".

    drafter = DraftModel(runner, 8192, None)                     # made by `loading.make_scheduler`
    drafter.prepare([(sequence, 7)])                             # 7 short steps of the small model, one read at the end
    drafts = drafter.propose(sequence, 7)

The draft model draws with the request's temperature, filters and random numbers, which depend only on the seed and the
position. So it draws what the large model draws where their distributions agree, with sampling as well as with greedy decoding.
Its draws ignore penalties and masks. They never change an answer (drafts.py).

It has its own `ModelRunner`, and its own KV cache, whose pages have the same ids: a sequence has the same pages in both caches.
It takes in the tokens of a sequence when that sequence first drafts, at most CATCH_UP tokens of all sequences in a step, and
from then on only the tokens that it has not drawn itself. Shared pages are written by every sequence that shares them, with the
same keys. A head (draft_head.py) is run in the same way, one position behind, because a position needs the token after it. Left
out: which sequences draft, and how many tokens (drafts.py); pages (scheduler.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.engine.runner.results import PendingResult
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import CATCH_UP

log = logging.getLogger("fa_serve.engine")


@dataclass(slots=True)
class DraftCache:
    """What the draft model's cache holds of one sequence.

    pages:  the sequence's own list; another list means that the sequence has lost these pages
    length: leading positions of the sequence that have been computed
    drawn:  drafts that have been computed after them; empty for a head, which computes the right drafts again
    """

    pages: list[int]
    length: int = 0
    drawn: list[int] = field(default_factory=list)

    def num_known(self, sequence: SequenceState) -> int:
        """Leading tokens of the sequence whose keys are in the cache. The last token is always computed again."""
        num_right = 0
        for draft, token in zip(self.drawn, sequence.tokens[self.length :], strict=False):
            if draft != token:
                break
            num_right += 1
        return min(self.length + num_right, len(sequence.tokens) - 1)


class DraftModel:
    """Owner of what the draft model's cache holds, by unfinished sequence.

    runner:     the runner of the draft model or head, whose cache has as many pages as the large model's
    max_tokens: the most tokens of a step
    max_len:    the most tokens of a sequence that the draft model can compute; None: no limit
    """

    prepares = True

    def __init__(self, runner: ModelRunner, max_tokens: int, max_len: int | None = None) -> None:
        self._runner = runner
        self._max_tokens = min(max_tokens, CATCH_UP)
        self._max_len = max_len or sys.maxsize
        self._caches: dict[SequenceState, DraftCache] = {}
        self._drafts: dict[SequenceState, list[int]] = {}
        self._failed = False

    def promises(self, sequence: SequenceState) -> bool:
        """True, unless drafting has failed or the sequence is too long for the draft model."""
        return not self._failed and len(sequence.tokens) + 2 <= self._max_len

    def prepare(self, wanted: Sequence[tuple[SequenceState, int]]) -> None:
        """Draw the drafts. A failure is logged and ends all drafting; the engine goes on without drafts."""
        self._drafts = {}
        if self._failed:
            return
        try:
            self._draw([(x, count) for x, count in wanted if len(x.tokens) + count <= self._max_len])
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception:
            log.exception("speculative decoding is disabled, because the draft model failed")
            self._drafts = {}
            self._failed = True

    def propose(self, sequence: SequenceState, count: int) -> list[int] | None:
        """The drafts that the last `prepare` drew; None if it drew none for this sequence."""
        drafts = self._drafts.get(sequence)
        return None if drafts is None else drafts[:count]

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended."""
        self._caches.pop(sequence, None)

    def _draw(self, wanted: Sequence[tuple[SequenceState, int]]) -> None:
        """One step takes in what is new and draws the first drafts, and each further step draws one more."""
        batch, drawing = self._take_in(wanted)
        results: list[tuple[list[tuple[SequenceState, int]], PendingResult]] = []
        while batch:
            results.append((drawing, self._runner.sample(self._runner.launch(batch))))
            num_drawn = len(results)
            drawing = [(sequence, count) for sequence, count in drawing if count > num_drawn]
            batch = ScheduledBatch()
            for sequence, _ in drawing:  # its newest draft is on the device
                start = self._num_positions(sequence) + num_drawn - 1
                batch.append(Chunk(sequence, sequence.slot, start, 1, num_samples=1))
        for sequences, pending in results:
            for (sequence, _), token in zip(sequences, pending.read().tokens, strict=True):
                self._drafts.setdefault(sequence, []).append(token)
        for sequence, drafts in self._drafts.items():
            if not self._runner.tokens_ahead:
                self._caches[sequence].drawn = drafts[:-1]
            if min(drafts) < 0:  # the sampler found no token
                del drafts[next(place for place, token in enumerate(drafts) if token < 0) :]

    def _take_in(self, wanted: Sequence[tuple[SequenceState, int]]) -> tuple[ScheduledBatch, list[tuple[SequenceState, int]]]:
        """The step that computes the tokens that are new to the cache, and the sequences that draw in it.

        Sequences that lack few tokens come first: they do not wait for the prompts of others.
        """
        batch = ScheduledBatch(max_tokens=self._max_tokens)
        drawing = []
        known = {sequence: self._num_known(sequence) for sequence, _ in wanted}
        for sequence, count in sorted(wanted, key=lambda entry: self._num_positions(entry[0]) - known[entry[0]]):
            start = known[sequence]
            length = min(self._num_positions(sequence) - start, batch.room)
            if not length:
                break
            if sequence not in self._caches or self._caches[sequence].pages is not sequence.pages:
                batch.admitted.append(sequence)
            self._caches[sequence] = DraftCache(sequence.pages, start + length)
            samples = start + length == self._num_positions(sequence)
            batch.append(Chunk(sequence, sequence.slot, start, length, int(samples)))
            if samples:
                drawing.append((sequence, count))
        return batch, drawing

    def _num_positions(self, sequence: SequenceState) -> int:
        """Positions that can be computed from the known tokens."""
        return len(sequence.tokens) - self._runner.tokens_ahead

    def _num_known(self, sequence: SequenceState) -> int:
        """Leading positions whose keys are in the cache, without the last one."""
        cache = self._caches.get(sequence)
        known = 0 if cache is None or cache.pages is not sequence.pages else cache.num_known(sequence)
        return min(known, self._num_positions(sequence) - 1)
