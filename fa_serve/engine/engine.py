"""The engine: one synchronous step() that schedules, runs, samples and commits; and generate() on top of it.

    engine = Engine(EngineConfig(model="Qwen/Qwen3-0.6B"))
    for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(completion.text)

Online, requests come and go between steps:

    engine.add_request("request-1", "Once upon a time", SamplingParams(stop=("\\n",)))
    while engine.has_unfinished():
        for output in engine.step(): ...     # at most one increment per request

On a GPU the host works one step ahead: while step n + 1 runs, the tokens of step n are read, turned into text and handed out.
An exception in a step fails the requests in it and no others. Left out: threads and asyncio (async_engine.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from fa_serve.engine.admission import Admission
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.detokenizer import TextStream
from fa_serve.engine.errors import QueueFullError, RequestError
from fa_serve.engine.events import OnPhase, Phase
from fa_serve.engine.groups import Groups
from fa_serve.engine.loading import end_ids, load_model, load_tokenizer, sizes
from fa_serve.engine.model_runner import ModelRunner, PendingResult
from fa_serve.engine.pages import PageTable
from fa_serve.engine.request import Completion, Request, RequestOutput, SamplingParams, TokenLogprob
from fa_serve.engine.scheduler import ScheduledBatch, Scheduler
from fa_serve.engine.structured import Grammars
from fa_serve.hf import patch
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counters count from the start of the engine. Pages that only the prefix cache holds are not in use."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


class Engine:
    """Owner of the step. `config` holds no "auto" any more; `model` and `tokenizer` may be given instead of loaded.

    Raises ValueError when the settings cannot work, with the numbers; UnsupportedModelError for a model that fa_serve cannot
    serve. Without a tokenizer prompts are token ids and outputs have no text.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        config = config or EngineConfig()
        begin = time.perf_counter()
        if model is None:
            tokenizer = load_tokenizer(config)
            model = load_model(config)
        else:
            patch(model)
        loaded = time.perf_counter()
        if on_phase is not None:
            on_phase(Phase("weights", f"{config.model_name} on {model.device}", loaded - begin))
        self.tokenizer = tokenizer
        self._runner = ModelRunner(model, config)
        num_pages, self.max_model_len = sizes(config, self._runner)
        self._runner.allocate(num_pages, self.max_model_len)
        if not self._runner.eager:
            self._runner.make_graphs()
        self.config = replace(
            config, dtype=str(model.dtype)[6:], device=str(model.device), num_pages=num_pages, max_model_len=self.max_model_len
        )
        if on_phase is not None:
            detail = f"{num_pages} pages of {config.page_size} tokens, max_model_len {self.max_model_len}"
            on_phase(Phase("kv cache", detail, time.perf_counter() - loaded))
        self._scheduler = self._make_scheduler(config.max_num_batched_tokens)
        self.vocab_size = self._runner.vocab_size
        eos_ids = end_ids(model)
        self._admission = Admission(tokenizer, self.config, vocab_size=self.vocab_size, eos_ids=eos_ids)
        self._grammars = Grammars(tokenizer, self.vocab_size, eos_ids)
        self._matchers: dict[str, Any] = {}
        self._groups = Groups()
        self._depth = 1 if model.device.type == "cuda" else 0
        self._inflight: deque[tuple[ScheduledBatch, PendingResult]] = deque()
        self._streams: dict[str, TextStream] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._serial = count()
        self._num_steps = self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Queue a request. A lower priority value is served sooner; after `timeout` seconds the request ends with an error.

        Raises ValueError for a prompt that is empty, too long or not of this vocabulary, and for an id that is in use;
        QueueFullError when max_waiting requests wait already. A structured output that cannot be followed is a ValueError too.
        """
        if timeout is not None and not timeout > 0:
            raise ParameterError("timeout", "be positive", timeout)
        requests = self._requests(request_id, prompt, params or SamplingParams(), priority)
        if len(requests) > self._room:
            raise QueueFullError(f"the queue is full: {self.config.max_waiting} requests wait already")
        self._submit(request_id, params or SamplingParams(), requests, timeout)

    @property
    def _room(self) -> int:
        """Requests that may still come before the queue is full."""
        return max(self.config.max_num_seqs + self.config.max_waiting - len(self._scheduler.requests), 0)

    def _requests(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        if request_id in self._groups or request_id in self._scheduler.requests:
            raise ParameterError("request_id", "be unique among unfinished requests", request_id, "duplicate_request_id")
        return self._admission.requests(request_id, prompt, params, priority)

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `params.structured` asks for, which may take long; from any thread. add_request finds it ready then.

        Raises ValueError if it cannot be followed.
        """
        if params.structured is not None:
            self._grammars.matcher(params.structured)

    def _submit(self, request_id: str, params: SamplingParams, requests: list[Request], timeout: float | None = None) -> None:
        if params.structured is not None:
            self._matchers |= {request.request_id: self._grammars.matcher(params.structured) for request in requests}
        for request in requests:
            self._scheduler.add(request)
            if timeout is not None:
                heappush(self._deadlines, (request.arrival + timeout, next(self._serial), request))
            if self.tokenizer is not None:
                stream = TextStream(self.tokenizer.backend_tokenizer, request.prompt, params.stop, params.skip_special_tokens)
                self._streams[request.request_id] = stream
        self._groups.add(request_id, params)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request; its pages are free when this returns. Its last outputs: none if it has ended already or never was."""
        ended = [self._scheduler.abort(name) for name in self._groups.names(request_id)]
        return self._groups.merge([self._output(request) for request in ended if request is not None])

    def has_unfinished(self) -> bool:
        return bool(self._scheduler.requests or self._inflight)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what requests gained, at most one output for each answer."""
        outputs = self._expire()
        try:
            batch = self._scheduler.schedule()
        except Exception as error:
            return self._groups.merge(outputs + self._reset(error))
        if batch.admitted:
            now = time.monotonic()
            for request in batch.admitted:
                request.queue_time = request.queue_time or now - request.arrival
        if batch:
            outputs += self._launch(batch)
        if self._inflight and (len(self._inflight) > self._depth or not batch):
            outputs += self._commit(*self._inflight.popleft())
        return self._groups.merge(outputs)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answers to all prompts, in their order, the n of one prompt side by side; `params` for all, or one for each prompt.
        `progress` shows a bar on stderr.

        There may be more prompts than the queue holds. Outputs of other requests are lost. Raises ValueError as add_request
        does, before anything is computed.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of prompts, got the text {prompts!r}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params must be one, or one for each of {len(prompts)} prompts, got {len(params)}")
        ids = [f"generate-{next(self._serial)}" for _ in prompts]
        for each in params:
            self.prepare(each)
        queue = deque(zip(ids, params, map(self._requests, ids, prompts, params), strict=True))
        whole: dict[tuple[str, int], RequestOutput] = {}
        try:
            with tqdm(total=sum(each.n for each in params), unit="answer", disable=not progress) as bar:
                while queue or self.has_unfinished():
                    while queue and len(queue[0][2]) <= self._room:
                        self._submit(*queue.popleft())
                    for output in self.step():
                        key = output.request_id, output.index
                        if key in whole:
                            whole[key].absorb(output)
                        else:
                            whole[key] = output
                        bar.update(output.finished)
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [Completion.of(whole[x, index]) for x, each in zip(ids, params, strict=True) for index in range(each.n)]

    def prepare_one(self) -> bool:
        """For the moments without a request: compile or capture one more of the steps that requests will ask for.

        On a GPU it takes tenths of a second, or seconds for kernels that no cache has. False if nothing is left.
        """
        return not self.has_unfinished() and self._runner.prepare_one()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=scheduler.pages.num_pages,
            num_pages_used=scheduler.pages.num_held,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Assert that every page and slot is accounted for."""
        self._scheduler.check_integrity()

    def _expire(self) -> list[RequestOutput]:
        """End the requests whose time is up."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, _, request = heappop(self._deadlines)
            if not request.finished:
                self._scheduler.finish(
                    request, "error", RequestError("timeout", "the request was not finished within its timeout")
                )
                outputs.append(self._output(request))
        if len(self._deadlines) > 2 * len(self._scheduler.requests) + 64:  # most are of requests that ended in time
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapify(self._deadlines)
        return outputs

    def _launch(self, batch: ScheduledBatch) -> list[RequestOutput]:
        """Queue a step on the device. The masks of structured outputs are made while its forward runs."""
        outputs: list[RequestOutput] = []
        try:
            forward = self._runner.launch(batch)
            masks = None
            if any(request.request_id in self._matchers for request in forward.requests):
                while self._inflight:  # what may come next depends on every token before
                    outputs += self._commit(*self._inflight.popleft())
                masks, failed = self._masks(forward.requests)
                outputs += failed
            self._inflight.append((batch, self._runner.sample(forward, masks)))
            self._num_steps += 1
        except torch.OutOfMemoryError as error:
            outputs += self._shrink(batch, error)
        except Exception as error:
            outputs += self._fail(batch, error)
        return outputs

    def _masks(self, requests: Sequence[Request]) -> tuple[dict[int, NDArray[np.int32]], list[RequestOutput]]:
        """By row, what may come next; and the outputs of requests whose grammar has become too much for its matcher."""
        rows = {row: r for row, r in enumerate(requests) if r.request_id in self._matchers}
        if not rows:
            return {}, []
        masks = self._grammars.masks([self._matchers[request.request_id] for request in rows.values()])
        failed = []
        for request in rows.values():
            if (matcher := self._matchers[request.request_id]).is_error():
                message = f"the structured output cannot go on: {matcher.get_error()[:200]}"
                self._scheduler.finish(request, "error", RequestError("grammar", message))
                failed.append(self._output(request))
        return dict(zip(rows, masks, strict=True)), failed

    def _commit(self, batch: ScheduledBatch, pending: PendingResult) -> list[RequestOutput]:
        try:
            result = pending.read()
        except Exception as error:
            return self._fail(batch, error)
        running = [chunk.request for chunk in batch.chunks if not chunk.request.finished]
        try:
            gained = dict(self._scheduler.commit(batch, result.tokens))
        except Exception as error:
            return self._reset(error)
        for request, start, entries in result.prompt_logprobs:
            if request.prompt_logprobs is not None:  # a preempted prompt is computed twice
                request.prompt_logprobs += entries[len(request.prompt_logprobs) - start :]
        sampling = (chunk.request for chunk in batch.chunks if chunk.samples)
        logprobs = dict(zip(sampling, result.logprobs, strict=True))
        self._num_output_tokens += len(gained)
        # a request whose logits were not finite has ended without a token
        return [self._output(r, gained.get(r), logprobs[r]) for r in running if r in gained or r.finished]

    def _output(self, request: Request, token: int | None = None, logprob: TokenLogprob | None = None) -> RequestOutput:
        """What `request` gained by a token (None: nothing, it has just ended), as text too."""
        text = ""
        stream = self._streams.get(request.request_id)
        matcher = self._matchers.get(request.request_id)
        if token is not None and token not in request.end_ids:
            stopped = False
            if matcher is not None:
                matcher.consume_token(token)
                stopped = matcher.is_stopped()
            if stream is not None:
                text = stream.push(token, request.num_output_tokens > request.params.min_tokens)
                stopped |= stream.stopped
            if stopped and request.finished:
                request.finish_reason = "stop"
            elif stopped:
                self._scheduler.finish(request, "stop")
        if request.finished:
            text += "" if stream is None else stream.flush()
            self._streams.pop(request.request_id, None)
            self._matchers.pop(request.request_id, None)
        first = token is not None and request.num_output_tokens == 1
        if first:
            self._num_prompt_tokens += len(request.prompt)
            self._num_cached_tokens += request.num_cached_tokens
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            text=text,
            token_ids=[] if token is None else [token],
            logprobs=None if token is None or logprob is None else [logprob],
            finished=request.finished,
            finish_reason=request.finish_reason,
            error=request.error,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=request.prompt_logprobs if first else None,
            queue_time=request.queue_time if request.finished else None,
        )

    def _shrink(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        """The device has no room for such a step: try again with half as many tokens, from now on."""
        if batch.num_tokens == 1:
            return self._fail(batch, error)
        self._scheduler.rollback(batch)
        self._scheduler.max_num_batched_tokens = batch.num_tokens // 2
        torch.cuda.empty_cache()
        log.warning("out of memory in a step of %d tokens: steps have at most half of that from now on", batch.num_tokens)
        return []

    def _reset(self, error: Exception) -> list[RequestOutput]:
        """The books are not to be trusted: end every request and start with an empty cache."""
        log.exception("the scheduler failed; all requests end with an error", exc_info=error)
        requests = list(self._scheduler.requests.values())
        self._inflight.clear()
        self._scheduler = self._make_scheduler(self._scheduler.max_num_batched_tokens)
        for request in requests:
            request.finish_reason = "error"
            request.error = RequestError("scheduler_failed", f"the scheduler failed: {type(error).__name__}: {error}")
        return [self._output(request) for request in requests]

    def _make_scheduler(self, max_num_batched_tokens: int) -> Scheduler:
        config = self.config
        assert config.num_pages is not None
        return Scheduler(
            PageTable(config.num_pages, config.page_size, prefix_caching=config.prefix_caching),
            window=self._runner.window,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost: nothing more can be computed in this process
        log.exception("a step failed; its %d requests end with an error", len(batch.chunks), exc_info=error)
        reason = RequestError("step_failed", f"the step failed: {type(error).__name__}: {error}")
        failed = self._scheduler.fail(batch, reason)
        return [self._output(request) for request in failed]
