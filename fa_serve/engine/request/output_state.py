"""The client's half of a request: what the client gets from one sequence. Text, log-probabilities, grammar, times.

    state = OutputState.begin(sequence, tokenizer, stop, matcher)
    num_complete = state.follow(tokens)      # with a grammar
    text, kept = state.push(tokens, num_complete)
    output = state.output(text, kept, logprobs)

The scheduler's half, tokens and pages, is `SequenceState`, which this class only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fa_serve.engine.request.detokenizer import TextStream
from fa_serve.engine.request.outputs import RequestOutput, TokenLogprob
from fa_serve.engine.request.stop_strings import StopStrings
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.sequence_times import SequenceTimes


@dataclass(slots=True, eq=False)
class OutputState:
    """What one sequence has given so far, as the client sees it.

    stream:  its text; None without a tokenizer, and for a request that asks for no text
    matcher: the state of its structured output; None if it has none
    times:   where its time went
    complete: whether a stop string or its grammar has ended it
    prompt_logprobs: those that are known so far; None if they were not asked for
    prompt_version: version of the weights that have computed them
    """

    sequence: SequenceState
    stream: TextStream | None = None
    matcher: Any = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_version: int = 0
    complete: bool = False
    times: SequenceTimes = field(init=False)

    @classmethod
    def begin(cls, sequence: SequenceState, tokenizer: Any, stop: StopStrings, matcher: Any) -> OutputState:
        """The state of a new sequence.

        stop, matcher: those of its request. The answers to a request share the stop strings, and each has a copy of the matcher
        """
        stream = None
        request = sequence.request
        if tokenizer is not None and request.params.detokenize:
            stream = TextStream(tokenizer.backend_tokenizer, request.prompt, stop, request.params.skip_special_tokens)
        return cls(sequence, stream, None if matcher is None else matcher.deep_copy())

    def __post_init__(self) -> None:
        self.times = SequenceTimes(self.sequence.request.arrival)
        if self.sequence.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # no token comes before the first one

    def follow(self, tokens: Sequence[int]) -> int:
        """Let the matcher take in new tokens. Returns how many of them complete the answer by its grammar; 0 if it goes on."""
        for number, token in enumerate(tokens, 1):
            if token not in self.sequence.request.end_ids:
                self.matcher.consume_token(token)
                if self.matcher.is_stopped():
                    return number
        return 0

    def push(self, tokens: Sequence[int], grammar_end: int = 0) -> tuple[str, Sequence[int]]:
        """The text that the sequence's last tokens settle, and those of them that belong to the answer.

        grammar_end: how many of them complete the answer by its grammar, as `follow` returns it
        """
        text = ""
        stream = self.stream
        end_ids = self.sequence.request.end_ids
        min_tokens = self.sequence.request.params.min_tokens
        num_held = min_tokens - (self.sequence.num_output_tokens - len(tokens)) if min_tokens else 0
        for number, token in enumerate(tokens, 1):
            if token in end_ids:
                continue
            if stream is not None:
                text += stream.push(token, number > num_held)
                self.complete = stream.stop_string is not None
            if number == grammar_end:
                self.complete = True
            if self.complete:
                return text, tokens[:number]
        return text, tokens

    def flush(self) -> str:
        """The text that was held back because a stop string might have begun. The answer has ended."""
        return "" if self.stream is None else self.stream.flush()

    def output(self, text: str, tokens: Sequence[int], logprobs: list[TokenLogprob] | None) -> RequestOutput:
        """The next increment: the text and the tokens that the answer has gained.

        logprobs: None if they were not asked for, else one for each token; those of dropped later tokens are left out
        """
        sequence = self.sequence
        request = sequence.request
        num_output_tokens = sequence.num_output_tokens
        first = tokens and num_output_tokens == len(tokens)
        finished = sequence.finished
        return RequestOutput(  # by position, because keyword arguments cost 0.7 us for each sequence and step
            request.request_id,
            request.prompt,
            text,
            list(tokens),
            logprobs[: len(tokens)] if logprobs and tokens else None,
            finished,
            sequence.finish_reason,
            sequence.error,
            sequence.num_prompt_tokens,
            num_output_tokens,
            sequence.num_cached_tokens,
            0,
            self.prompt_logprobs if first else None,
            copy(self.times) if first or finished else None,
            self.stream.stop_string if finished and self.stream is not None else None,
        )
