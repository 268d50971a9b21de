"""The answer to one request: its prompts, its sequences, its usage, and its reply, plain or as a stream of chunks.

    answer = CompletionAnswer(body, service, key)
    reply = await answer.whole()                     # or: async for chunk in answer.chunks()

`Answer` runs the sequences and counts tokens. Its two children, CompletionAnswer and ChatAnswer, know what a choice looks
like. Connections are in streaming.py, and the engine's errors in generation.py.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from fa_serve import __version__
from fa_serve.engine import RequestOutput, SamplingParams, StructuredOutput

from .constraints import guided_constraints, single_constraint
from .errors import BadRequest
from .generation import Job, RequestFields, merge, sequences_of_prompt
from .logprobs import for_prompt
from .replies import PromptLogprobs, Usage
from .request_params import AnswerParams, sampling_params
from .schemas import SamplingRequest
from .service import Service


class Answer(ABC):
    """One request.

    kind, chunk_kind: OpenAI's "object" of a plain reply and of a chunk
    prefix:           the beginning of the reply's id
    _prompt_field:    the request's field with the prompt
    """

    kind: str
    chunk_kind: str
    prefix: str
    _prompt_field: str

    def __init__(self, body: SamplingRequest, service: Service, key: str | None):
        service.require_ready()
        service.require_model(body.model)
        self._body = body
        self._service = service
        self._tokenization = service.tokenization
        self._key = key
        self._arrival = time.perf_counter()
        self._n = body.n or 1
        self._constraint = single_constraint(self._constraints())
        self._prompts: list[list[int]] = []
        self._usage: Usage = {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": f"fa_serve-{__version__}",
        }

    async def whole(self) -> Any:
        """The plain reply."""
        sums: dict[int, RequestOutput] = {}
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if index in sums:
                    sums[index].absorb(output)
                else:
                    sums[index] = output
        choices = [self._choice(index, sums[index]) | self._prompt_ids(index) for index in sorted(sums)]
        reply = self._head | {"object": self.kind, "choices": choices, "usage": self._usage}
        return reply if self._body.prompt_logprobs is None else self._with_prompt_logprobs(reply, sums)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as a stream of chunks in JSON, with the usage in a last chunk if the request asks for it.

        The part that all chunks share is serialised once. A chunk holds what one sequence has gained since its last chunk: one
        token if the process keeps up, several tokens if it does not.
        """
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = to_json(self._head | {"object": self.chunk_kind})[:-1]
        begin = head + (b',"usage":null' if with_usage else b"") + b',"choices":['
        begun: set[int] = set()
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if index not in begun:
                    begun.add(index)
                    for choice in self._opening(index, output):
                        yield begin + to_json(choice | self._prompt_ids(choice["index"])) + b"]}"
                choice = self._increment(index, output)
                said = choice.get("text") or choice.get("delta") or output.logprobs
                if said or output.finished or self._body.return_token_ids:
                    yield begin + to_json(choice) + b"]}"  # to_json takes a tenth of the time of Python's json
        if with_usage:
            yield head + b',"choices":[],"usage":' + to_json(self._usage) + b"}"

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all sequences, with the index of their choice. The usage is complete when this ends."""
        num_prompts = self._num_prompts()
        best_of = getattr(self._body, "best_of", None) or 1
        count = num_prompts * max(self._n, best_of)
        asks_for_count = "n" if num_prompts == 1 else self._prompt_field
        with self._service.reserve(count, self._key, asks_for_count):
            self._prompts = await self._encode()
            all_params = [self._params(prompt) for prompt in self._prompts]
            job = self._job()
            sequences = [
                sequences_of_prompt(self._service, job, number, prompt, params)
                for number, (prompt, params) in enumerate(zip(self._prompts, all_params, strict=True))
            ]
            self._usage["prompt_tokens"] = self._usage["total_tokens"] = sum(map(len, self._prompts))
            async with aclosing(merge(sequences)) as outputs:
                async for index, output in outputs:
                    if output.finished:
                        self._count(index, output)
                    yield index, output

    def _job(self) -> Job:
        body = self._body
        fields = RequestFields(
            names=frozenset(type(body).model_fields),
            prompt=self._prompt_field,
            constraint=None if self._constraint is None else self._constraint.field,
            narrows=bool(body.allowed_token_ids or body.logit_bias),
        )
        return Job(self._head["id"], body.priority or 0, self._arrival, self._n, fields, self._key)

    def _count(self, index: int, output: RequestOutput) -> None:
        """Add a finished sequence to the usage. The sequences of a prompt share its cached tokens, which count once."""
        usage = self._usage
        usage["completion_tokens"] += output.num_output_tokens
        usage["total_tokens"] += output.num_output_tokens
        if index % self._n == 0:
            usage["prompt_tokens_details"]["cached_tokens"] += output.num_cached_tokens

    def _params(self, prompt: list[int]) -> SamplingParams:
        limit = self._service.engine.max_model_len
        room = limit - len(prompt)
        wanted = self._max_tokens()
        if not prompt:
            raise BadRequest(f"{self._prompt_field} must hold at least one token.", param=self._prompt_field)
        if room < (wanted or 1):
            answer = f"{wanted} for the answer" if wanted else "room for an answer"
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens; "
                f"you asked for {len(prompt)} in the prompt and {answer}.",
                param=self._prompt_field,
                code="context_length_exceeded",
            )
        params = AnswerParams(
            max_tokens=wanted or self._default_max_tokens(room),
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            structured=self._structured(),
            skip_special_tokens=self._skip_special_tokens(),
        )
        return sampling_params(self._body, params)

    def _constraints(self) -> dict[str, dict[str, Any]]:
        """For each field that can ask for a structured output, what it asks for."""
        return guided_constraints(self._body)

    def _structured(self) -> StructuredOutput | None:
        return None if self._constraint is None else self._constraint.output

    def _skip_special_tokens(self) -> bool | None:
        return self._body.skip_special_tokens

    @abstractmethod
    def _num_prompts(self) -> int:
        """How many prompts the request has. It is asked before anything costly is done with them."""

    @abstractmethod
    async def _encode(self) -> list[list[int]]:
        """The prompts as token ids."""

    @abstractmethod
    def _max_tokens(self) -> int | None: ...

    @abstractmethod
    def _default_max_tokens(self, room: int) -> int: ...

    @abstractmethod
    def _logprobs(self) -> int | None:
        """How many of the most likely tokens to report with each token. None reports no log-probabilities."""

    def _prompt_logprobs(self) -> int | None:
        return self._body.prompt_logprobs

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The choice of a plain reply; `output` is the sum of the sequence's outputs."""

    @abstractmethod
    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices to send before a sequence's first increment, which is `output`."""

    @abstractmethod
    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        """The reply with the prompts' log-probabilities. vLLM has them in each choice of a completion, and once in a chat."""

    @abstractmethod
    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The choice of a chunk."""

    def _common(self, index: int, output: RequestOutput | None = None) -> dict[str, Any]:
        """The fields that all choices have."""
        common: dict[str, Any] = {"index": index, "finish_reason": output and output.finish_reason, "logprobs": None}
        if self._body.return_token_ids:
            common["token_ids"] = output.token_ids if output else []
        return common

    def _prompt_scores(self, output: RequestOutput) -> PromptLogprobs:
        return for_prompt(self._tokenization.token_texts, output.prompt_logprobs or (), self._body.prompt_logprobs or 0)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index // self._n]} if self._body.return_token_ids else {}
