"""An encoder: embeddings, scores of pairs and classes of texts, batch by batch.

    encoder = Encoder(EngineConfig(model="BAAI/bge-small-en-v1.5"))
    vectors = encoder.encode(["a text", "another one"])                 # (2, 384), float32
    scores = reranker.score("a question", ["a text", "another one"])    # (2,)

A step computes one batch of packed inputs. On a GPU, the next batch is launched before the results of the previous one are
read. The texts of `encode` are tokenized in a thread that runs ahead (reading.py).
`Encoder` has the methods of `Engine` that a worker calls, so that `AsyncEngine` can run either. Left out: what is computed for
a batch (fa_serve.hf.encoders) and which inputs are in it (batches.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa_serve.engine.config import EngineConfig, require_config
from fa_serve.engine.errors import EncoderError, EngineDeadError, RequestError
from fa_serve.engine.events import OnPhase, PhaseClock
from fa_serve.engine.pooling.batches import InputQueue, InputRun
from fa_serve.engine.pooling.inputs import ITEM, EncoderInput, EncoderInputs, InputReader, InputText
from fa_serve.engine.pooling.params import EncoderCard, Pooled, PooledRows, PoolingParams
from fa_serve.engine.pooling.pipeline import Pipeline
from fa_serve.engine.pooling.reading import read_ahead
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.scheduler.sequence_times import SequenceTimes
from fa_serve.engine.start.loading import device_name
from fa_serve.engine.start.warm_up import powers_of_two
from fa_serve.engine.stats import EngineStats
from fa_serve.engine.summary import EngineSummary
from fa_serve.launching.compilations import num_compilations, watch
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")
Vectors = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that is being computed. event: recorded after the copy of its results to the host; None without a GPU"""

    batch: list[InputRun]
    inputs: EncoderInputs
    results: Tensor
    begin: float
    event: Any


