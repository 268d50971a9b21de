"""The scheduler's half of a request: the tokens of one sequence, its pages and its slot. Plain Python, no torch.

A `SequenceState` changes only through its own methods, and only `Scheduler` calls them. Everyone else reads. A test enforces
this (tests/engine/scheduler/test_sequence.py). The client's half, text and log-probabilities, is `OutputState`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fa_serve.engine.errors import RequestError
from fa_serve.engine.request.outputs import FinishReason
from fa_serve.engine.request.request import Request

EXPECTED_TOKENS = 128
"""Tokens of an answer that a client is charged for in advance. The difference is charged when the answer ends."""


NEVER_OFFERED = sys.maxsize
"""More pages than there are: `num_offered` of a sequence whose pages others must not share."""


class HeldState(NamedTuple):
    """A state of linear attention that a sequence holds in addition to the one that its next step reads.

    position: number of leading tokens that it comes after
    step:     number of the step that reads or writes it; after that step the sequence no longer needs it
    """

    state: int
    position: int
    step: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """One answer being generated.

    tokens:       the prompt, then every sampled token that is known on the host
    num_prompt_tokens: length of the prompt
    rank:         its place among the sequences of its client: the rank of its request, moved back by the cost of its prompt
    num_pending:  sampled tokens that are still on the device, because their step has been launched and not yet read
    num_computed: leading tokens whose keys and values are in the cache once all launched steps have run; drafts not counted
    num_drafts:   guesses of the tokens after the last one, which the step in flight verifies
    num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache when the request was first admitted
    num_shared:   leading pages that were found in the prefix cache
    shares:       whether the prefix cache may be searched for it
    num_offered:  leading pages that are registered in the prefix cache; or NEVER_OFFERED
    num_released: leading pages that lie before the window of every layer and are not held any more
    num_at_start: tokens that were known when the sequence was admitted last; 0 if it never was
    turn:         place among the sequences of all clients while the sequence runs, from `FairQueue`
    charge:       tokens that its client was charged when the sequence was admitted
    slot:         row of the per-sequence state on the device while the sequence runs, else -1
    is_new:       whether no step has had a chunk of it since it was given its slot
    pages:        ids of its pages in order; the first num_released of them may belong to other sequences by now
    page_hashes:  hashes of its full pages
    unfiled:      pages and states that were unconfirmed and had no file when it was preempted: (kind, hash)
    state:        state of linear attention that its next step reads; -1 is the state before the first token
    state_position: number of leading tokens that `state` comes after: the last multiple of the page size up to num_computed
    retired:      further states that it holds, because steps in flight read or write them
    branch:       position in the prompt up to which others have the same tokens, if a state is missing there; else 0
    finish_reason, error: as in `RequestOutput`; None while the sequence is unfinished
    """

    request: Request
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    rank: tuple[float, int] = field(init=False)
    num_pending: int = 0
    num_computed: int = 0
    num_drafts: int = 0
    num_cached_tokens: int = 0
    num_shared: int = 0
    shares: bool = True
    num_offered: int = 0
    num_released: int = 0
    num_at_start: int = 0
    turn: int = 0
    charge: int = 0
    slot: int = -1
    is_new: bool = False
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    unfiled: set[tuple[str, bytes]] = field(default_factory=set)
    state: int = -1
    state_position: int = 0
    retired: list[HeldState] = field(default_factory=list)
    branch: int = 0
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.rank = self.request.rank

    @property
    def content(self) -> Sequence[int]:
        """The known tokens as the hashes of pages see them: image tokens are numbers that stand for the image's content."""
        images = self.request.images
        return self.tokens if images is None else [*images.content, *self.tokens[self.num_prompt_tokens :]]

    @property
    def has_blocks(self) -> bool:
        """Whether tokens of its prompt attend to each other both ways."""
        return self.request.images is not None and bool(self.request.images.blocks)

    def cuts(self, end: int) -> tuple[int, int]:
        """The last place up to `end`, and the first place from `end` on, where a chunk may end: outside of two-way blocks."""
        images = self.request.images
        assert images is not None
        return images.last_cut(end), images.next_cut(end)

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens that are known on the host."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_last_pending(self) -> bool:
        """The last token that the request allows is on the device."""
        return len(self.tokens) - self.num_prompt_tokens + self.num_pending >= self.request.max_tokens

    @property
    def held_pages(self) -> list[int]:
        """The pages that this sequence holds: all but those that were released before the window."""
        return self.pages[self.num_released :]

    @property
    def held_states(self) -> list[HeldState]:
        """The states that this sequence holds, by position. The `step` of the one that its next step reads is -1."""
        held = [*self.retired]
        if self.state >= 0:
            held.append(HeldState(self.state, self.state_position, -1))
        return sorted(held, key=lambda each: each.position)

    @property
    def num_confirmed(self) -> int:
        """Leading tokens whose keys and values are known to be finite.

        A token that was sampled after the admission confirms all tokens before it, because finite logits need finite keys and
        values. Shared pages are confirmed by the sequence that has computed them.
        """
        return len(self.tokens) - 1 if len(self.tokens) > self.num_at_start else 0

    @property
    def relies_on_others(self) -> bool:
        """Whether it has read pages of others, and no token since has shown that they are finite."""
        return self.num_shared > 0 and not self.num_confirmed

    def num_prompt_logits(self, length: int) -> int:
        """For how many of the next `length` tokens `prompt_logprobs` needs logits."""
        if self.request.params.prompt_logprobs is None or self.num_output_tokens + self.num_pending:
            return 0
        return max(min(length, self.num_prompt_tokens - 1 - self.num_computed), 0)

    def up_to_its_end(self, draws: Sequence[int]) -> tuple[Sequence[int], int | None]:
        """The draws that the answer gains, and the draw that ends it: its last token, or a number that stands for no token."""
        num_left = self.request.max_tokens - (len(self.tokens) - self.num_prompt_tokens)
        for number, draw in enumerate(draws, 1):
            if draw < 0:
                return draws[: number - 1], draw
            if draw in self.request.end_ids or number >= num_left:
                return draws[:number], draw
        return draws, None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def place(self) -> tuple[int, tuple[float, int]]:
        """Sort key among the running sequences."""
        return self.turn, self.rank

    @property
    def num_expected(self) -> int:
        """How many tokens of its answer the client is charged for when the sequence is admitted."""
        room = self.request.max_tokens - (self.num_at_start - self.num_prompt_tokens)
        return min(room, EXPECTED_TOKENS)

    def start(self, slot: int, pages: list[int], num_shared: int, page_size: int, state: int = -1, branch: int = 0) -> None:
        """The sequence has been admitted. Its first `num_shared` pages hold the keys and values of its first tokens already.

        state: the state after these pages, if the model has states
        """
        self.slot = slot
        self.is_new = True
        self.pages = pages
        self.num_shared = num_shared
        self.num_offered = num_shared
        self.num_computed = num_shared * page_size
        self.state = state
        self.state_position = self.num_computed if state >= 0 else 0
        self.branch = branch
        self.num_at_start = len(self.tokens)
        if not self.num_output_tokens:
            self.num_cached_tokens = self.num_computed

    def move_back(self, seconds: float) -> None:
        """Give the sequence the rank that it would have had if it had arrived so many seconds later."""
        self.rank = (self.request.rank[0] + seconds, self.request.rank[1])

    def take_turn(self, turn: int) -> None:
        """The sequence has this place among the running ones."""
        self.turn = turn

    def pay(self, charge: int) -> None:
        """The sequence's client was charged for its admission."""
        self.charge = charge

    def grow(self, pages: list[int]) -> None:
        """The sequence holds more pages."""
        self.pages += pages

    def advance(self, length: int, samples: bool, num_drafts: int = 0) -> None:
        """A step that computes the next `length` tokens and drafts has been scheduled; it may sample one more token."""
        self.is_new = False
        self.num_computed += length
        self.num_pending += samples
        self.num_drafts = num_drafts

    def receive(self, tokens: Sequence[int] = (), num_accepted: int = 0) -> None:
        """The outcome of a step that samples is known, or will never be known because the step was rolled back.

        tokens: tokens that the answer gains
        num_accepted: number of leading drafts that were right, so that their keys and values are valid for the next tokens
        """
        self.num_pending -= 1
        self.tokens += tokens
        if self.num_drafts:  # else there are none, or the sequence was preempted meanwhile
            self.num_computed += num_accepted
            self.num_drafts = 0
            if self.retired:
                self._read_newest()

    def hold(self, stores: Sequence[tuple[int, int]], step: int) -> None:
        """The step of this number, which has been scheduled, writes these states: (position, state)."""
        if stores:
            self.retired += [HeldState(state, position, step) for position, state in stores]
            self._read_newest()

    def _read_newest(self) -> None:
        """The next step reads the newest state that the computed tokens reach; steps in flight read the previous one."""
        reached = [each for each in self.retired if self.state_position < each.position <= self.num_computed]
        if reached:
            newest = max(reached, key=lambda each: each.position)
            self._exchange(newest, newest.step)

    def _exchange(self, new: HeldState, step: int) -> None:
        """The next step reads `new` instead of the current state, and `step` is the last step that needs the current one."""
        old = HeldState(self.state, self.state_position, step)
        self.retired = [each for each in self.retired if each.state != new.state]
        if old.state >= 0:
            self.retired.append(old)
        self.state = new.state
        self.state_position = new.position

    def take_spent(self, step: int) -> list[int]:
        """Give up the states that no step after this one needs. Returns them, by position. step: its number"""
        spent = [each.state for each in sorted(self.retired, key=lambda each: each.position) if each.step <= step]
        self.retired = [each for each in self.retired if each.step > step]
        return spent

    def postpone(self, step: int = 0) -> None:
        """The step in flight, which has this number, samples nothing, so the last known token is computed again.

        If that token completes a state, all tokens after the previous state are computed again.
        """
        self.receive()
        self.num_computed -= 1
        if self.state_position > self.num_computed:
            earlier = [each for each in self.retired if each.position <= self.num_computed]
            self._exchange(max(earlier, key=lambda each: each.position, default=HeldState(-1, 0, step)), step)
            self.num_computed = self.state_position

    def drop_last(self, count: int) -> None:
        """The last tokens do not belong to the answer, because it has ended before them."""
        if count:
            del self.tokens[-count:]

    def offer(self, num_pages: int) -> None:
        """The first `num_pages` pages are registered in the prefix cache."""
        self.num_offered = num_pages

    def keep_to_itself(self) -> None:
        """Register no page that the sequence holds or fills, until the sequence is computed again from its first token on."""
        self.num_offered = NEVER_OFFERED

    def share_nothing(self) -> None:
        """Compute all tokens of this sequence itself from now on, whenever it is admitted."""
        self.shares = False

    def release_before(self, num_pages: int) -> None:
        """The first `num_pages` pages are not held any more."""
        self.num_released = num_pages

    def leave_unfiled(self, names: Iterable[tuple[str, bytes]]) -> None:
        """These pages and states, (kind, hash), are unconfirmed and have no files; files of them that are written from now on
        may have to be withdrawn."""
        self.unfiled.update(names)

    def pause(self) -> None:
        """The sequence has lost its slot and its pages: it has ended or was preempted."""
        self.slot = -1
        self.pages = []
        self.num_computed = 0
        self.num_drafts = 0
        self.num_shared = 0
        self.num_offered = 0
        self.num_released = 0
        self.state = -1
        self.state_position = 0
        self.retired = []
        self.branch = 0

    def finish(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """The answer is complete, or ends here for another reason."""
        self.finish_reason = reason
        self.error = error
