"""The drafts that one step verifies: which sequences have pages for drafts, and which first wait for their newest token.

    drafts = StepDrafts(speculation, prefix, running, grow)
    drafts.prepare()                         # for all sequences at once, where the drafter wants that
    if drafts.is_on and not drafts.is_held_back(sequence):
        guesses = drafts.guess(sequence, budget=8)

Left out: where guesses come from (speculation/drafts.py), and what else a step computes (scheduler.py). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fa_serve.engine.cache.prefix import Prefix
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import Speculation, is_worth_waiting


class StepDrafts:
    """The scheduler's access to `Speculation`.

    running: the scheduler's sequences with a slot
    grow:    gives a sequence pages for a number of tokens
    """

    def __init__(
        self,
        speculation: Speculation,
        prefix: Prefix,
        running: Sequence[SequenceState],
        grow: Callable[[SequenceState, int], None],
    ) -> None:
        self._speculation = speculation
        self._prefix = prefix
        self._running = running
        self._grow = grow

    @property
    def is_on(self) -> bool:
        """Whether sequences have drafts now."""
        return self._speculation.is_on(len(self._running))

    def is_held_back(self, sequence: SequenceState) -> bool:
        """Whether a sequence waits for its newest tokens."""
        return sequence.num_drafts > 0 or self._speculation.waits(sequence, len(self._running))

    def need_results(self) -> bool:
        """Whether the next step should wait for the results of earlier steps, because many sequences need these to join it."""
        held = self.is_on and sum(map(self.is_held_back, self._running))
        return is_worth_waiting(held, len(self._running))

    def prepare(self) -> None:
        """Let a drafter that `prepares` guess for all sequences whose drafts this step may verify."""
        if not self._speculation.drafter.prepares or not self.is_on:
            return
        wanted: list[tuple[SequenceState, int]] = []
        for sequence in self._running:
            if count := self._speculation.num_wanted(sequence, len(self._running), self._room(sequence)):
                self._grow(sequence, len(sequence.tokens) + count)
                wanted.append((sequence, count))
        self._speculation.drafter.prepare(wanted)

    def guess(self, sequence: SequenceState, budget: int) -> list[int]:
        """The drafts that this step verifies, for which the sequence gets pages. budget: tokens for them and the last token"""
        drafts = self._speculation.draft(sequence, len(self._running), min(self._room(sequence), budget - 1))
        if drafts:
            self._grow(sequence, len(sequence.tokens) + len(drafts))
        return drafts

    def _room(self, sequence: SequenceState) -> int:
        """Number of drafts for which there are pages and states."""
        return self._prefix.draft_end(sequence, len(self._running)) - len(sequence.tokens)
