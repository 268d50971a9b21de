"""One request's answer: its sequences, from admission to usage, and how OpenAI writes them down.

    answer = CompletionAnswer(body, service, key)
    reply = await answer.whole()                     # or: async for chunk in answer.chunks()

A request is `n` sequences for each of its prompts; choice `index` is sequence `index % n` of prompt `index // n`. `Answer` runs
them and counts; its two children know only how one increment looks. Left out: connections (streaming.py), chats (messages.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from fa_serve import FaServeError, __version__
from fa_serve.engine import QueueFullError, RequestOutput, SamplingParams, StructuredOutput, TokenLogprob

from .errors import UNFORESEEN, BadRequest, EngineFailed, TooManyRequests, Unavailable
from .logprobs import for_completion, for_prompt
from .metrics import Watch
from .replies import CompletionLogprobs, PromptLogprobs, Usage
from .sampling import constraint, sampling_params
from .schemas import CompletionRequest, SamplingRequest
from .service import Service
from .streaming import merge

log = logging.getLogger("fa_serve.server")

COMPLETION_TOKENS = 16  # what OpenAI's /v1/completions generates when max_tokens is absent; a chat goes on to the end


class Answer(ABC):
    kind: str
    chunk_kind: str
    prefix: str
    _prompt_field: str

    def __init__(self, body: SamplingRequest, service: Service, key: str | None):
        service.require_ready()
        service.require_model(body.model)
        self._body = body
        self._service = service
        self._key = key
        self._arrival = time.perf_counter()
        self._n = body.n or 1
        self._constraint = constraint(body)
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
        """The reply as a stream of chunks, with the usage in a last one if it was asked for.

        What all chunks share is written once. A chunk holds what a sequence has gained since its last one: one token when the
        process keeps up, several when it does not.
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
                    yield begin + to_json(choice) + b"]}"  # a tenth of the time of Python's own json
        if with_usage:
            yield head + b',"choices":[],"usage":' + to_json(self._usage) + b"}"

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Admission, tokens, generation. The usage is complete when this ends."""
        service = self._service
        usage = self._usage
        each = max(self._n, getattr(self._body, "best_of", None) or 1)
        count = self._count()
        with service.admit(count * each, self._key, "n" if count == 1 else self._prompt_field):
            self._prompts = await self._encode()
            every = [(prompt, self._params(prompt)) for prompt in self._prompts]
            sequences = [self._sequences(*one, number) for number, one in enumerate(every)]
            usage["prompt_tokens"] = usage["total_tokens"] = sum(map(len, self._prompts))
            async with aclosing(merge(sequences)) as outputs:
                async for index, output in outputs:
                    if output.finish_reason == "error":
                        # an engine's reason may hold internals: it belongs in the log
                        log.error("%s failed: %s", self._head["id"], output.error)
                        if reason := service.unready():
                            raise Unavailable(f"The request was cut off: {reason}.", retry_after=5)
                        narrowed = self._body.allowed_token_ids or self._body.logit_bias
                        if narrowed and self._constraint is not None and "leave no token" in str(output.error):
                            raise BadRequest("The other parameters leave no token for it.", param=self._constraint.field)
                        raise EngineFailed(UNFORESEEN)
                    if output.finish_reason == "abort":
                        raise Unavailable("The request was aborted: the server is shutting down.", retry_after=5)
                    if output.finished:
                        usage["completion_tokens"] += output.num_output_tokens
                        usage["total_tokens"] += output.num_output_tokens
                        if index % self._n == 0:
                            usage["prompt_tokens_details"]["cached_tokens"] += output.num_cached_tokens
                    yield index, output

    async def _sequences(
        self, prompt: list[int], params: SamplingParams, number: int
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What `n` answers to one prompt gain, by index. The prompt's log-probabilities, if wanted, come with all and first."""
        metrics = self._service.metrics
        priority = self._body.priority or 0
        name = f"{self._head['id']}-{number}"
        watches = {index: Watch(metrics, self._service.model_name, self._arrival) for index in range(self._n)}
        scores: list[TokenLogprob | None] | None = None
        early: list[RequestOutput] = []
        cause = "error"
        try:
            async with aclosing(self._service.engine.generate(prompt, params, name, priority=priority)) as outputs:
                async for output in outputs:
                    watches[output.index].saw(output)
                    if output.finished:
                        del watches[output.index]
                    early.append(output)
                    scores = scores or output.prompt_logprobs
                    if scores is None and params.prompt_logprobs is not None and output.finish_reason != "error":
                        continue
                    for output in early:
                        output.prompt_logprobs = scores
                        yield number * self._n + output.index, output
                    early = []
        except (GeneratorExit, asyncio.CancelledError):
            cause = "abort"
            raise
        except ValueError as error:  # the engine knows the vocabulary; it names what is wrong first
            cause = "refused"
            name = str(error).partition(" ")[0]
            param = self._prompt_field
            if self._constraint is not None and (name == "structured" or hasattr(StructuredOutput, name)):
                param = "tools" if self._constraint.field == "tool_choice" else self._constraint.field
            elif name in type(self._body).model_fields:
                param = name
            raise BadRequest(f"{error}.", param=param, code="invalid_value") from None
        except QueueFullError as error:
            cause = "refused"
            raise TooManyRequests(f"{error}.", retry_after=1) from None
        except FaServeError as error:
            raise Unavailable(f"{error}.", retry_after=5) from None
        finally:
            for watch in watches.values():
                watch.ended(cause)

    def _params(self, prompt: list[int]) -> SamplingParams:
        body = self._body
        room = self._service.engine.max_model_len - len(prompt)
        wanted = self._max_tokens()
        if not prompt:
            raise BadRequest(f"{self._prompt_field} must hold at least one token.", param=self._prompt_field)
        if room < (wanted or 1):
            answer = f"{wanted} for the answer" if wanted else "room for an answer"
            raise BadRequest(
                f"This model's maximum context length is {room + len(prompt)} tokens; "
                f"you asked for {len(prompt)} in the prompt and {answer}.",
                param=self._prompt_field,
                code="context_length_exceeded",
            )
        return sampling_params(
            body,
            max_tokens=wanted or self._default_max_tokens(room),
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            structured=self._structured(),
            skip_special_tokens=self._skip_special_tokens(),
        )

    def _structured(self) -> StructuredOutput | None:
        return None if self._constraint is None else self._constraint.output

    def _skip_special_tokens(self) -> bool | None:
        return self._body.skip_special_tokens

    @abstractmethod
    def _count(self) -> int:
        """How many prompts there are, before anything costly is done with them."""

    @abstractmethod
    async def _encode(self) -> list[list[int]]: ...

    @abstractmethod
    def _max_tokens(self) -> int | None: ...

    @abstractmethod
    def _default_max_tokens(self, room: int) -> int: ...

    @abstractmethod
    def _logprobs(self) -> int | None:
        """How many most likely tokens to report with each token; None reports nothing."""

    def _prompt_logprobs(self) -> int | None:
        return self._body.prompt_logprobs

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Choices to send before a sequence's first increment, which is `output`."""

    @abstractmethod
    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        """vLLM has them in each choice of a completion, and once in a chat's reply."""

    @abstractmethod
    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]: ...

    def _common(self, index: int, output: RequestOutput | None = None) -> dict[str, Any]:
        common = {"index": index, "finish_reason": output and output.finish_reason, "logprobs": None}
        return common | {"token_ids": output.token_ids if output else []} if self._body.return_token_ids else common

    def _prompt_scores(self, output: RequestOutput) -> PromptLogprobs:
        return for_prompt(self._service.token_texts, output.prompt_logprobs or (), self._body.prompt_logprobs or 0)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index // self._n]} if self._body.return_token_ids else {}


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _prompt_field = "prompt"
    _body: CompletionRequest

    def _count(self) -> int:
        if not (count := len(self._body.prompts())):
            raise BadRequest("prompt must hold at least one prompt.", param="prompt")
        return count

    async def _encode(self) -> list[list[int]]:
        self._offsets: dict[int, int] = {}
        prompts = self._body.prompts()
        encoded = await self._service.encode(prompts)
        if self._body.echo:
            decode = self._service.decode
            self._echo = [p if isinstance(p, str) else await decode(p) for p in prompts]
        return encoded

    def _max_tokens(self) -> int | None:
        return self._body.max_tokens

    def _default_max_tokens(self, room: int) -> int:
        return min(COMPLETION_TOKENS, room)

    def _prompt_logprobs(self) -> int | None:
        """For the echo, for the field of that name, or for both."""
        wanted = (self._body.logprobs if self._body.echo else None, self._body.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)

    def _logprobs(self) -> int | None:
        return self._body.logprobs

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        [*opening] = self._opening(index, output) if self._body.echo else []
        choice = self._increment(index, output)
        return choice | {"text": self._before(index) + output.text, "logprobs": _joined(*opening, choice)}

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        if not (self._body.echo or self._body.return_token_ids):
            return []
        logprobs = self._scores(index, output.prompt_token_ids, output.prompt_logprobs) if self._body.echo else None
        return [self._common(index) | {"text": self._before(index), "logprobs": logprobs}]

    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._scores(index, output.token_ids, output.logprobs)
        return self._common(index, output) | {"text": output.text, "logprobs": logprobs}

    def _scores(
        self, index: int, token_ids: list[int], entries: Sequence[TokenLogprob | None] | None
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not entries:
            return None
        texts = self._service.token_texts
        offset = self._offsets.get(index, 0)
        logprobs, self._offsets[index] = for_completion(texts, token_ids, entries, offset, self._body.logprobs)
        return logprobs

    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice["prompt_logprobs"] = self._prompt_scores(sums[choice["index"]])
        return reply

    def _before(self, index: int) -> str:
        return self._echo[index // self._n] if self._body.echo else ""


def _joined(*choices: dict[str, Any]) -> dict[str, Any] | None:
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else None
