"""Traffic of sequences on a device whose pages hold tokens, and whose states of linear attention the tokens they have seen."""

from __future__ import annotations

from collections import deque

from scheduling import SPOILT, Device, StateDevice, expected_output, make_request

from fa_serve.engine import RequestError
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, ScheduledBatch
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import SequenceState

FAILURE = RequestError("step_failed", "the step failed")
SALTS = (None, "salt")


class Traffic:
    """A scheduler and its device, with steps in flight. It checks both tables and every kept state after each step."""

    def __init__(self, scheduler: Scheduler, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.device = Device(scheduler) if scheduler.states is None else StateDevice(scheduler)
        self.depth = depth
        self.inflight: deque[tuple[ScheduledBatch, list[int]]] = deque()
        self.output: dict[str, list[int]] = {}
        self.sequences: dict[str, SequenceState] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> SequenceState:
        request = make_request(name, prompt, max_tokens, len(self.sequences), **fields)
        self.output[name] = []
        self.sequences[name] = self.scheduler.add(request)
        return self.sequences[name]

    def take_in(self, broken: bool = False) -> None:
        """Commit the oldest step. broken: the first draw of its first sequence is not finite."""
        batch, tokens = self.inflight.popleft()
        sampling = next((x for x in batch.chunks if x.num_samples and not x.postponed and not x.sequence.finished), None)
        if broken and sampling is not None:
            self.spoil_chain(sampling.sequence)
            first = sum(x.num_samples for x in batch.chunks[: batch.chunks.index(sampling)])
            tokens = [*tokens[:first], INVALID_TOKEN, *tokens[first + 1 :]]
        for sequence, gained in self.scheduler.commit(batch, tokens).items():
            self.output[sequence.request.request_id] += gained
        self.check()

    def spoil_chain(self, sequence: SequenceState) -> None:
        """All states that the sequence has come from are not finite, unless another sequence holds them as well."""
        states = self.scheduler.states
        if states is None:
            return
        others = {held.state for x in self.scheduler.running if x is not sequence for held in x.held_states}
        known = {states._item_of[each] for each in sequence.page_hashes if each in states._item_of}
        for state in (known | {held.state for held in sequence.held_states}) - others:
            self.device.states[state] = SPOILT

    def step(self, outcome: str = "", chosen: int = 0) -> bool:
        """One step of the engine. Returns whether anything was left to do.

        outcome: what goes wrong: "fail", "roll back", "not finite" or "postpone"; chosen: for which chunk
        """
        scheduler = self.scheduler
        if self.inflight and scheduler.needs_results():
            self.take_in()
        batch = scheduler.schedule()
        scheduler.check_integrity()
        if batch and outcome == "fail":
            self.spoil(batch)
            scheduler.fail(batch, FAILURE)
        elif batch and outcome == "roll back":
            self.spoil(batch)
            scheduler.rollback(batch)
        elif batch:
            tokens = self.device.launch(batch)
            if outcome == "postpone":
                while self.inflight:  # the masks depend on them
                    self.take_in()
                chunk = batch.chunks[chosen % len(batch.chunks)]
                if chunk.num_samples and not chunk.sequence.finished:
                    scheduler.postpone(chunk)
            self.inflight.append((batch, tokens))
        if outcome:
            self.check()
        else:  # the tables were checked after `schedule`
            self.check_states()
        if self.inflight and (len(self.inflight) > self.depth or not batch):
            self.take_in(outcome == "not finite")
        return bool(scheduler.sequences or self.inflight)

    def spoil(self, batch: ScheduledBatch) -> None:
        if isinstance(self.device, StateDevice):
            self.device.spoil(batch)

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.check_states()

    def check_states(self) -> None:
        if isinstance(self.device, StateDevice):
            self.device.check_kept(SALTS)

    def run(self) -> Traffic:
        """Until everything has ended."""
        while self.step():
            assert len(self.inflight) < 3
        return self

    def check_ended(self) -> None:
        """Every answer is right, and nothing is held any more."""
        for name, sequence in self.sequences.items():
            request = sequence.request
            expected = expected_output(request.prompt, request.max_tokens, request.end_ids)
            assert self.output[name] == expected[: len(self.output[name])]
            if sequence.finish_reason in ("stop", "length"):
                assert self.output[name] == expected
        tables = [self.scheduler.pages, self.scheduler.states]
        assert [table.num_held for table in tables if table is not None] == [0] * (2 - tables.count(None))


def prompt_of(beginning: list[int], length: int) -> list[int]:
    """A prompt of about this length that begins so."""
    return [*beginning, *expected_output(beginning, length, frozenset())]


def lengths_of(scheduler: Scheduler, traffic: Traffic) -> list[list[tuple[str, int, int]]]:
    """(name, start, length) of the chunks of each step until the end."""
    steps = []
    while batch := scheduler.schedule():
        steps.append([(chunk.sequence.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks])
        traffic.inflight.append((batch, traffic.device.launch(batch)))
        traffic.take_in()
    return steps
