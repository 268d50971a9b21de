"""The answer to one request: its prompts, its sequences, its usage, and its reply, plain or as a stream of chunks.

    answer = CompletionAnswer(body, service, key)
    reply = await answer.whole()                     # or: async for chunk in answer.chunks()

`Answer` runs the sequences and counts tokens. Its subclasses CompletionAnswer and ChatAnswer know what a choice looks like.
streaming.py handles the connections, and generation.py turns the engine's errors into HTTP errors.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from fa_serve import __version__
from fa_serve.engine import RequestOutput, SamplingParams, StructuredOutput
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.spec import ParameterError

from ..errors import ApiError, BadRequest, parameter_refused
from ..observe.timelines import Timeline
from ..replies import PromptLogprobs, Usage
from ..schemas import SamplingRequest
from ..service import Service
from .beam_search import beams_of_prompt
from .constraints import guided_constraints, single_constraint
from .generation import Job, RequestFields, merge, sequences_of_prompt
from .logprobs import for_prompt
from .params import AnswerParams, sampling_params
from .size import SMALL, SMALL_TEXT, TEXT, AnswerSize, json_slices, written_in_steps

MAX_BEAM_TOKENS = 1024
"""The most tokens of an answer with beam search, whose steps cost the server more than those of other requests."""
MAX_BEAM_PROMPTS = 32768
"""The most prompt tokens that a step of a beam search sends to the engine. Each beam sends the whole prompt."""
# the fields that make an answer larger than its text
SIZE_FIELDS = ("n", "best_of", "prompt_logprobs", "logprobs", "top_logprobs", "echo", "return_token_ids", "max_tokens")


class Answer(ABC):
    """The answer to one request.

    kind, chunk_kind: OpenAI's "object" of a plain reply and of a chunk
    prefix:           the beginning of the reply's id
    event_begin:      the bytes before each chunk in a stream of server-sent events
    stream_end:       the bytes after the last event
    timeline:         records where the request's time goes; None unless --log-slow or traces are on
    _prompt_field:    the request's field with the prompt
    _clips:           whether a `max_tokens` that does not fit after the prompt is lowered instead of refused
    """

    kind: str
    chunk_kind: str
    prefix: str
    event_begin = b"data: "
    stream_end = b"data: [DONE]\n\n"
    _clips = False
    _prompt_field: str

    def __init__(self, body: SamplingRequest, service: Service, key: str | None):
        service.require_ready()
        service.require_model(body.model)
        self._body = body
        self._service = service
        self._tokenization = service.tokenization
        self._key = key
        self._arrival = time.perf_counter()
        self.timeline: Timeline | None = None
        self._n = body.n or 1
        self._constraint = single_constraint(self._constraints())
        self._prompts: list[list[int]] = []
        self._images: Sequence[ImageInput] = ()
        self._size_estimate = 0  # bytes; known once the prompts are known
        self._usage: Usage = {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}{os.urandom(16).hex()}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"fa_serve-{__version__}",
        }

    async def whole(self) -> bytes:
        """The plain reply as JSON. A thread makes a large reply in small steps, so that it does not hold up the event loop."""
        sums: dict[int, RequestOutput] = {}
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if index in sums:
                    sums[index].absorb(output)
                else:
                    sums[index] = output
        text = sum(len(output.text) for output in sums.values())  # a token may have more than TEXT characters
        if self._size_estimate <= SMALL and text <= SMALL_TEXT:
            return to_json(self._reply(sums))
        with self._service.hold_bytes(self._size_estimate):
            return await self._service.write(lambda: written_in_steps(self._reply(sums)), self._key)

    def _reply(self, sums: dict[int, RequestOutput]) -> dict[str, Any]:
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
        always = options is not None and with_usage and bool(options.continuous_usage_stats)
        head = to_json(self._head | {"object": self.chunk_kind})[:-1]
        begin = head + (b',"usage":null' if with_usage and not always else b"") + b',"choices":['
        begun: set[int] = set()
        num_output_tokens: dict[int, int] = {}  # by index, so far
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if index not in begun:
                    begun.add(index)
                    for opening in await self._opening_in_json(index, output):
                        yield begin + opening + (b"]" + self._usage_so_far(num_output_tokens) if always else b"]") + b"}"
                num_output_tokens[index] = output.num_output_tokens
                choice = self._increment(index, output)
                said = choice.get("text") or choice.get("delta") or output.logprobs
                if said or output.finished or self._body.return_token_ids:
                    end = b"]" + self._usage_so_far(num_output_tokens) + b"}" if always else b"]}"
                    yield begin + to_json(choice) + end  # to_json takes a tenth of the time of Python's json
        if with_usage:
            yield head + b',"choices":[],"usage":' + to_json(self._usage) + b"}"

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return to_json(error.openai_body())

    def _usage_so_far(self, num_output_tokens: dict[int, int]) -> bytes:
        """The usage of all sequences together, as a field of a chunk. The numbers of a running stream only grow."""
        prompt = self._usage["prompt_tokens"]
        generated = sum(num_output_tokens.values())
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return b',"usage":' + to_json(usage | {"prompt_tokens_details": self._usage["prompt_tokens_details"]})

    async def _opening_in_json(self, index: int, output: RequestOutput) -> list[bytes]:
        def opening() -> list[bytes]:
            choices = [choice | self._prompt_ids(choice["index"]) for choice in self._opening(index, output)]
            return [b"".join(json_slices(choice)) for choice in choices]

        return opening() if self._size_estimate <= SMALL else await self._service.write(opening, self._key)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all sequences, with the index of their choice. The usage is complete when this ends."""
        num_prompts = self._num_prompts()
        best_of = vars(self._body).get("best_of") or 1
        count = num_prompts * max(self._n, best_of)
        asks_for_count = "n" if num_prompts == 1 else self._prompt_field
        with self._service.reserve(count, self._key, asks_for_count):
            self._prompts = [self._truncated(prompt) for prompt in await self._encode()]
            all_params = self._all_params()
            all_params = self._within_size(all_params, count // num_prompts)
            await self._prepare()
            num_tokens = sum(params.max_tokens or 0 for params in all_params) * (count // num_prompts)
            job = self._job()
            sequences = [
                self._sequences(job, number, prompt, params)
                for number, (prompt, params) in enumerate(zip(self._prompts, all_params, strict=True))
            ]
            self._usage["prompt_tokens"] = self._usage["total_tokens"] = sum(map(len, self._prompts))
            with self._service.reserve_bytes(self._size_estimate - TEXT * num_tokens):
                async with aclosing(merge(sequences)) as outputs:
                    async for index, output in outputs:
                        if output.finished:
                            self._count(index, output)
                        yield index, output
            if self.timeline is not None:
                self.timeline.complete = True

    def _sequences(
        self, job: Job, number: int, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of the sequences of one prompt."""
        if not self._body.use_beam_search:
            return sequences_of_prompt(self._service, job, number, prompt, params)
        penalty = self._body.length_penalty
        return beams_of_prompt(self._service, job, number, prompt, params, 1.0 if penalty is None else penalty)

    def _truncated(self, prompt: list[int]) -> list[int]:
        """The part of a prompt that `truncate_prompt_tokens` keeps."""
        kept = self._body.truncate_prompt_tokens
        if kept is None:
            return prompt
        if kept < 0:
            kept = max(self._service.engine.max_model_len - (self._max_tokens() or 1), 1)
        return prompt[:kept] if self._body.truncation_side == "right" else prompt[-kept:]

    def _within_size(self, all_params: list[SamplingParams], sequences_per_prompt: int) -> list[SamplingParams]:
        """Estimate the answer's size. Raises BadRequest above the limit.

        If the request has no `max_tokens`, its default is lowered until the answer stays below the limit. A stream sends each
        token as it is generated, so only the part of its answer that depends on the prompts counts.
        """
        size = self._size()
        limit = self._service.settings.max_answer_bytes
        prompts = sum(size.of_prompts(len(prompt), sequences_per_prompt) for prompt in self._prompts)
        generated = 0
        if not self._body.stream:
            per_token = size.of_sequences(1) * sequences_per_prompt
            generated = per_token * sum(params.max_tokens or 0 for params in all_params)
            if prompts + generated > limit and self._max_tokens() is None:
                room = (limit - prompts) // (per_token * len(all_params))
                limits = [max(min(params.max_tokens or 1, room), 1) for params in all_params]
                all_params = _each_limited(all_params[0], limits)
                generated = per_token * sum(params.max_tokens or 0 for params in all_params)
        self._estimate(prompts + generated)
        return all_params

    def _estimate(self, size: int) -> None:
        """Record that the answer will have about `size` bytes. Raises BadRequest above the limit."""
        self._size_estimate = size
        if size <= self._service.settings.max_answer_bytes:
            return
        fields = [name for name in SIZE_FIELDS if getattr(self._body, name, None)]
        cause = next((name for name in fields if "logprobs" in name), fields[0] if fields else self._prompt_field)
        self._service.require_size(size, cause, [self._prompt_field, *fields])

    def _size(self) -> AnswerSize:
        """The bytes per token of the fields that all answers have. Subclasses add the fields that they write themselves."""
        ids = TEXT if self._body.return_token_ids else 0
        return AnswerSize(per_prompt_token=ids, once=0, per_token=ids)

    def _job(self) -> Job:
        body = self._body
        fields = RequestFields(
            names=body.KNOWN,
            prompt=self._prompt_field,
            constraint=None if self._constraint is None else self._constraint.field,
            narrows=bool(body.allowed_token_ids or body.logit_bias),
        )
        isolation = self._service.isolation
        return Job(
            name=self._head["id"],
            priority=body.priority or 0,
            arrival=self._arrival,
            n=self._n,
            fields=fields,
            client=isolation.client(self._key),
            cache_salt=isolation.cache_salt(self._key, body.cache_salt),
            adapter=None if body.model == self._service.model_name else body.model,
            timeline=self.timeline,
            images=self._images,
        )

    def _count(self, index: int, output: RequestOutput) -> None:
        """Add a finished sequence to the usage. The sequences of a prompt share its cached tokens, which count once."""
        usage = self._usage
        usage["completion_tokens"] += output.num_output_tokens
        usage["total_tokens"] += output.num_output_tokens
        if index % self._n == 0:
            usage["prompt_tokens_details"]["cached_tokens"] += output.num_cached_tokens

    def _all_params(self) -> list[SamplingParams]:
        """The parameters of each prompt. Only their `max_tokens` differ, so everything else is made and validated once."""
        limits = [self._token_limit(prompt) for prompt in self._prompts]
        params = AnswerParams(
            max_tokens=min(limits),
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            structured=self._structured(),
            skip_special_tokens=self._skip_special_tokens(),
            stop_token_ids=self._stop_token_ids(),
        )
        return _each_limited(sampling_params(self._body, params, self._service.engine.default_params), limits)

    def _token_limit(self, prompt: list[int]) -> int:
        """The tokens that an answer to this prompt may have. Raises BadRequest if the prompt leaves no room for them."""
        limit = self._service.engine.max_model_len
        room = limit - len(prompt)
        wanted = self._max_tokens()
        if self._clips and wanted is not None:
            wanted = max(min(wanted, room), 1)
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
        if self._body.use_beam_search:
            self._check_beams(len(prompt), wanted)
            room = min(room, MAX_BEAM_TOKENS)
        default = self._service.engine.default_params
        return wanted or min(self._default_max_tokens(room), default.max_tokens or room)

    def _check_beams(self, num_tokens: int, max_tokens: int | None) -> None:
        """Raise BadRequest for what a beam search does not allow. Each step of the search sends the whole prompt for each beam.

        num_tokens: the length of the prompt
        """
        if self._constraint is not None:
            field = self._constraint.field
            raise BadRequest(f"{field} is not allowed with use_beam_search.", param=field, code="invalid_value")
        if not self._service.engine.config.prefix_caching:
            message = "use_beam_search is not available: beam search needs a prefix cache, and this server has none."
            raise BadRequest(message, param="use_beam_search", code="invalid_value")
        if max_tokens is not None and max_tokens > MAX_BEAM_TOKENS:
            message = f"With use_beam_search, an answer may have at most {MAX_BEAM_TOKENS} tokens, got {max_tokens}."
            raise BadRequest(message, param="max_tokens", code="invalid_value")
        if self._n * num_tokens > MAX_BEAM_PROMPTS:
            message = (
                f"With use_beam_search, n times the number of prompt tokens must be at most {MAX_BEAM_PROMPTS}, "
                f"got {self._n} times {num_tokens}."
            )
            raise BadRequest(message, param=self._prompt_field, code="invalid_value")

    def _constraints(self) -> dict[str, dict[str, Any]]:
        """For each field that can ask for a structured output, what it asks for."""
        return guided_constraints(self._body)

    def _structured(self) -> StructuredOutput | None:
        return None if self._constraint is None else self._constraint.output

    def _skip_special_tokens(self) -> bool | None:
        return self._body.skip_special_tokens

    def _stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._body.stop_token_ids or ())

    @abstractmethod
    def _num_prompts(self) -> int:
        """The number of prompts of the request. Called before any costly work on the prompts."""

    @abstractmethod
    async def _encode(self) -> list[list[int]]:
        """The prompts as token ids."""

    async def _prepare(self) -> None:  # noqa: B027, only completions have such work
        """Work before the first output, once the request is known to be within its limits."""

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
        """Add the prompts' log-probabilities, where vLLM has them: in each choice of a completion, and once in a chat."""

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


def _each_limited(params: SamplingParams, limits: list[int]) -> list[SamplingParams]:
    """Copies of the parameters, one for each of these `max_tokens`. Raises BadRequest if a limit is below min_tokens."""
    try:
        return [params.with_numbers(max_tokens=limit) for limit in limits]
    except ParameterError as error:
        raise parameter_refused(error, error.field) from None