class Encoder:
    """config: `task` says what the encoder is for if the model's files do not; settings of the KV cache have no meaning here

    The constructor raises ParameterError for settings that an encoder does not have, and for a model that is no encoder.
    """

    eos_ids: frozenset[int] = frozenset()
    default_params = SamplingParams()
    grammars = None

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_phase: OnPhase | None = None,
        ahead: bool = False,
        on_lost: Callable[[EngineDeadError], None] | None = None,
    ) -> None:
        config = config or EngineConfig(task="embed")
        require_config(config)
        check_config(config)
        config.require_device()
        config.require_files()
        config = config.pin_revision()
        if ahead:
            watch()
        self._pipeline = Pipeline.load(config, PhaseClock(on_phase))
        self.card: EncoderCard = self._pipeline.card
        self.tokenizer = self._pipeline.tokenizer
        self.vocab_size = self._pipeline.vocab_size
        model = self._pipeline.model.model
        self.config = replace(
            config,
            task=self.card.task,
            dtype=str(model.dtype)[6:],
            device=str(model.device),
            max_model_len=self.card.max_tokens,
        )
        self.summary = EngineSummary(device_name(model.device))
        self.reader = InputReader(self.tokenizer, self.card, self.vocab_size)
        self._queue = InputQueue(config.max_num_batched_tokens, config.max_num_seqs)
        self._launched: deque[_Launched] = deque()
        self._depth = 1 if model.device.type == "cuda" else 0
        self._num_steps = 0
        self._num_tokens = 0
        self._serial = count()
        if ahead and model.device.type == "cuda":
            self._warm_up()

    def add_request(
        self,
        request_id: str,
        inputs: EncoderInputs,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
    ) -> None:
        """Queue the inputs of a request. An output has the results of one or several inputs, beginning with number `index`.

        inputs:   what `reader.read` returned
        priority: of one client's requests, those with a lower value are served sooner
        timeout:  seconds after which the request ends with an error

        Raises ParameterError for parameters that this encoder does not have, and QueueFullError when too many tokens wait.
        """
        params = params or PoolingParams()
        params.check(self.card)
        if timeout is not None and not timeout > 0:
            raise ParameterError("timeout", "be positive, in seconds", timeout)
        self._queue.add(request_id, inputs, params, priority=priority, timeout=timeout, client=client)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request. Returns the last outputs of its inputs; none if it has ended already or never existed."""
        return [_ended(request_id, index, None) for index in self._queue.abort(request_id)]

    @property
    def is_asleep(self) -> bool:
        """Never: an encoder has no memory that `Engine.sleep` would free."""
        return False

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._queue.num_waiting or self._launched)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns the outputs of inputs that have been computed, or whose time is up."""
        outputs = self._expire()
        batch = self._queue.next_batch()
        if batch:
            outputs += self._launch(batch)
        while len(self._launched) > (self._depth if batch else 0):
            outputs += self._commit()
        return outputs

    def encode(
        self,
        texts: Sequence[InputText] | str,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        params: PoolingParams | None = None,
        truncate: bool = False,
    ) -> Vectors:
        """The vectors of texts -> (texts, size) float32, in their order; (size,) for a single text.

        prompt_name: the name of a prompt of the model, which is written before each text; None is the model's default
        prompt:      the text of the prompt itself
        truncate:    texts that are too long are cut instead of refused

        Raises ParameterError for texts and parameters that this encoder does not take, and EncoderError if a step fails. Use
        `pooled` for models whose answer has another form, and for vectors of tokens.
        """
        if self.card.task != "embed" or (params is not None and params.tokens):
            raise ParameterError("task", "be embed for encode(): use pooled(), score() or classify()", self.card.task)
        if params is not None:
            params.check(self.card)
        many = [texts] if isinstance(texts, str) else _listed(texts)
        size = self.card.size if params is None or params.dimensions is None else params.dimensions
        vectors = np.empty((len(many), size), dtype=np.float32)
        for first, rows in self._computed(many, prompt_name, prompt, params, truncate):
            vectors[first : first + len(rows)] = rows.values
        return vectors[0] if isinstance(texts, str) else vectors

    def score(
        self, query: str, documents: Sequence[str], *, params: PoolingParams | None = None, truncate: bool = False
    ) -> Vectors:
        """How well each document answers a query -> (documents,) float32, with a model of the task score."""
        if self.card.task != "score":
            raise ParameterError("task", "be score for score(), which scores pairs of texts", self.card.task)
        found = self.pooled([(query, each) for each in documents], params=params, truncate=truncate)
        return np.array([each.values[0] for each in found], dtype=np.float32)

    def classify(
        self, texts: Sequence[str | tuple[str, str]], *, params: PoolingParams | None = None, truncate: bool = False
    ) -> Vectors:
        """The probabilities of the classes `card.labels` -> (texts, labels) float32."""
        if self.card.task not in ("classify", "score"):
            raise ParameterError("task", "be classify or score for classify()", self.card.task)
        found = self.pooled(texts, params=params, truncate=truncate)
        return np.stack([each.values for each in found]) if found else np.zeros((0, self.card.size), dtype=np.float32)

    def pooled(
        self,
        inputs: Sequence[InputText],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        params: PoolingParams | None = None,
        truncate: bool = False,
    ) -> list[Pooled]:
        """The result for each input, in their order. The arguments are those of `encode`."""
        found: list[Pooled | None] = [None] * len(_listed(inputs))
        for first, rows in self._computed(inputs, prompt_name, prompt, params, truncate):
            found[first : first + len(rows)] = list(rows)
        return [each for each in found if each is not None]

    def _computed(
        self,
        inputs: Sequence[InputText],
        prompt_name: str | None,
        prompt: str | None,
        params: PoolingParams | None,
        truncate: bool,
    ) -> Iterator[tuple[int, PooledRows]]:
        """Yields results in the order in which they are computed: the number of the first input, and the rows from there on.

        A batch is launched as soon as enough inputs for it are tokenized. A thread tokenizes the next ones meanwhile.
        """
        text = self.reader.prompt(prompt_name) if prompt is None else prompt
        begins: dict[str, int] = {}
        begin = 0
        missing = len(inputs)
        pieces = read_ahead(inputs, partial(self.reader.read, prompt=text, truncate=truncate))
        try:
            while missing:
                while begin < len(inputs) and not self._queue.has_full_batch():
                    piece = next(pieces)
                    name = f"encode-{next(self._serial)}"
                    self.add_request(name, piece, params)
                    begins[name] = begin
                    begin += len(piece)
                for output in self.step():
                    if output.request_id not in begins:
                        continue
                    if output.error is not None:
                        raise EncoderError(output.error)
                    assert output.pooled is not None
                    missing -= len(output.pooled)
                    yield begins[output.request_id] + output.index, output.pooled
        finally:
            for name in begins:
                self.abort(name)
            pieces.close()

    def prepare_one(self) -> bool:
        """Nothing to do: no graphs are captured while there is no request."""
        return False

    def preparations(self) -> tuple[int, int]:
        """Kernels that were compiled or loaded so far, and 0: a worker's encoder captures its graphs before any request."""
        return sum(num_compilations()), 0

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return EngineStats(
            num_running=self._queue.num_running,
            num_waiting=self._queue.num_waiting,
            num_pages=0,
            num_pages_used=0,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_tokens,
            num_cached_tokens=0,
            num_output_tokens=0,
            num_preemptions=0,
        )

    def close(self) -> None:
        """Nothing to free: an encoder has no other processes."""

    def check_integrity(self) -> None:
        """Assert that every input is accounted for."""
        self._queue.check_integrity()

    def _warm_up(self) -> None:
        """Compute inputs for all tiles of attention and batches for all tiles of products, so that no request waits for a
        compiler.

        As in start/warm_up.py, tiles change at powers of two: for attention, of the longest input; for products, of all tokens.
        """
        most = self.config.max_num_batched_tokens
        longest = min(self.card.max_tokens, most)
        batches = [[length] for length in powers_of_two(longest)]
        batches += [[longest] * min(tokens // longest, self.config.max_num_seqs) for tokens in powers_of_two(most)]
        with torch.inference_mode():
            if self._pipeline.graphs is not None:
                self._pipeline.graphs.capture_ahead(takes_types=self.card.takes_types)
            for lengths in filter(None, batches):
                self._pipeline.compute(EncoderInputs.of([self._padding(length) for length in lengths]), PoolingParams())

    def _padding(self, length: int) -> EncoderInput:
        """An input of the token 0."""
        zeros = np.zeros(length, dtype=np.int32)
        return EncoderInput(zeros, zeros if self.card.takes_types else None)

    def _expire(self) -> list[RequestOutput]:
        names = self._queue.expired(time.monotonic())
        error = RequestError("timeout", "the request did not finish within its timeout")
        return [_ended(name, index, error) for name in names for index in self._queue.abort(name)]

    def _launch(self, batch: list[InputRun]) -> list[RequestOutput]:
        begin = time.monotonic()
        inputs = EncoderInputs.joined([run.inputs for run in batch])
        try:
            with torch.inference_mode():
                results = self._pipeline.compute(inputs, batch[0].request.params)
                event = None
                if results.device.type == "cuda":
                    on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
                    results = on_host.copy_(results, non_blocking=True)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
        except torch.OutOfMemoryError as error:
            return self._shrink(batch, error)
        except Exception as error:
            return self._fail(batch, error)
        self._num_steps += 1
        self._launched.append(_Launched(batch, inputs, results, begin, event))
        return []

    def _commit(self) -> list[RequestOutput]:
        """Wait for the oldest batch and turn its results into outputs."""
        step = self._launched.popleft()
        try:
            if step.event is not None:
                step.event.synchronize()
            rows = self._pipeline.rows(step.results, step.inputs, step.batch[0].request.params)
            firsts = np.cumsum([0, *map(len, step.batch)]).tolist()
            found = {
                id(run): self._pipeline.finish(rows.part(first, first + len(run)), run.request.params)
                for run, first in zip(step.batch, firsts, strict=False)
            }
        except Exception as error:
            return self._fail(step.batch, error)
        now = time.monotonic()
        outputs = []
        for run in self._queue.finish(step.batch):
            self._num_tokens += run.num_tokens
            times = SequenceTimes(run.request.arrival)
            times.begin(step.begin)
            times.end_step(now, now, 1)
            outputs += _outputs_of(run, *found[id(run)], times)
        return outputs

    def _shrink(self, batch: list[InputRun], error: Exception) -> list[RequestOutput]:
        """The device has no room for such a batch: it waits again, and batches have half as many tokens from now on."""
        if sum(map(len, batch)) == 1:
            return self._fail(batch, error)
        self._queue.give_back(batch)
        self._queue.max_tokens = max(sum(run.num_tokens for run in batch) // 2, 1)
        torch.cuda.empty_cache()
        log.warning("out of memory in a batch: from now on batches have at most %d tokens", self._queue.max_tokens)
        return []

    def _fail(self, batch: list[InputRun], error: Exception) -> list[RequestOutput]:
        """End the inputs of a batch that could not be computed."""
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost: nothing more can be computed in this process
        log.error("a step failed; its %d inputs end with an error", sum(map(len, batch)), exc_info=error)
        reason = RequestError("step_failed", f"the step failed: {type(error).__name__}: {error}")
        found = self._queue.finish(batch)
        return [_ended(run.request.name, index, reason) for run in found for index in range(run.begin, run.end)]


def check_config(config: EngineConfig) -> None:
    """Raise ParameterError for a setting that an encoder does not have."""
    neutral: dict[str, Any] = {
        "tensor_parallel": 1,
        "quantization": None,
        "speculative": None,
        "kv_cache_dtype": "auto",
        "attention_precision": "bf16",
        "deterministic": False,
    }
    for name, value in neutral.items():
        if getattr(config, name) != value:
            raise ParameterError(name, f"be {value} for an encoder", getattr(config, name), "unsupported")


def _listed(inputs: Any) -> Any:
    """Several inputs, in a list or an array. Raises ParameterError for a single text, and for an object without a length."""
    if isinstance(inputs, str | bytes) or not hasattr(inputs, "__len__"):
        raise ParameterError("inputs", f"be a list in which each item is {ITEM}", inputs)
    return inputs


def _outputs_of(
    run: InputRun, rows: PooledRows, finite: np.ndarray[Any, np.dtype[np.bool_]], times: SequenceTimes
) -> list[RequestOutput]:
    """The outputs of a run that has been computed: one for all inputs, or one for each if any has NaN or infinite numbers."""
    borders = [0, len(run)] if finite.all() else list(range(len(run) + 1))
    outputs = []
    for first, last in pairwise(borders):
        if not finite[first]:
            reason = RequestError("not_finite", "the model computed numbers that are NaN or infinite")
            outputs.append(_ended(run.request.name, run.begin + first, reason))
            continue
        ends = run.request.inputs.ends
        outputs.append(
            RequestOutput(
                run.request.name,
                [],
                finished=True,
                finish_reason="stop",
                num_prompt_tokens=int(ends[run.begin + last] - ends[run.begin + first]),
                index=run.begin + first,
                times=times,
                pooled=rows.part(first, last),
            )
        )
    return outputs


def _ended(name: str, index: int, error: RequestError | None) -> RequestOutput:
    """The output of an input that is not computed."""
    return RequestOutput(name, [], finished=True, finish_reason="abort" if error is None else "error", error=error, index=index)
