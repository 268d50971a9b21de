"""What comes out of the engine. Plain data, no torch.

`RequestOutput` is one increment of one answer, as `Engine.step` and the streams return it. `Completion` is a whole answer, as
`Engine.generate` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fa_serve.engine.errors import RequestError
from fa_serve.engine.pooling.params import PooledRows
from fa_serve.engine.scheduler.sequence_times import SequenceTimes

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class TokenLogprob:
    """A token with its log-probability (natural logarithm).

    top: (token id, log-probability) of the most likely tokens at this position, the most likely one first
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestOutput:
    """What one answer gained since its last output. `text` never ends inside a character; tokens may run ahead of the text.

    finished:      whether this is the last output of the answer number `index`; other answers to the prompt may go on
    finish_reason: "stop" (an end token, a stop string or the end of a grammar), "length", "abort" or "error"
    error:         what happened if finish_reason is "error", else None
    index:         number of the answer among the `n` answers to the prompt
    logprobs:      one entry for each of token_ids if they were asked for
    prompt_logprobs: one entry for each token of the prompt, None for the first one; in the first output, if asked for
    times:         where its time went in the engine; in the first and in the last output
    stop_string:   the stop string that ended the answer, which the text leaves out; in the last output
    pooled:       what an encoder gives for the input number `index` and, if it has several rows, for the inputs after it
    num_*:         totals so far; num_cached_tokens counts prompt tokens whose keys and values came from the prefix cache
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    index: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    times: SequenceTimes | None = None
    stop_string: str | None = None
    pooled: PooledRows | None = None

    def __reduce__(self) -> tuple[type[RequestOutput], tuple[object, ...]]:
        """Pickle as a call of the constructor.

        All outputs of a step cross the pipe between two processes, and this takes a third of the time of the default.
        """
        return RequestOutput, (
            self.request_id,
            self.prompt_token_ids,
            self.text,
            self.token_ids,
            self.logprobs,
            self.finished,
            self.finish_reason,
            self.error,
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.num_cached_tokens,
            self.index,
            self.prompt_logprobs,
            self.times,
            self.stop_string,
            self.pooled,
        )

    @property
    def answers(self) -> range:
        """The indices of the answers that it is for: an encoder's output may be for several, others are for one."""
        return range(self.index, self.index + (1 if self.pooled is None else len(self.pooled)))

    def absorb(self, later: RequestOutput) -> None:
        """Append a later output of the same answer, so that this output spans both."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.times = later.times or self.times
        self.stop_string = later.stop_string
        self.finished = later.finished
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens


@dataclass(slots=True)
class Completion:
    """A whole answer: the sum of all outputs with one request_id and one index. Fields are those of `RequestOutput`."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    index: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Completion:
        """The completion of one answer. `output` must span all outputs of the answer."""
        assert output.finish_reason is not None
        return cls(
            output.prompt_token_ids,
            output.text,
            output.token_ids,
            output.finish_reason,
            output.logprobs,
            output.error,
            output.num_cached_tokens,
            output.index,
            output.prompt_logprobs,
        )


class JoinedOutputs:
    """The outputs of several requests, those of each answer joined into one."""

    def __init__(self) -> None:
        self._joined: dict[tuple[str, int], RequestOutput] = {}

    def add(self, output: RequestOutput) -> None:
        key = output.request_id, output.index
        if key in self._joined:
            self._joined[key].absorb(output)
        else:
            self._joined[key] = output

    def completion(self, request_id: str, index: int) -> Completion:
        """The answer with this index, which must have finished."""
        return Completion.of(self._joined[request_id, index])
