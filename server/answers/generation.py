"""The sequences of one request, from the engine: their outputs by index, their metrics, and their failures as HTTP errors.

    job = Job(name="cmpl-1", priority=0, arrival=time.perf_counter(), n=2, fields=fields, client=None, cache_salt=None)
    first = sequences_of_prompt(service, job, 0, first_prompt, params)
    second = sequences_of_prompt(service, job, 1, second_prompt, params)
    async for index, output in merge([first, second]): ...

A request has `n` sequences for each of its prompts: sequence `index` is number `index % n` of prompt `index // n`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

from fa_serve.engine import (
    EngineDeadError,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.sandbox.trials import TrialProcessError
from fa_serve.spec import ParameterError

from ..errors import (
    INTERNAL_ERROR,
    RETRY_SECONDS,
    ApiError,
    BadRequest,
    ClientGone,
    EngineFailed,
    NotFound,
    TooManyRequests,
    Unavailable,
    parameter_refused,
    trials_failed,
)
from ..observe.metrics import SequenceMetrics
from ..observe.timelines import Timeline
from ..service import Service

T = TypeVar("T")
log = logging.getLogger("fa_serve.server")
STRUCTURED_FIELDS = {"structured", *(field.name for field in fields(StructuredOutput))}
REFUSALS = (ParameterError, QueueFullError, TrialProcessError)
"""The exceptions with which the engine refuses a request before it begins. Metrics do not count such requests."""


@dataclass(frozen=True)
class RequestFields:
    """Tells which field of the request a parameter of the engine was made from, so that errors name the request's fields.

    names:      all fields of the request
    prompt:     the field with the prompt
    constraint: the field that asks for a structured output, or None
    narrows:    whether other fields also restrict which tokens may be generated
    """

    names: frozenset[str]
    prompt: str
    constraint: str | None = None
    narrows: bool = False

    def of(self, parameter: str) -> str:
        """The field that an engine's parameter was made from."""
        if self.constraint is not None and parameter in STRUCTURED_FIELDS:
            # a forced tool_choice takes its schema from the tools
            return "tools" if self.constraint == "tool_choice" else self.constraint
        return parameter if parameter in self.names else self.prompt


@dataclass(frozen=True)
class Job:
    """What the sequences of one request share.

    name:     the request's id, unique on this server
    arrival:  when the request arrived, on time.perf_counter's clock
    n:        the number of sequences for each prompt
    priority, client, cache_salt, adapter: passed to the engine unchanged
    timeline: records where the request's time goes; None unless --log-slow or traces are on
    images:   the images of the prompt; a request with images has only one prompt
    """

    name: str
    priority: int
    arrival: float
    n: int
    fields: RequestFields
    client: str | None
    cache_salt: str | None
    adapter: str | None = None
    timeline: Timeline | None = None
    images: Sequence[ImageInput] = ()


async def sequences_of_prompt(
    service: Service, job: Job, number: int, prompt: list[int], params: SamplingParams
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index, output) for each output of the `n` sequences of prompt `number`.

    If the request asks for log-probabilities of the prompt, every output carries them, so outputs are held back until the
    engine has sent them. Raises ApiError if the engine refuses or fails.
    """
    if job.adapter is not None:
        await service.adapters.require(job.adapter)
    metrics = {index: sequence_metrics(service, job) for index in range(job.n)}
    prompt_logprobs: list[TokenLogprob | None] | None = None
    held_back: list[RequestOutput] = []
    unfinished_reason = "error"
    timeline = job.timeline
    await service.costs.begin_sequences(job.n)
    sent = timeline.send() if timeline is not None else 0.0
    with engine_errors(service, job):
        try:
            async with aclosing(generate(service, job, str(number), prompt, params)) as outputs:
                async for output in outputs:
                    metrics[output.index].observe(output)
                    if timeline is not None:
                        timeline.take(sent, output)
                    if output.finished:
                        del metrics[output.index]
                    if output.finish_reason in ("error", "abort"):
                        unfinished_reason = "abort"  # the other sequences end with this one
                        raise failure(service, job, output)
                    held_back.append(output)
                    prompt_logprobs = prompt_logprobs or output.prompt_logprobs
                    if prompt_logprobs is None and params.prompt_logprobs is not None:
                        continue
                    for ready in held_back:
                        ready.prompt_logprobs = prompt_logprobs
                        yield number * job.n + ready.index, ready
                    held_back = []
        except (GeneratorExit, asyncio.CancelledError):
            unfinished_reason = "abort"
            raise
        except REFUSALS:
            unfinished_reason = "refused"
            raise
        finally:
            for unfinished in metrics.values():
                unfinished.end(unfinished_reason)


def sequence_metrics(service: Service, job: Job) -> SequenceMetrics:
    """The metrics of one of the job's sequences. The job's adapter must be loaded."""
    return SequenceMetrics(service.metrics, service.model_name, job.arrival, job.adapter)


def generate(
    service: Service, job: Job, name: str, prompt: list[int], params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs for one prompt of a job. name: unique within the job"""
    return service.engine.generate(
        prompt,
        params,
        f"{job.name}-{name}",
        priority=job.priority,
        client=job.client,
        cache_salt=job.cache_salt,
        adapter=job.adapter,
        images=job.images,
    )


