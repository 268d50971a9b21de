"""Speculation: guesses of a sequence's next tokens (drafts), which one step of the model verifies. Plain Python, no torch.

    speculation = Speculation(num_tokens=7)                      # for each sequence and step
    if speculation.waits(sequence, num_running): ...             # its newest token is worth waiting for
    drafts = speculation.draft(sequence, num_running, most=7)    # [] when there is nothing to guess from
    accepted = num_accepted(drafts, draws)                       # the step has computed 1 + len(drafts) draws
    speculation.record(sequence, len(drafts), accepted)

A draw depends only on the tokens before it, the request's seed and the position. A step that computes the last token and k
drafts therefore makes k + 1 draws, and a draft is right exactly if it equals the draw in its place. The draws are kept up to
and including the first one that differs from its draft. So the tokens are the same that the model would draw one by one; only
their number per step changes.

The guesses come from a `Drafter`. `NgramDrafter` looks them up: it finds the longest recent n-gram that occurred earlier in the
prompt or the answer, and proposes what came after it (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
`DraftModel` (draft_model.py) draws them with a small model, or with a head on the model's hidden states (draft_head.py).

Speculation turns itself off in two ways. First, the rows of a step (sequences times 1 + drafts) stay within MAX_ROWS: the more
sequences run, the fewer drafts each gets, and there are none if more than half of MAX_ROWS run. Second, a sequence whose drafts
are all wrong drafts nothing for its next 2, 4, ... MAX_PAUSE tokens. A drafter that draws its guesses one after the other takes
time for each of them, so for each sequence it draws only a few more than were right on average in that sequence's last steps.
Left out: pages and steps (scheduler.py), draws (sampler.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fa_serve.engine.scheduler.sequence import SequenceState

MAX_ROWS = 128
"""Rows of a step up to which drafts are verified. Up to about this many, products take only the time of reading the weights."""
HELD_SHARE = 4
"""A step waits for the results of the steps in flight if at least one in this many running sequences waits for them.

Waiting leaves the device idle while the host prepares the step, which takes a tenth of a step that decodes few sequences.
"""
MAX_PAUSE = 64
"""Tokens for which a sequence whose drafts were wrong many times in a row drafts nothing."""
NEWEST_SHARE = 1 / 8
"""Weight of the newest step in the average of a sequence's right drafts. In the average of all sequences it has a quarter."""
MORE_THAN_RIGHT = 1.25
"""A drafter that takes time draws MORE_THAN_RIGHT times the average number of right drafts, plus one. If each draft is right
with the same probability, from 0.3 to 0.95, and takes 1/12 of a step, that gives 0.979 or more of the tokens per second of the
best fixed number."""
MIN_MATCH = 3
"""Tokens of an n-gram that must have occurred before."""
MAX_MATCH = 16
"""Tokens up to which matches are compared: a longer match is better."""
MAX_CANDIDATES = 8
"""Earlier occurrences of an n-gram that are compared, the newest first."""
CATCH_UP = 1024
"""Tokens that a drafter takes in at once: half a millisecond of work for an index. Long prompts enter it over several steps."""
MAX_NGRAMS = 1 << 16
"""Different n-grams in an index. When there are more, the index starts anew, so that older tokens are not found any more."""


