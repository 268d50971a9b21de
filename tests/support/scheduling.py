"""A scheduler and models of what surrounds it: requests, a device, guesses. For tests of the scheduler, without torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.host_tier import HostTier
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import SHORT_CHUNK, STATE_INTERVAL, StateTable
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import NgramDrafter, Speculation


def make_request(name: str, prompt: list[int], max_tokens: int = 8, serial: int = 0, **fields: object) -> Request:
    return Request(name, list(prompt), **{"params": SamplingParams(), "max_tokens": max_tokens, "rank": (0.0, serial)} | fields)


def make_scheduler(
    num_pages: int = 16,
    page_size: int = 4,
    seqs: int = 4,
    tokens: int = 16,
    caching: bool = True,
    window: int | None = None,
    keys_per_tile: int = 8,
    speculation: Speculation | None = None,
    prompt_share: PromptShare | None = None,
    num_states: int = 0,
    interval: int = STATE_INTERVAL,
    make_tier: Callable[[PageTable, StateTable | None], HostTier] | None = None,
) -> Scheduler:
    pages = PageTable(num_pages, page_size, prefix_caching=caching)
    states = StateTable(num_states, pages, interval=interval) if num_states else None
    return Scheduler(
        pages,
        states,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        keys_per_tile=keys_per_tile,
        window=window,
        speculation=speculation,
        prompt_share=prompt_share,
        tier=None if make_tier is None else make_tier(pages, states),
    )


BUDGET = 4096
Cost = Callable[[int, int], float]


def step_cost(rows: int, prompt_tokens: int) -> float:
    """About an 8B model: 4 ms for the weights, 35 us for the keys of a sequence, 23 us for a row of the products."""
    return max(0.004, 23e-6 * (rows + prompt_tokens)) + 35e-6 * rows


def next_token(tokens: list[int]) -> int:
    """A model: the next token is a function of all tokens before it. There are few tokens, so that prefixes repeat."""
    return hash(tuple(tokens)) % 3


class Device:
    """Runs launched steps in order. Memory is written when a step runs; a sampled token stays here until it is read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[tuple[int, int], int] = {}
        self.last_token: dict[int, int] = {}

    def launch(self, batch: ScheduledBatch) -> list[int]:
        """The sampled tokens, `num_samples` for each chunk."""
        size = self.scheduler.pages.page_size
        assert 0 < batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({chunk.slot for chunk in batch.chunks}) == len(batch.chunks)
        sampled = []
        for chunk in batch.chunks:  # a layer writes the keys of the whole step before it reads any
            sequence = chunk.sequence
            pages = sequence.pages
            most = sequence.num_prompt_tokens + sequence.request.max_tokens
            assert chunk.start + chunk.length < most, "more than was asked for"
            for position in range(chunk.start, chunk.start + chunk.length):
                known = [*sequence.tokens, *chunk.drafts]
                token = known[position] if position < len(known) else self.last_token[chunk.slot]
                self.memory[pages[position // size], position % size] = token
        for chunk in batch.chunks:
            sequence = chunk.sequence
            pages = sequence.pages
            tokens = [self.memory[pages[i // size], i % size] for i in range(chunk.start + chunk.length)]
            assert tokens[: len(sequence.tokens)] == sequence.tokens[: len(tokens)], "a sequence does not find its own tokens"
            for length in range(len(tokens) - chunk.num_samples + 1, len(tokens) + 1):
                self.last_token[chunk.slot] = next_token(tokens[:length])
                sampled.append(self.last_token[chunk.slot])
        return sampled


class Run:
    """A scheduler, a device, and a clock whose value is `cost` of each step.

    Pages are large, because the table of pages is checked after each step.
    """

    def __init__(self, share: PromptShare | None, cost: Cost = step_cost, depth: int = 1, **given: int) -> None:
        self.share = share
        self.scheduler = make_scheduler(
            **{"num_pages": 1000, "page_size": 16, "seqs": 8, "tokens": BUDGET} | given, prompt_share=share
        )
        self.device = Device(self.scheduler)
        self.depth = depth
        self.inflight: deque[tuple[ScheduledBatch, list[int]]] = deque()
        self.cost = cost
        self.now = 0.0

    def add(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> SequenceState:
        """A request comes now."""
        return self.scheduler.add(make_request(name, prompt, max_tokens, arrival=self.now, **fields))

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch:
            self.inflight.append((batch, self.device.launch(batch)))
        if self.inflight and (len(self.inflight) > self.depth or not batch):
            ended, tokens = self.inflight.popleft()
            rows = ended.num_tokens - ended.num_prompt_tokens
            seconds = self.cost(rows, ended.num_prompt_tokens)
            self.now += seconds
            self.scheduler.commit(ended, tokens, seconds)
        return batch


SPOILT = ("spoilt",)
"""What is in a state or in a row of a tail after a step that failed, or whose numbers are not finite."""


class StateDevice(Device):
    """A device of a model with states. A state is the tuple of the tokens that it has seen.

    A tail is a ring of rows, by slot: the tokens since the state. No state is read and written in the same step, because the
    order of sequences within a step is not defined.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.states: dict[int, tuple[object, ...]] = {}
        self.tails: dict[int, dict[int, object]] = {}
        self.ring = scheduler.pages.page_size + max(scheduler.pages.page_size, SHORT_CHUNK)

    def launch(self, batch: ScheduledBatch) -> list[int]:
        """The sampled tokens. What each sequence has seen, by its state and its tail, has to be what its pages hold."""
        sampled = super().launch(batch)
        size = self.scheduler.pages.page_size
        written = [state for chunk in batch.chunks for _, state in chunk.stores]
        assert len(written) == len(set(written)), "two sequences write the same state"
        assert not set(written) & {chunk.source for chunk in batch.chunks}, "a state is read and written in the same step"
        for chunk in batch.chunks:
            end = chunk.start + chunk.length
            tokens = tuple(self.memory[chunk.sequence.pages[i // size], i % size] for i in range(end))
            position = chunk.start // size * size
            seen = self.states[chunk.source] if chunk.source >= 0 else ()
            assert seen == tokens[:position], "the state is not that of the last full page"
            tail = self.tails.setdefault(chunk.slot, {})
            first = end // size * size
            if chunk.length <= SHORT_CHUNK:
                seen += tuple(tail[row % self.ring] for row in range(position, chunk.start))
                assert seen == tokens[: chunk.start], "the tail is that of another sequence"
                assert end - position <= self.ring
                assert len(chunk.stores) <= 1
                first = chunk.start
            else:
                assert chunk.start == position, "a long chunk does not begin at a multiple of the page size"
            tail.update((row % self.ring, tokens[row]) for row in range(first, end))
            assert [*chunk.stores] == sorted(chunk.stores)
            for stored, state in chunk.stores:
                assert position < stored <= end
                assert stored % size == 0
                self.states[state] = tokens[:stored]
        return sampled

    def spoil(self, batch: ScheduledBatch) -> None:
        """Do a part of a step that fails: whatever it writes is wrong."""
        for chunk in batch.chunks:
            tail = self.tails.setdefault(chunk.slot, {})
            tail.update((row % self.ring, SPOILT) for row in range(chunk.start, chunk.start + chunk.length))
            self.states.update((state, SPOILT) for _, state in chunk.stores)

    def check_kept(self, salts: Sequence[str | None]) -> None:
        """Assert that every state that a sequence could start from is the one that its hash says."""
        pages = self.scheduler.pages
        states = self.scheduler.states
        for page_hash, state in states._item_of.items():
            chains: list[list[bytes]] = [[] for _ in salts]
            for chain, salt in zip(chains, salts, strict=True):
                pages.hash_pages(self.states[state], chain, salt)
            assert page_hash in [chain[-1] for chain in chains], "a state that is kept is not that of its page"


class Guesser(NgramDrafter):
    """Proposes what the model will draw, except at some positions."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.wrong = wrong

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        tokens = list(sequence.tokens)
        if len(tokens) % 7 in self.wrong:
            return []
        while len(tokens) < len(sequence.tokens) + count:
            tokens.append(next_token(tokens))
        drafts = tokens[len(sequence.tokens) :]
        return [(token + 1) % 3 if (len(sequence.tokens) + i) % 5 in self.wrong else token for i, token in enumerate(drafts)]


class PreparedGuesser(Guesser):
    """The same for a drafter that guesses for all sequences at once, and writes keys into their pages."""

    prepares = True

    def __init__(self, wrong: set[int]) -> None:
        super().__init__(wrong)
        self.prepared: dict[SequenceState, int] = {}

    def prepare(self, wanted: Sequence[tuple[SequenceState, int]]) -> None:
        self.prepared = dict(wanted)
        for sequence, count in wanted:
            assert count > 0
            assert len(sequence.pages) * 4 >= len(sequence.tokens) + count, "a draft has no page"

    def promises(self, sequence: SequenceState) -> bool:
        return True

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        """At most what was prepared. `count` may be larger, because the sequence has got a page for its next token."""
        return super().propose(sequence, min(count, self.prepared.get(sequence, 0)))


class Guesses(Speculation):
    """Speculation with one of these guessers."""

    def __init__(self, num_tokens: int, wrong: set[int], always: bool = False) -> None:
        super().__init__(num_tokens, PreparedGuesser(wrong) if always else Guesser(wrong))


def expected_output(prompt: list[int], max_tokens: int, end_ids: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]