@contextmanager
def engine_errors(service: Service, job: Job) -> Iterator[None]:
    """Inside this context, the exceptions with which the engine refuses a request become ApiErrors."""
    try:
        yield
    except ParameterError as error:
        if error.field == "adapter":  # it was unloaded after the request had arrived
            raise NotFound(f"The model {job.adapter!r} was unloaded.", param="model", code="model_not_found") from None
        raise parameter_refused(error, job.fields.of(error.field)) from None
    except QueueFullError:
        raise TooManyRequests("The engine's queue is full. Try again later.", retry_after=1) from None
    except TrialProcessError as error:
        raise trials_failed(error) from None
    except EngineDeadError as error:
        log.error("%s was refused: %s", job.name, error)
        reason = service.refusal_reason() or "the engine has died"
        raise Unavailable(f"The server is not ready: {reason}.", retry_after=RETRY_SECONDS) from None


def failure(service: Service, job: Job, output: RequestOutput) -> ApiError:
    """The HTTP error for a sequence that the engine has ended early.

    The engine's message may show internals, so it goes to the log and, except for that of an image, not to the client.
    """
    if output.finish_reason == "abort":
        # apart from a shutdown, only /pause aborts sequences in flight
        cause = "the server is shutting down" if service.draining else "the operator has paused the server"
        return Unavailable(f"The request was aborted: {cause}.", retry_after=RETRY_SECONDS)
    error = output.error or RequestError("step_failed", "the engine gave no reason")
    if error.code == "unread":
        return ClientGone("The client did not read its stream in time, and too many unread log-probabilities had accumulated.")
    log.error("%s failed (%s): %s", job.name, error.code, error.message)
    reason = service.refusal_reason() or ("its replica has stopped" if error.code == "replica_lost" else None)
    if reason is not None:
        return Unavailable(f"The request was cut off: {reason}.", retry_after=RETRY_SECONDS)
    fields = job.fields
    if error.code == "no_token_left" and fields.narrows and fields.constraint is not None:
        message = f"{fields.constraint} must allow at least one token that allowed_token_ids and logit_bias also allow."
        return BadRequest(message, param=fields.constraint)
    if error.code == "adapter_failed":
        return Unavailable(f"The model {job.adapter!r} cannot be loaded.")
    if error.code == "image_failed":  # perhaps the device had no memory for it, so this may not be the client's fault
        return EngineFailed(f"An image could not be used: {error.message}.")
    if error.code == "grammar" and fields.constraint is not None:
        message = f"{fields.constraint} must be simpler: matching it needed more states or more time than the server allows."
        return BadRequest(message, param=fields.constraint, code="grammar_too_complex")
    return EngineFailed(INTERNAL_ERROR)


def merge(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all iterators as they arrive. The first error ends the iteration. Closing it closes all iterators."""
    return iterators[0] if len(iterators) == 1 else _merge(iterators)


async def _merge(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(len(iterators))

    async def pump(iterator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(iterator):
                async for item in iterator:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(iterator)) for iterator in iterators]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
