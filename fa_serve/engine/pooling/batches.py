"""Which inputs of an encoder are computed together: up to a number of tokens, and clients take turns. Plain Python, no torch.

    queue = InputQueue(max_tokens=8192, max_inputs=256)
    queue.add("request-1", inputs, params, client="key")
    batch = queue.next_batch()               # runs of inputs, also of several requests
    queue.finish(batch)

A batch is taken as soon as the device is free: inputs that arrive during a step form the next batch, and no input waits for
others to arrive. An input that is longer than `max_tokens` is a batch by itself. Neighbouring inputs of a request are taken as
a run of at most RUN_TOKENS tokens, after which its client's turn ends. So a client with one request of a thousand inputs and a
client with a thousand requests get the same share, and short inputs do not need an object each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from fa_serve.engine.errors import QueueFullError
from fa_serve.engine.pooling.inputs import EncoderInputs
from fa_serve.engine.pooling.params import PoolingParams
from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.spec import ParameterError

MAX_WAITING_TOKENS = 1 << 22
"""The most tokens of inputs that wait. A request that would exceed it is refused, unless nothing waits."""


RUN_TOKENS = 1024
"""Tokens that a client gets in one turn, unless one input has more."""


@dataclass(slots=True, eq=False)
class EncoderRequest:
    """unfinished: indices of its inputs that have not been answered. arrival: on the clock of `time.monotonic`"""

    name: str
    inputs: EncoderInputs
    params: PoolingParams
    rank: tuple[float, int]
    client: str | None
    arrival: float
    unfinished: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class InputRun:
    """Neighbouring inputs of a request, from `begin` up to but not including `end`. turn, charge: as in `FairQueue`"""

    request: EncoderRequest
    begin: int
    end: int
    turn: int = 0
    charge: int = 0

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def rank(self) -> tuple[float, int]:
        return self.request.rank

    @property
    def num_tokens(self) -> int:
        ends = self.request.inputs.ends
        return int(ends[self.end] - ends[self.begin])

    @property
    def inputs(self) -> EncoderInputs:
        return self.request.inputs.part(self.begin, self.end)

    def num_fitting(self, max_tokens: int, max_inputs: int) -> int:
        """How many of its first inputs fit into these numbers of tokens and inputs."""
        ends = self.request.inputs.ends
        limit = ends[self.begin] + max_tokens
        fitting = int(np.searchsorted(ends, limit, side="right")) - 1 - self.begin
        return max(min(fitting, len(self), max_inputs), 0)


class InputQueue:
    """Owner of the requests of an encoder.

    max_tokens: the most tokens of a batch; may be lowered later
    max_inputs: the most inputs of a batch
    num_waiting: inputs that are in no batch yet
    """

    def __init__(self, max_tokens: int, max_inputs: int) -> None:
        self.max_tokens = max_tokens
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_running = 0
        self._max_inputs = max_inputs
        self._waiting: FairQueue[InputRun] = FairQueue()
        self._requests: dict[str, EncoderRequest] = {}
        self._deadlines: list[tuple[float, int, EncoderRequest]] = []
        self._serial = count()

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def add(
        self,
        name: str,
        inputs: EncoderInputs,
        params: PoolingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
    ) -> None:
        """Queue the inputs of a request. timeout: in seconds

        Raises ParameterError for an id that is in use and for a request without inputs, and QueueFullError.
        """
        if name in self._requests:
            raise ParameterError("request_id", "be unique among unfinished requests", name, "duplicate_request_id")
        if not len(inputs):
            raise ParameterError("input", "hold at least one input", [])
        num_tokens = len(inputs.ids)
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > MAX_WAITING_TOKENS:
            raise QueueFullError(f"the queue is full: {self.num_waiting_tokens} tokens are already waiting. Try again later")
        now = time.monotonic()
        rank = (priority, next(self._serial))
        request = EncoderRequest(name, inputs, params, rank, client, now, set(range(len(inputs))))
        self._requests[name] = request
        run = InputRun(request, 0, len(inputs))
        self._waiting.add(run)
        self._count(run, 1)
        if timeout is not None:
            heappush(self._deadlines, (now + timeout, next(self._serial), request))

    def has_full_batch(self) -> bool:
        """Whether enough waits to fill a batch."""
        return self.num_waiting_tokens >= self.max_tokens or self.num_waiting >= self._max_inputs

    def next_batch(self) -> list[InputRun]:
        """The inputs to compute next; none if none waits. All of them ask for vectors of tokens, or none does."""
        batch: list[InputRun] = []
        room = self.max_tokens
        places = self._max_inputs
        while self._waiting and places:
            first = self._waiting.first()
            if batch and first.request.params.tokens != batch[0].request.params.tokens:
                break
            length = first.num_fitting(min(room, RUN_TOKENS), places)
            if not length and batch and not first.num_fitting(room, places):
                break
            run = self._admit(first, max(length, 1))
            batch.append(run)
            room -= run.num_tokens
            places -= len(run)
        self.num_running += self._max_inputs - places
        return batch

    def finish(self, batch: Sequence[InputRun]) -> list[InputRun]:
        """These inputs have been computed. Returns those whose request has not ended meanwhile."""
        found = []
        for run in batch:
            self.num_running -= len(run)
            self._waiting.settle(run, 0)
            request = run.request
            if run.begin in request.unfinished:
                found.append(run)
                request.unfinished.difference_update(range(run.begin, run.end))
                if not request.unfinished:
                    self._requests.pop(request.name, None)
        return found

    def give_back(self, batch: Sequence[InputRun]) -> None:
        """These inputs have not been computed and wait again."""
        for run in batch:
            self.num_running -= len(run)
            self._waiting.give_back(run)
            self._count(run, 1)
            if not run.request.unfinished:  # it was aborted
                self._remove(run)

    def abort(self, name: str) -> list[int]:
        """End a request. Returns the indices of its inputs that had not been answered; none for an unknown request."""
        request = self._requests.pop(name, None)
        if request is None:
            return []
        indices = sorted(request.unfinished)
        request.unfinished.clear()
        for run in [run for run in self._waiting if run.request is request]:
            self._remove(run)
        return indices

    def expired(self, now: float) -> list[str]:
        """The requests whose time is up, each once."""
        names = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if request.unfinished:
                names.append(request.name)
        if not self._requests:
            self._deadlines.clear()
        return names

    def check_integrity(self) -> None:
        """Assert that the counters agree with the inputs that wait."""
        waiting = list(self._waiting)
        assert self.num_waiting == sum(map(len, waiting))
        assert self.num_waiting_tokens == sum(run.num_tokens for run in waiting)
        assert {run.request.name for run in waiting} <= self._requests.keys()

    def _admit(self, first: InputRun, length: int) -> InputRun:
        """Take `length` inputs of the first run out of the queue. The rest of the run waits for its client's next turn."""
        run = InputRun(first.request, first.begin, first.begin + length)
        run.charge = run.num_tokens
        run.turn = self._waiting.admit(run.charge)
        if length < len(first):
            first.begin = run.end
            self._waiting.add(first)
        self._count(run, -1)
        return run

    def _remove(self, run: InputRun) -> None:
        self._waiting.remove(run)
        self._count(run, -1)

    def _count(self, run: InputRun, sign: int) -> None:
        self.num_waiting += sign * len(run)
        self.num_waiting_tokens += sign * run.num_tokens
