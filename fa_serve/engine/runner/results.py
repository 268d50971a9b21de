"""The results of steps, tokens and log-probabilities, on their way from the device and on the host; and the queue of the steps
that have been launched.

pending = PendingResult(tokens, ...)     # queues the copies and does not wait
result = pending.read()                  # waits for the device
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.request.outputs import TokenLogprob
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import ImageSeconds


class PromptSpan(NamedTuple):
    """Tokens first .. last - 1 of a sequence's prompt, whose log-probabilities are wanted."""

    sequence: SequenceState
    first: int
    last: int


@dataclass(slots=True)
class StepResult:
    """The outcome of one step.

    tokens:   `num_samples` tokens for each chunk, in order
    logprobs: log-probabilities of a sequence's tokens, for the sequences that asked for them
    prompt_logprobs: (sequence, index of the first token, log-probabilities of the prompt's tokens from there on)
    """

    tokens: list[int]
    logprobs: dict[SequenceState, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: list[tuple[SequenceState, int, list[TokenLogprob]]] = field(default_factory=list)


class PendingResult:
    """The outcome of a launched step, on its way to the host.

    tokens:   (n,) int64, on the device
    wanted:   (row of `tokens`, sequence) for each row that wants log-probabilities
    logprobs: `log_probabilities` of these rows, in order; empty if there are none
    spans:    the prompt tokens whose log-probabilities are wanted
    prompt_logprobs: `log_probabilities` of these tokens, in order; empty if there are none
    """

    def __init__(
        self,
        tokens: Tensor,
        wanted: Sequence[tuple[int, SequenceState]] = (),
        logprobs: Sequence[Tensor] = (),
        spans: Sequence[PromptSpan] = (),
        prompt_logprobs: Sequence[Tensor] = (),
    ) -> None:
        self._wanted = wanted
        self._spans = spans
        self._num_logprobs = len(logprobs)
        self._host = [tokens, *logprobs, *prompt_logprobs]
        self._arrived: torch.Event | None = None
        if tokens.is_cuda:
            self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in self._host]
            self._arrived = torch.Event("cuda")
            self._arrived.record()

    def read(self) -> StepResult:
        """Wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *values = (x.tolist() for x in self._host)
        result = StepResult(tokens)
        if self._num_logprobs:
            for (row, sequence), *entry in zip(self._wanted, *values[: self._num_logprobs], strict=True):
                entries = result.logprobs.setdefault(sequence, [])
                entries.append(_entry(tokens[row], sequence.request.params.logprobs, *entry))
        prompt_entries = zip(*values[self._num_logprobs :], strict=True)
        for sequence, first, last in self._spans:
            prompt = sequence.request.prompt
            count = sequence.request.params.prompt_logprobs
            logprobs = [_entry(prompt[index], count, *next(prompt_entries)) for index in range(first, last)]
            result.prompt_logprobs.append((sequence, first, logprobs))
        return result


class LaunchedStep(NamedTuple):
    """A step in flight.

    begin: when it was scheduled, on time.monotonic's clock
    structured: whether a sequence of it has a structured output; mask_seconds: how long computing the masks took
    watch: measures how long encoding its images takes; None if it encodes none
    beside: stopwatches of the images that the device begins to encode while it computes this step
    """

    batch: ScheduledBatch
    pending: PendingResult
    begin: float
    structured: bool
    mask_seconds: float
    watch: Stopwatch | None
    beside: list[Stopwatch]


class CommittedStep(NamedTuple):
    """A step whose tokens the scheduler has taken in.

    gained: the tokens that sequences have gained, as `Scheduler.commit` returns them
    """

    step: LaunchedStep
    result: StepResult
    gained: dict[SequenceState, Sequence[int]]


class StepQueue:
    """Owner of the steps between their launch and their outputs, the oldest first.

    depth:     how many steps may be in flight while the host prepares the next one; 0 if the host waits for each step
    launched:  steps in flight
    committed: steps whose tokens are known but have not become outputs yet
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.launched: deque[LaunchedStep] = deque()
        self.committed: deque[CommittedStep] = deque()
        self._last_read = 0.0  # when the newest result was read, on time.monotonic's clock

    @property
    def is_full(self) -> bool:
        """Whether the result of the oldest step in flight must be read now."""
        return len(self.launched) > self.depth

    def add(self, step: LaunchedStep) -> None:
        """Add a launched step. The device encodes the step's images while it computes the oldest step in flight."""
        self.launched.append(step)
        if step.watch is not None:
            self.launched[0].beside.append(step.watch)

    def seconds(self, step: LaunchedStep) -> tuple[float, ImageSeconds]:
        """How long a step whose result has just been read has delayed others. Steps run one after the other."""
        before = max(step.begin, self._last_read)
        self._last_read = time.monotonic()
        own = 0.0 if step.watch is None else step.watch.seconds()
        return self._last_read - before, ImageSeconds(own, sum(watch.seconds() for watch in step.beside))


def _entry(token: int, count: int | None, chosen: float, values: list[float], ids: list[int]) -> TokenLogprob:
    """count: how many of the most likely tokens this row asked for; `values` holds more if another row asked for more"""
    return TokenLogprob(token, chosen, list(zip(ids, values, strict=True))[:count])
