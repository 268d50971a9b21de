"""The engine: one synchronous `step` that schedules, runs, samples and commits; and `generate` on top of it.

    engine = Engine(EngineConfig(model="Qwen/Qwen3-0.6B"))
    for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(completion.text)

Online, requests are added between steps:

    engine.add_request("request-1", "Once upon a time", SamplingParams(stop=("\\n",)))
    while engine.has_unfinished():
        for output in engine.step(): ...     # at most one increment of each answer

On a GPU the tokens of step n become outputs while step n + 1 runs. The host reads them before the launch of step n + 1 only if
drafts must follow them. An exception in a step ends only the requests in it. Left out: threads and asyncio (async_engine.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from fa_serve.engine.config import EngineConfig, require_config
from fa_serve.engine.errors import EngineDeadError, QueueFullError, RequestError
from fa_serve.engine.events import OnPhase
from fa_serve.engine.images.processor import prepare_prompts
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.lora.pool import Adapter
from fa_serve.engine.lora.store import AdapterStore
from fa_serve.engine.parallel.leader import open_ranks
from fa_serve.engine.parallel.ranks import OnLost, Ranks
from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.engine.request.answers import Answers
from fa_serve.engine.request.completions import complete
from fa_serve.engine.request.input_processor import InputProcessor
from fa_serve.engine.request.outputs import Completion, RequestOutput
from fa_serve.engine.request.params import SamplingParams, adapter_of_each, params_of_each
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.residence import Residence
from fa_serve.engine.runner.results import CommittedStep, LaunchedStep, StepQueue
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.start.start_up import start_up
from fa_serve.engine.stats import Counters, EngineStats
from fa_serve.engine.structured.grammars import Grammars
from fa_serve.engine.structured.step_masks import StepMasks, grammar_ends, step_masks
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")


class Engine:
    """Owner of the step. The scheduler owns the sequences, the runner owns the device, and the answers are what clients get.

    config:    settings; in `engine.config`, the engine has replaced every "auto" and every None that it decides
    model, tokenizer: may be given instead of being loaded. Without a tokenizer prompts are token ids and outputs have no text
    on_phase:  called with each `Phase` of the start-up when it has ended, and with the progress of long phases
    ahead:     on a GPU, compile kernels and capture graphs before the first request; otherwise steps do so when they need them
    on_lost:   called from a thread when another rank of tensor parallelism has ended
    ranks:     this process's link to the other ranks. None makes it rank 0, which starts the other ranks or, under torchrun,
               waits for them to connect. On other ranks of torchrun, call `open_engine`

    `default_params` apply to requests that give no parameters; they come from the model's generation_config.json. A given
    SamplingParams replaces all of them; `dataclasses.replace(engine.default_params, max_tokens=64)` changes one value.

    Raises ParameterError for settings that cannot work, with the numbers, and UnsupportedModelError for a model that fa_serve
    cannot serve. Methods raise EngineDeadError when another rank has ended.
    """

    card: EncoderCard | None = None

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        on_phase: OnPhase | None = None,
        ahead: bool = False,
        on_lost: OnLost | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        config = config or EngineConfig()
        require_config(config)
        if model is not None and config.tensor_parallel > 1:
            raise ParameterError("tensor_parallel", "be 1 for a model that is already loaded", config.tensor_parallel)
        if model is None:
            config.require_device()
            config.require_generator()
        self._ranks: Ranks = ranks or open_ranks(config, on_lost)
        with self._ranks.starting():
            loaded = start_up(config, self._ranks, on_phase, model, tokenizer, ahead=ahead)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.runner.vocab_size
        self.eos_ids = loaded.eos_ids
        self.default_params = loaded.default_params
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_ids, config)
        self._processor = InputProcessor(
            self.tokenizer, self.config, vocab_size=self.vocab_size, eos_ids=self.eos_ids, images=loaded.runner.images
        )
        self._scheduler = loaded.scheduler
        self._runner = loaded.runner
        self.summary = loaded.summary
        self._steps = StepQueue(depth=1 if self._runner.device.type == "cuda" else 0)
        self._counters = Counters()
        self._answers = Answers(self.tokenizer, self._counters, stop=lambda *ended: self._scheduler.stop(*ended))
        self._serial = count()
        self._residence = Residence(self._runner, self.config, owned=model is None, num_ranks=self._ranks.size)
        self._late: list[RequestOutput] = []  # outputs that the next `step` returns

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        matcher: Any = None,
        images: Sequence[ImageInput] = (),
    ) -> list[int]:
        """Queue a request. After `timeout` seconds it ends with an error. Returns the tokens of the prompt.

        params:   None means `default_params`
        priority: -1000 to 1000; among the requests of one client, those with a lower value are served sooner
        client, cache_salt: clients take turns, and only requests with the same salt share cached prefixes
        adapter: name of a loaded adapter (`load_adapter`); None means the model itself
        matcher: what `grammars.matcher` returned for the structured output; None compiles it here
        images:  images of a prompt of token ids, which has an image token for each of their embeddings (fa_serve.engine.images)

        Raises ParameterError for a prompt that is empty, too long or outside the vocabulary, for an id that is in use, and for
        a structured output that cannot be compiled. Raises QueueFullError for more sequences than there is `room` for.
        """
        if timeout is not None and not timeout > 0:
            raise ParameterError("timeout", "be positive, in seconds", timeout)
        params = params or self.default_params
        chosen = self._adapter(adapter)
        requests = self._process(request_id, prompt, params, priority, client, cache_salt, chosen, images)
        if len(requests) > self.room:
            raise QueueFullError(f"the queue is full: room for {self.room} of {len(requests)} sequences. Try again later")
        self.submit(request_id, params, requests, timeout, matcher)
        return requests[0].prompt

    def submit(
        self, name: str, params: SamplingParams, requests: list[Request], timeout: float | None = None, matcher: Any = None
    ) -> None:
        """Queue the requests of one prompt, which must have been checked, as `add_request` does."""
        if matcher is None and params.structured is not None and self._ranks.rank == 0:
            matcher = self.grammars.matcher(params.structured)
        self._ranks.tell("submit", name, params, requests, timeout)
        sequences = [self._scheduler.add(request, timeout) for request in requests]
        self._answers.add(name, params, sequences, matcher)

    @property
    def room(self) -> int:
        """How many more sequences may run or wait."""
        return max(self.config.max_num_seqs + self.config.max_waiting - len(self._scheduler.sequences), 0)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request. Its pages are free when this returns. Returns the last outputs of its answers; none if the request has
        ended already or never existed."""
        self._ranks.tell("abort", request_id)
        late = [output for output in self._late if output.request_id == request_id]
        self._late = [output for output in self._late if output.request_id != request_id]  # nothing comes after the end
        ended = [self._scheduler.abort(name) for name in self._answers.request_ids(request_id)]
        return late + self._answers.merge([self._answers.output(sequence) for sequence in ended if sequence is not None])

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.sequences or self._steps.launched or self._steps.committed or self._late)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns what requests gained, at most one output for each answer."""
        begin = time.monotonic()
        self._residence.require_awake()
        self._ranks.tell("step")
        outputs: list[RequestOutput] = []
        try:
            self._compute_step(outputs, begin)
        finally:  # after an interrupt, such as Ctrl-C, the next step returns them
            self._late += self._answers.merge(outputs)
        late = self._late
        self._late = []
        return late

    def _compute_step(self, outputs: list[RequestOutput], begin: float) -> None:
        """Compute one step, which began at `begin`. Appends what requests gained."""
        outputs += self._expire() + [self._answers.output(sequence) for sequence in self._scheduler.seat()]
        try:
            if self._steps.launched and self._scheduler.needs_results():
                outputs += self._commit()
            batch = self._scheduler.schedule()
        except (torch.AcceleratorError, EngineDeadError):
            raise  # the device or another rank is lost
        except Exception as error:
            outputs += self._reset(error)
            return
        self._ranks.add_to_digest(number for chunk in batch.chunks for number in chunk.numbers())
        if batch or batch.towers is not None:
            self._launch(batch, begin, outputs)
            outputs += [self._answers.output(sequence) for sequence in self._scheduler.fail_images(batch)]
        if self._steps.is_full or (self._steps.launched and not batch):
            outputs += self._commit()
        elif not batch and self._scheduler.tier is not None and self._scheduler.tier.is_awaited:
            self._scheduler.tier.wait()
        elif not batch and self._runner.adapters is not None and self._scheduler.seats:
            self._runner.adapters.wait()
        outputs += self._take_outputs()
        self._ranks.end_step()

    def drain(self) -> list[RequestOutput]:
        """Wait for the steps in flight. Returns what requests gained, by interrupted steps too. They keep tokens and pages."""
        outputs: list[RequestOutput] = []
        while self._steps.launched:
            outputs += self._commit()
        outputs = self._late + self._answers.merge(outputs + self._take_outputs())
        self._late = []
        return outputs

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """The answers to all prompts, in the order of the prompts; the n answers to one prompt follow each other.

        params:   one SamplingParams for all prompts, or one for each prompt; None means `default_params`
        adapter:  name of a loaded adapter for all prompts, or one for each prompt; None means the model itself
        images:   for each prompt, its images: PIL images if the prompt is a text, which has the processor's image token once
                  for each image; `ImageInput`s if it is token ids, which have an image token for each embedding of the images
        progress: show a progress bar on stderr

        There may be more prompts than the queue holds. Outputs of requests that were added before are discarded. Raises
        ParameterError as `add_request` does, before anything is computed.
        """
        params = params_of_each(prompts, params, self.default_params)
        prompts, prepared = prepare_prompts(prompts, images, self.config, self._processor.reader)
        ids = [f"generate-{next(self._serial)}" for _ in prompts]
        for each in params:
            if each.structured is not None:
                self.grammars.matcher(each.structured)
        names = adapter_of_each(prompts, adapter)
        requests = [
            self._process(request_id, prompt, each, 0, None, None, self._adapter(name), own)
            for request_id, prompt, each, name, own in zip(ids, prompts, params, names, prepared, strict=True)
        ]
        with tqdm(total=sum(each.n for each in params), unit="answer", disable=not progress) as bar:
            return complete(self, [*zip(ids, params, requests, strict=True)], on_step=bar.update)

    def load_adapter(self, name: str, folder: str | Path, reading: int | None = None) -> None:
        """Serve the adapter in a folder, in peft's format, under this name from now on. reading: number from `read_adapter`

        If the name is in use, new requests get the new adapter, and earlier ones finish with the old one. Raises ParameterError
        for an adapter that is broken, that fa_serve cannot compute or that does not fit the model, on any rank, and for an
        engine without `lora_bytes`; OSError for files that cannot be read.
        """
        self._ranks.tell("load_adapter", name, folder, reading)
        self.adapters.load(name, folder, reading)

    def read_adapter(self, folder: str | Path) -> int:
        """Begin to read an adapter, in a thread on each rank. Returns a number for `load_adapter`, which waits for the end."""
        self._ranks.tell("read_adapter", folder)
        return self.adapters.begin(folder)

    def unload_adapter(self, name: str) -> None:
        """Accept no more requests with an adapter. Earlier ones finish with it. Raises ParameterError for an unknown name."""
        self._ranks.tell("unload_adapter", name)
        self.adapters.remove(name)

    @property
    def adapters(self) -> AdapterStore:
        """The adapters by name. Raises ParameterError for an engine without memory for them."""
        if self._runner.adapters is None:
            raise ParameterError("lora_bytes", "be positive to serve adapters (--lora-bytes 1GiB)", self.config.lora_budget)
        return self._runner.adapters

    def _adapter(self, name: str | None) -> Adapter | None:
        return None if name is None else self.adapters.find(name)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] = (), *, keep_pages: bool = False) -> int:
        """Compute with other weights from the next step on. Returns the new version of the weights.

        weights:    (name, tensor) pairs. Each tensor is copied in place into the parameter of that name. Empty if the caller
                    has changed the parameters in place itself, as an optimizer does
        keep_pages: unfinished requests continue from the keys and values that the old weights have computed for them, unless
                    they wait for `prompt_logprobs`. Otherwise the new weights compute them again

        The prefix cache is emptied in either case. Steps in flight end first, and requests keep their tokens.

        Raises ParameterError for a name or a shape that the model does not have, for keep_pages with a model that keeps states,
        and with several ranks.
        """
        self._residence.require_one_rank("update_weights")
        if keep_pages and self._scheduler.states is not None:
            raise ParameterError("keep_pages", "be False for a model that keeps states as well as keys and values", keep_pages)
        weights = self._residence.begin(weights)
        self._late = self.drain()
        try:
            self._residence.copy(weights)
        finally:  # after an error too, because some weights may have been copied
            self._residence.settle()
            self._scheduler.forget_cache(new_weights=True, keep_pages=keep_pages)
            self._counters.weight_version += 1
        return self._counters.weight_version

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of CUDA graphs. Unfinished requests are computed again after `wake_up`.

        level: 0 keeps the weights on the device, 1 moves them to host memory, 2 frees them, so that `update_weights` must
               supply them before the next step. The weights of a model that was given to the engine always stay in place

        Raises ParameterError for an unknown level, for quantised weights unless the level is 0, and with several ranks.
        """
        self._residence.require_one_rank("sleep")
        self._residence.check_level(level)
        self._late = self.drain()
        self._scheduler.forget_cache()
        self._residence.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate what `sleep` has freed, and capture the first graph.

        tags: "weights", "kv_cache", or None for both. With "weights" only, `update_weights` can use the KV cache's memory

        Raises ParameterError for an unknown tag.
        """
        self._residence.wake_up(tags)

    @property
    def model(self) -> PreTrainedModel:
        """The model that runs. Change its parameters with `update_weights`, or call `update_weights` after changing them."""
        return self._runner.model

    @property
    def is_asleep(self) -> bool:
        """Whether some of the engine's memory has been freed, or its weights have no values."""
        return self._residence.is_asleep

    @property
    def weight_version(self) -> int:
        """How often the weights have been changed."""
        return self._counters.weight_version

    def prepare_one(self) -> bool:
        """If there is no request, capture one more graph or write pages to files. Returns False if there was nothing to do."""
        self._ranks.tell("prepare_one")
        if self.is_asleep or self.has_unfinished():
            return False
        tier = self._scheduler.tier
        return self._runner.prepare_one() or (tier is not None and tier.save_one())

    def preparations(self) -> tuple[int, int]:
        """How many kernels have been compiled or loaded so far, and how many CUDA graphs have been captured."""
        return self._runner.preparations()

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return self._counters.snapshot(self._scheduler)

    def close(self) -> None:
        """Free the KV cache and CUDA graphs, and end the other ranks and the process that tries out grammars."""
        # copies must end before the cache is freed; ranks are closed last, when no graph refers to their all-reduce any more
        for part in (self.grammars, self._scheduler.tier, self._runner.adapters, self._runner, self._ranks):
            if part is not None:
                part.close()

    def check_integrity(self) -> None:
        """Assert that every page and slot is accounted for, and that there is an answer for each unfinished sequence."""
        self._scheduler.check_integrity()
        assert self._answers.states.keys() == self._scheduler.sequences.keys()

    def _process(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, *options: Any) -> list[Request]:
        if request_id in self._answers:
            raise ParameterError("request_id", "be unique among unfinished requests", request_id, "duplicate_request_id")
        return self._processor.process(request_id, prompt, params, *options)

    def _expire(self) -> list[RequestOutput]:
        """End the requests whose time is up."""
        if not self._scheduler.deadlines:
            return []
        now = self._ranks.broadcast("clock", time.monotonic)
        return [self._answers.output(sequence) for sequence in self._scheduler.expire(now)]

    def _launch(self, batch: ScheduledBatch, begin: float, outputs: list[RequestOutput]) -> None:
        """Queue a step on the device. Masks of structured outputs are made while its forward runs. Appends what comes of it."""
        self._answers.begin_step(batch.admitted, begin)
        try:
            if not batch and batch.towers is not None:  # images need no slots and no pages, unlike tokens
                self._runner.encode(batch.towers)
                return
            forward = self._runner.launch(batch)
            structured = any(x.num_samples and x.sequence.request.params.structured is not None for x in batch.chunks)
            masks = self._masks(batch, outputs) if structured else StepMasks()
            pending = self._runner.sample(forward, masks.rows)
            self._steps.add(LaunchedStep(batch, pending, begin, structured, masks.seconds, forward.watch, []))
            self._counters.num_steps += 1
        except torch.OutOfMemoryError as error:
            outputs += self._shrink(batch, error)
        except Exception as error:
            outputs += self._fail(batch, error)
        except BaseException:  # such as a keyboard interrupt: a later step computes these tokens
            if not (self._steps.launched and self._steps.launched[-1].batch is batch):
                self._scheduler.rollback(batch)
            raise

    def _masks(self, batch: ScheduledBatch, outputs: list[RequestOutput]) -> StepMasks:
        """The masks of a step's structured outputs. Appends outputs of earlier steps, and of requests whose matcher failed."""
        while self._steps.launched:  # which tokens may come next depends on all earlier tokens
            outputs += self._commit()
        outputs += self._take_outputs()
        masks = self._ranks.broadcast("masks", lambda: step_masks(self.grammars, batch, self._answers.states))
        for index in masks.late:
            self._scheduler.postpone(batch.chunks[index])
        outputs += [self._end(self._scheduler.sequences[name], reason) for name, reason in masks.failed]
        return masks

    def _end(self, sequence: SequenceState, error: RequestError) -> RequestOutput:
        self._scheduler.finish(sequence, "error", error)
        return self._answers.output(sequence)

    def _commit(self) -> list[RequestOutput]:
        """Read the tokens of the oldest step in flight and give them to their sequences. Returns the outputs of failures."""
        step = self._steps.launched.popleft()
        try:
            result = step.pending.read()
            self._ranks.check_lost()
        except Exception as error:
            return self._fail(step.batch, error)
        self._ranks.add_to_digest(result.tokens)
        # the times set the sizes of later chunks, so all ranks use the times of rank 0
        seconds = self._ranks.broadcast("seconds", lambda: self._steps.seconds(step))
        try:
            gained = self._scheduler.commit(step.batch, result.tokens, *seconds)
        except Exception as error:
            return self._reset(error)
        self._steps.committed.append(CommittedStep(step, result, gained))
        return []

    def _take_outputs(self) -> list[RequestOutput]:
        """Turn the tokens of committed steps into outputs. If a step is in flight, the device computes it meanwhile."""
        outputs: list[RequestOutput] = []
        while self._steps.committed:
            committed = self._steps.committed.popleft()
            grammars = partial(grammar_ends, committed.gained, self._answers.states)
            ends = self._ranks.broadcast("grammars", grammars) if committed.step.structured else {}
            outputs += self._answers.take(committed, ends)
        return outputs

    def _shrink(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        """Undo a step for which the device has no memory, and halve later ones. Blocks that stay longer end with an error."""
        self._ranks.escalate(error)
        if batch.num_tokens <= 1:  # 0 for a step that only encodes images
            return self._fail(batch, error)
        blocks = batch.beyond_limit
        outputs = self._fail(blocks, error) if blocks else []
        self._scheduler.rollback(batch)
        torch.cuda.empty_cache()
        if not blocks:
            self._scheduler.max_num_batched_tokens = batch.num_tokens // 2
            log.warning("out of memory in a step of %d tokens: from now on steps have at most half as many", batch.num_tokens)
        return outputs

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        """End the requests of a step that could not be computed."""
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost: nothing more can be computed in this process
        self._ranks.escalate(error)
        outputs = self._take_outputs()
        failed = self._scheduler.fail(batch, RequestError("step_failed", f"the step failed: {type(error).__name__}: {error}"))
        log.error("a step failed; its %d requests end with an error", len(failed), exc_info=error)
        return outputs + [self._answers.output(sequence) for sequence in failed]

    def _reset(self, error: Exception) -> list[RequestOutput]:
        """The scheduler's state may be inconsistent: end every request, and go on with a new scheduler and an empty cache."""
        self._ranks.escalate(error)
        log.error("the scheduler failed; all requests end with an error", exc_info=error)
        self._steps.launched.clear()
        outputs = self._take_outputs()
        failure = RequestError("scheduler_failed", f"the scheduler failed: {type(error).__name__}: {error}")
        sequences = self._answers.sequences()
        self._scheduler.abandon(sequences, failure)
        self._scheduler = self._scheduler.renewed()
        return outputs + [self._answers.output(sequence) for sequence in sequences]