def draft_limit(num_tokens: int, num_running: int) -> int:
    """How many tokens each of so many sequences may draft in a step. num_tokens: the most that a sequence may draft"""
    return min(num_tokens, max(MAX_ROWS // max(num_running, 1) - 1, 0))


def is_worth_waiting(num_held: int, num_running: int) -> bool:
    """Whether a step should wait for the results of the steps in flight, because enough sequences wait for them."""
    return num_held > 0 and num_held * HELD_SHARE >= num_running


class NgramIndex:
    """Where the n-grams of MIN_MATCH tokens occur in one sequence of tokens. Appending and looking up are O(1) per token."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # by n-gram: the position after its newest occurrence
        self._previous = array("q")  # by position after an occurrence: the position after the previous occurrence, or 0

    def extend(self, tokens: Sequence[int]) -> bool:
        """Take in the tokens that are new. `tokens` is the whole sequence, which only grows. Returns whether all are taken in.

        The last n-gram stays out, because nothing is known to follow it.
        """
        first = len(self._previous)
        last = min(len(tokens), first + CATCH_UP)
        newest = self._newest
        for _ in range(first, min(last, MIN_MATCH)):  # no n-gram ends so early
            self._previous.append(0)
        for end in range(max(first, MIN_MATCH), last):
            key = tuple(tokens[end - MIN_MATCH : end])
            self._previous.append(newest.get(key, 0))
            newest[key] = end
        if len(newest) > MAX_NGRAMS:
            newest.clear()
        return last == len(tokens)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that came after the longest earlier occurrence of the last tokens; [] without an occurrence.

        If these tokens reach the end of the sequence, they repeat from there on.
        """
        length = len(tokens)
        if length <= MIN_MATCH:
            return []
        position = self._newest.get(tuple(tokens[-MIN_MATCH:]), 0)
        last = tokens[-MAX_MATCH:]
        found = 0
        longest = MIN_MATCH - 1
        for _ in range(MAX_CANDIDATES):
            limit = min(MAX_MATCH, position)
            if longest >= limit:  # there is no longer match, or no candidate is left
                break
            if limit == MAX_MATCH and tokens[position - MAX_MATCH : position] == last:  # what edits and quotations find
                found = position
                break
            match = longest + 1
            # one comparison of slices rules out most candidates
            if tokens[position - match : position] == last[-match:]:
                while match < limit and tokens[position - 1 - match] == last[-1 - match]:
                    match += 1
                found = position
                longest = match
            position = self._previous[position]
        if not found:
            return []
        period = length - found
        if period >= count:
            return list(tokens[found : found + count])
        return [tokens[found + index % period] for index in range(count)]


class Drafter(Protocol):
    """Guesses the next tokens of sequences. It may be wrong as often as it likes, and no answer changes.

    prepares: whether it guesses for all sequences at once, in `prepare`, one token after the other
    """

    prepares: bool

    def promises(self, sequence: SequenceState) -> bool:
        """Whether guesses can be expected once the newest token is known, so that it is worth waiting for."""

    def prepare(self, wanted: Sequence[tuple[SequenceState, int]]) -> None:
        """The next step may verify so many drafts of these sequences, which have pages for them.

        Called before `propose`, once for each step, if it `prepares`.
        """

    def propose(self, sequence: SequenceState, count: int) -> list[int] | None:
        """At most `count` tokens that may follow the last one; None while it is still taking in a long prompt."""

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended."""


class NgramDrafter:
    """Owner of the indices of unfinished sequences."""

    prepares = False

    def __init__(self) -> None:
        self._indices: dict[SequenceState, NgramIndex] = {}

    def promises(self, sequence: SequenceState) -> bool:
        """Whether the tokens that are known have occurred before."""
        return bool(self.propose(sequence, 2))

    def prepare(self, wanted: Sequence[tuple[SequenceState, int]]) -> None:
        """Nothing: a look-up takes microseconds."""

    def propose(self, sequence: SequenceState, count: int) -> list[int] | None:
        """What followed the last tokens earlier."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex()
        return index.continuation(sequence.tokens, count) if index.extend(sequence.tokens) else None

    def forget(self, sequence: SequenceState) -> None:
        """Drop the sequence's index."""
        self._indices.pop(sequence, None)


@dataclass(slots=True)
class DraftHistory:
    """What speculation remembers of one sequence.

    num_right: drafts that were right on average in its last steps
    failures:  how many times in a row all drafts were wrong
    resume_at: number of tokens from which on it drafts again
    checked_at: number of tokens for which `waiting` was decided
    waiting:   whether it was held back for its newest token
    """

    num_right: float
    failures: int = 0
    resume_at: int = 0
    checked_at: int = 0
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A snapshot of the counters of speculation.

    num_drafts:       verified drafts, one for each sequence and step
    num_draft_tokens: tokens of these drafts
    accepted_at:      how often the first, the second, ... token of a draft was right and all before it too
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens of drafts that were right."""
        return sum(self.accepted_at)


class Speculation:
    """Owner of the histories of unfinished sequences: which of them draft, and how much.

    num_tokens: largest number of drafts of a sequence in one step
    drafter:    where drafts come from
    """

    def __init__(self, num_tokens: int, drafter: Drafter | None = None) -> None:
        self.num_tokens = num_tokens
        self.drafter = drafter or NgramDrafter()
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted_at = [0] * num_tokens
        self._num_right = float(num_tokens)  # where a sequence begins
        self._histories: dict[SequenceState, DraftHistory] = {}

    def is_on(self, num_running: int) -> bool:
        """Whether each of so many sequences may draft a token."""
        return self.num_tokens > 0 and num_running <= MAX_ROWS // 2

    def waits(self, sequence: SequenceState, num_running: int) -> bool:
        """Whether a sequence whose newest token is not known yet should wait for it, because drafts can be expected."""
        if not self.is_on(num_running) or not sequence.num_pending or not self._may_draft(sequence):
            return False
        history = self._history(sequence)
        length = len(sequence.tokens)
        if history.checked_at != length:
            history.checked_at = length
            enough = sequence.num_output_tokens + 2 < sequence.request.max_tokens
            history.waiting = enough and self.drafter.promises(sequence)
        return history.waiting

    def num_wanted(self, sequence: SequenceState, num_running: int, most: int) -> int:
        """How many tokens the sequence may draft, up to `most`; 0 unless the next step computes only its last token."""
        limit = draft_limit(self.num_tokens, num_running)
        if not limit or sequence.num_pending or not sequence.num_output_tokens:
            return 0
        if sequence.num_computed + 1 != len(sequence.tokens) or not self._may_draft(sequence):
            return 0
        left = sequence.request.max_tokens - sequence.num_output_tokens
        if self.drafter.prepares:
            most = min(most, round(MORE_THAN_RIGHT * self._history(sequence).num_right) + 1)
        return max(min(limit, most, left - 1), 0)

    def draft(self, sequence: SequenceState, num_running: int, most: int) -> list[int]:
        """At most `most` guesses of the tokens after the last one; [] unless the next step computes only that one."""
        count = self.num_wanted(sequence, num_running, most)
        if not count:
            return []
        history = self._history(sequence)
        drafts = self.drafter.propose(sequence, count)
        if history.waiting and drafts is not None and not drafts:
            self._pause(history, sequence)  # it has waited in vain
        history.waiting = False
        return drafts or []

    def record(self, sequence: SequenceState, num_drafts: int, accepted: int) -> None:
        """The first `accepted` of `num_drafts` drafts were right."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(accepted):
            self._accepted_at[position] += 1
        history = self._history(sequence)
        # If all were right, more might have been. Twice as many is a fair estimate if each is right with the same probability.
        found = accepted if accepted < num_drafts else min(2 * accepted, self.num_tokens)
        history.num_right += (found - history.num_right) * NEWEST_SHARE
        self._num_right += (found - self._num_right) * NEWEST_SHARE / 4
        if accepted:
            history.failures = 0
        else:
            self._pause(history, sequence)

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended."""
        self._histories.pop(sequence, None)
        self.drafter.forget(sequence)

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted_at))

    def _pause(self, history: DraftHistory, sequence: SequenceState) -> None:
        history.failures += 1
        history.resume_at = len(sequence.tokens) + min(2**history.failures, MAX_PAUSE)

    def _may_draft(self, sequence: SequenceState) -> bool:
        if not sequence.request.params.speculative:
            return False
        history = self._histories.get(sequence)
        return history is None or len(sequence.tokens) >= history.resume_at

    def _history(self, sequence: SequenceState) -> DraftHistory:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = DraftHistory(self._num_right)
        return history


def num_accepted(drafts: Sequence[int], draws: Sequence[int]) -> int:
    """How many drafts, from the first one on, equal their draws."""
    for index, draft in enumerate(drafts):
        if draft != draws[index]:
            return index
    return len(drafts)
