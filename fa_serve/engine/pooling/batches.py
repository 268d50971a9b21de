"""Which inputs of an encoder are computed together: up to a number of tokens, and clients take turns. Plain Python, no torch.

    queue = InputQueue(max_tokens=8192, max_inputs=256)
    queue.add("request-1", inputs, params, client="key")
    batch = queue.next_batch()               # inputs, also of several requests
    queue.finish(batch)

A batch is taken as soon as the device is free, so that inputs that come during a step are the next batch, and none waits for
others to come. An input that is longer than `max_tokens` is a batch alone. The inputs of a request are queued one by one, so a
client with one request of a thousand inputs and a client with a thousand requests get the same share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from fa_serve.engine.errors import QueueFullError
from fa_serve.engine.pooling.inputs import EncoderInput
from fa_serve.engine.pooling.params import PoolingParams
from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.spec import ParameterError

MAX_WAITING_TOKENS = 1 << 22
"""Tokens of inputs that wait. Beyond that, a request is refused unless nothing waits."""


@dataclass(slots=True, eq=False)
class EncoderRequest:
    """unfinished: indices of its inputs that have not been answered. arrival: on the clock of `time.monotonic`"""

    name: str
    params: PoolingParams
    rank: tuple[float, int]
    client: str | None
    arrival: float
    unfinished: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class QueuedInput:
    """An input of a request. turn, charge: as in `FairQueue`"""

    request: EncoderRequest
    index: int
    input: EncoderInput
    turn: int = 0
    charge: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        return self.request.rank

    @property
    def num_tokens(self) -> int:
        return len(self.input.ids)


class InputQueue:
    """Owner of the requests of an encoder.

    max_tokens: of a batch; may be lowered later
    max_inputs: of a batch
    """

    def __init__(self, max_tokens: int, max_inputs: int) -> None:
        self.max_tokens = max_tokens
        self.num_waiting_tokens = 0
        self.num_running = 0
        self._max_inputs = max_inputs
        self._waiting: FairQueue[QueuedInput] = FairQueue()
        self._requests: dict[str, EncoderRequest] = {}
        self._deadlines: list[tuple[float, int, EncoderRequest]] = []
        self._serial = count()

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    @property
    def num_waiting(self) -> int:
        """Inputs that are in no batch yet."""
        return len(self._waiting)

    def add(
        self,
        name: str,
        inputs: Sequence[EncoderInput],
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
        if not inputs:
            raise ParameterError("input", "hold at least one input", list(inputs))
        num_tokens = sum(len(each.ids) for each in inputs)
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > MAX_WAITING_TOKENS:
            raise QueueFullError(f"the queue is full: {self.num_waiting_tokens} tokens wait already. Try again later")
        now = time.monotonic()
        request = EncoderRequest(name, params, (priority, next(self._serial)), client, now, set(range(len(inputs))))
        self._requests[name] = request
        for index, each in enumerate(inputs):
            self._waiting.add(QueuedInput(request, index, each))
        self.num_waiting_tokens += num_tokens
        if timeout is not None:
            heappush(self._deadlines, (now + timeout, next(self._serial), request))

    def next_batch(self) -> list[QueuedInput]:
        """The inputs to compute next; none if none waits. All of them ask for vectors of tokens, or none does."""
        batch: list[QueuedInput] = []
        num_tokens = 0
        while self._waiting and len(batch) < self._max_inputs:
            first = self._waiting.first()
            too_long = num_tokens + first.num_tokens > self.max_tokens
            if batch and (too_long or first.request.params.tokens != batch[0].request.params.tokens):
                break
            num_tokens += first.num_tokens
            first.charge = first.num_tokens
            first.turn = self._waiting.admit(first.charge)
            batch.append(first)
        self.num_waiting_tokens -= num_tokens
        self.num_running += len(batch)
        return batch

    def finish(self, batch: Sequence[QueuedInput]) -> list[QueuedInput]:
        """These inputs have been computed. Returns those whose request has not ended meanwhile."""
        found = []
        self.num_running -= len(batch)
        for each in batch:
            self._waiting.settle(each, 0)
            request = each.request
            if each.index in request.unfinished:
                found.append(each)
                request.unfinished.discard(each.index)
                if not request.unfinished:
                    self._requests.pop(request.name, None)
        return found

    def give_back(self, batch: Sequence[QueuedInput]) -> None:
        """These inputs have not been computed and wait again."""
        self.num_running -= len(batch)
        for each in batch:
            self._waiting.give_back(each)
            self.num_waiting_tokens += each.num_tokens
            if not each.request.unfinished:  # it was aborted
                self._remove(each)

    def abort(self, name: str) -> list[int]:
        """End a request. Returns the indices of its inputs that had not been answered; none of an unknown request."""
        request = self._requests.pop(name, None)
        if request is None:
            return []
        indices = sorted(request.unfinished)
        request.unfinished.clear()
        for each in [each for each in self._waiting if each.request is request]:
            self._remove(each)
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
        """Assert that the counters are those of the inputs that wait."""
        waiting = list(self._waiting)
        assert self.num_waiting_tokens == sum(each.num_tokens for each in waiting)
        assert {each.request.name for each in waiting} <= self._requests.keys()

    def _remove(self, each: QueuedInput) -> None:
        self._waiting.remove(each)
        self.num_waiting_tokens -= each.num_tokens
