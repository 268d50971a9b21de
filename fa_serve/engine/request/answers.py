"""What the clients of unfinished requests get: the text of each answer, and the answers to one prompt under one request id.

    answers.add("request-1", params, sequences, matcher)
    outputs = [answers.output(sequence, tokens), ...]        # what a step has given to its sequences
    outputs = answers.merge(outputs)                         # under the ids and indices that the clients know

Left out: the state of a single answer (output_state.py), and when sequences gain tokens (engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fa_serve.engine.request.groups import Groups
from fa_serve.engine.request.output_state import OutputState
from fa_serve.engine.request.outputs import RequestOutput, TokenLogprob
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.stop_strings import StopStrings
from fa_serve.engine.runner.results import CommittedStep, StepResult
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.stats import Counters

Stop = Callable[[SequenceState, int], None]


class Answers:
    """Owner of the answers to unfinished requests.

    tokenizer: if it is None, outputs have no text
    counters:  count the tokens of prompts and answers
    stop:      ends a sequence whose text or grammar is complete, as `Scheduler.stop` does
    """

    def __init__(self, tokenizer: Any, counters: Counters, stop: Stop) -> None:
        self._tokenizer = tokenizer
        self._counters = counters
        self._stop = stop
        self._groups = Groups()
        self._states: dict[str, OutputState] = {}  # the unfinished ones, by the id of their scheduled request

    def __contains__(self, request_id: str) -> bool:
        """Whether an unfinished request has this id, as the client knows it or as it is scheduled."""
        return request_id in self._groups or request_id in self._states

    @property
    def states(self) -> Mapping[str, OutputState]:
        """The answers by the id of their scheduled request."""
        return self._states

    def sequences(self) -> list[SequenceState]:
        """The sequences of all unfinished answers."""
        return [state.sequence for state in self._states.values()]

    def request_ids(self, request_id: str) -> list[str]:
        """The ids of the scheduled requests that the client knows as `request_id`."""
        return self._groups.names(request_id)

    def add(self, request_id: str, params: SamplingParams, sequences: Iterable[SequenceState], matcher: Any) -> None:
        """Add the answers of a request whose sequences have been queued. matcher: of its structured output, or None"""
        stop = StopStrings(params.stop)
        for sequence in sequences:
            self._states[sequence.request.request_id] = OutputState.begin(sequence, self._tokenizer, stop, matcher)
        self._groups.add(request_id, params)

    def begin_step(self, sequences: Iterable[SequenceState], now: float) -> None:
        """The first step of these sequences is about to be launched."""
        for sequence in sequences:
            self._states[sequence.request.request_id].times.begin(now)

    def take(self, committed: CommittedStep, ends: Mapping[str, int]) -> list[RequestOutput]:
        """The outputs of a step. ends: by request id, how many of the new tokens complete a structured output"""
        step, result, gained = committed
        self.add_prompt_logprobs(result)
        outputs = []
        for sequence, tokens in gained.items():
            end = ends.get(sequence.request.request_id, 0) if ends else 0
            outputs.append(self.output(sequence, tokens, result.logprobs.get(sequence), end, step.mask_seconds))
        return outputs

    def add_prompt_logprobs(self, result: StepResult) -> None:
        """Take in the log-probabilities of prompt tokens that a step has computed.

        Skips those that are known already, because a preempted prompt is computed twice, and those of requests that have ended.
        Those of other weights are dropped: the scheduler lets the new weights compute the prompt from its first token on.
        """
        for sequence, start, entries in result.prompt_logprobs:
            state = self._states.get(sequence.request.request_id)
            if state is not None and state.sequence is sequence and state.prompt_logprobs is not None:
                if state.prompt_version != self._counters.weight_version:
                    state.prompt_version = self._counters.weight_version
                    state.prompt_logprobs = [None]
                state.prompt_logprobs += entries[len(state.prompt_logprobs) - start :]

    def output(
        self,
        sequence: SequenceState,
        tokens: Sequence[int] = (),
        logprobs: list[TokenLogprob] | None = None,
        grammar_end: int = 0,
        mask_seconds: float = 0.0,
    ) -> RequestOutput:
        """What an answer gained by these tokens. If there are none, it ends without another token.

        grammar_end: how many of the tokens complete the answer by its grammar; 0 if it goes on
        """
        begin = time.monotonic()
        state = self._states[sequence.request.request_id]
        if tokens and not state.times.num_steps:
            self._counters.note_first_token(sequence)
        text, kept = state.push(tokens, grammar_end)
        if state.complete:
            self._stop(sequence, len(tokens) - len(kept))
        self._counters.num_output_tokens += len(kept)
        if sequence.finished:
            text += state.flush()
            del self._states[sequence.request.request_id]
        state.times.end_step(begin, time.monotonic(), len(tokens), mask_seconds)
        return state.output(text, kept, logprobs)

    def merge(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs with the ids and indices that the clients know."""
        return self._groups.merge(outputs)
