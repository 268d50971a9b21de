"""The model, the KV cache and the tensors of a step: a `ScheduledBatch` in, sampled tokens out.

    runner = ModelRunner(model, config)
    forward = runner.launch(batch)           # returns when the work is queued, not when it is done
    pending = runner.sample(forward)         # the same; what may be sampled need not be known before
    result = pending.read()                  # waits for the device; one token for each chunk that samples

A step's numbers are put together in one block of host memory and sent in one copy; of the pages of its sequences, which the
device keeps in a table by slot, only those that are new. A token that was sampled by the step before
may not be known on the host yet: the device keeps the last sampled token of each slot, and an input id -(slot + 1) stands for
it. Left out: which tokens (scheduler.py), the choice of a token (sampler.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.engine import kv_cache
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.cuda_graphs import Inputs, Shape, StepGraphs, pad
from fa_serve.engine.fusion import fuse
from fa_serve.engine.invariant import NUM_SPLITS, invariant
from fa_serve.engine.request import Request, SamplingParams, TokenLogprob
from fa_serve.engine.sampler import SampleParams, TokenCounts, log_probabilities, sample, sampling_arrays
from fa_serve.engine.scheduler import PROMPT_ROWS, Chunk, ScheduledBatch
from fa_serve.engine.transfer import packed_size, send
from fa_serve.hf import PagedBatch, attention_layers, paged_forward

log = logging.getLogger("fa_serve.engine")


PromptRows = list[tuple[Request, int, int]]  # a request, and of which of its tokens log-probabilities come: first, last + 1


@dataclass(slots=True)
class StepResult:
    """For each chunk that samples, in order: its token, and its log-probabilities if they were asked for.

    prompt_logprobs: (request, index of the first token, log-probabilities of the prompt's tokens from there on)
    """

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[tuple[Request, int, list[TokenLogprob]]]


class PendingResult:
    """The outcome of a launched step, on its way to the host.

    logprobs: what `log_probabilities` says of the rows whose `wanted` is not None; prompts: the same of `rows`, one by one
    """

    def __init__(
        self, tokens: Tensor, wanted: list[int | None], logprobs: Sequence[Tensor], rows: PromptRows, prompts: Sequence[Tensor]
    ) -> None:
        self._wanted = wanted
        self._rows = rows
        self._count = len(logprobs)
        self._host = [tokens, *logprobs, *prompts]
        self._arrived: torch.Event | None = None
        if tokens.is_cuda:
            self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in self._host]
            self._arrived = torch.Event("cuda")
            self._arrived.record()

    def read(self) -> StepResult:
        """Wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *values = (x.tolist() for x in self._host)
        result = StepResult(tokens, [None] * len(tokens), [])
        if self._count:
            rows = [row for row, wanted in enumerate(self._wanted) if wanted is not None]
            for row, *entry in zip(rows, *values[: self._count], strict=True):
                result.logprobs[row] = _entry(tokens[row], self._wanted[row], *entry)
        prompts = zip(*values[self._count :], strict=True)
        for request, first, last in self._rows:
            count = request.params.prompt_logprobs
            entries = [_entry(request.prompt[index], count, *next(prompts)) for index in range(first, last)]
            result.prompt_logprobs.append((request, first, entries))
        return result


def _entry(token: int, count: int | None, chosen: float, values: list[float], ids: list[int]) -> TokenLogprob:
    return TokenLogprob(token, chosen, list(zip(ids, values, strict=True))[:count])


class ModelRunner:
    """Owner of everything that lives on the device. Before the first step it needs its cache: `allocate`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model: PreTrainedModel = model.train(False)
        self.device = model.device
        self.vocab_size = int(cast(Any, model).get_output_embeddings().weight.shape[0])
        self.page_size = config.page_size
        self.eager = config.eager or self.device.type != "cuda"
        self.max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self.layers = attention_layers(model)
        self._deterministic = config.deterministic
        self._options: dict[str, Any] = {"num_splits": NUM_SPLITS} if config.deterministic else {}  # of PagedBatch
        if config.kv_cache_dtype == "fp8":
            self.layers = [replace(layer, kv_dtype=torch.float8_e4m3fn) for layer in self.layers]
            self._options["descales"] = kv_cache.descales(model, self.vocab_size)
        if config.fusion and not config.eager and not config.deterministic:
            fuse(model)
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self._graphs: StepGraphs | None = None
        self._counts: TokenCounts | None = None
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        # per slot, on the host: the pages of its sequence, and how many of them are filled in
        self._table = np.zeros((config.max_num_seqs, 0), dtype=np.int32)
        self._filled = np.zeros(config.max_num_seqs, dtype=np.int64)
        # the same on the device, and what of it is out of date: (slot, first, last) of columns
        self._device_table = torch.zeros((config.max_num_seqs, 0), dtype=torch.int32, device=self.device)
        self._changed: list[tuple[int, int, int]] = []

    @property
    def window(self) -> int | None:
        """Keys before a token that any layer looks at; None if one looks at all."""
        lefts = [layer.window_size[0] for layer in self.layers]
        return None if min(lefts, default=-1) < 0 else max(lefts)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Make the KV cache; its content is lost if there was one."""
        self.kv_caches = []
        self._graphs = None
        self.kv_caches = kv_cache.allocate(self.layers, num_pages, self.page_size, self.device)
        self._table = np.zeros((self.max_num_seqs, -(-max_model_len // self.page_size)), dtype=np.int32)
        self._device_table = torch.zeros(self._table.shape, dtype=torch.int32, device=self.device)
        self._filled[:] = 0
        self._changed.clear()

    @torch.inference_mode()
    def make_graphs(self) -> None:
        """Capture the largest decoding step, if this model can be; call it once, when the cache has its final place."""
        graphs = StepGraphs(
            self._forward,
            self._inputs,
            self.device,
            max_batch=self.max_num_seqs,
            max_tokens=self._max_tokens,
            max_keys=self._table.shape[1] * self.page_size,
            vocab=self.vocab_size,
            dtype=self.model.dtype,
            # attention over float8 keys takes the longest prompt there may be for the longest there is
            prompts=not self._options,
            rehearse=not self._deterministic,
        )
        try:
            graphs.capture_largest()
        except Exception as error:
            log.warning("decoding without CUDA graphs: %s", error)
        else:
            self._graphs = graphs

    @torch.inference_mode()
    def prepare_one(self) -> bool:
        return self._graphs is not None and self._graphs.prepare_one()

    def fit_num_pages(self, config: EngineConfig, max_model_len: int) -> int:
        """How many pages the device has room for beside the weights and the largest step."""
        size = kv_cache.bytes_per_page(self.layers, self.page_size)
        if self.device.type != "cuda":
            enough = self.max_num_seqs * -(-max_model_len // self.page_size)
            return min(enough, max(int(kv_cache.available_memory() * kv_cache.CPU_SHARE) // size, 1))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.allocate(1, max_model_len)
        before = torch.cuda.memory_allocated(self.device)
        self.sample(self.launch(_full_step(config, max_model_len))).read()
        peak = torch.cuda.max_memory_allocated(self.device)
        if not self.eager:
            peak += peak - before  # graphs keep a memory of their own, of their largest step
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        self.kv_caches = []
        torch.cuda.empty_cache()
        room = int(total * config.gpu_memory_utilization) - others - peak
        if room < size:
            raise ValueError(
                f"gpu_memory_utilization = {config.gpu_memory_utilization} of {total / 2**30:.1f} GiB leaves no room for a KV "
                f"cache: weights and the largest step take {peak / 2**30:.1f} GiB, other programs {others / 2**30:.1f} GiB"
            )
        return room // size

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Forward:
        """Queue the forward of one step."""
        for request in batch.admitted:
            self._filled[request.slot] = 0
            if request.params.penalised:
                self._token_counts().start(request)
        step = self._prepare(batch)
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        rows = [(c.request, c.start + 1, c.start + 1 + c.prompt_rows) for c in batch.chunks if c.prompt_rows]
        return Forward(step, self._run(step)[: len(requests) + batch.num_prompt_rows], requests, rows)

    @torch.inference_mode()
    def sample(self, forward: Forward, masks: Mapping[int, NDArray[np.int32]] | None = None) -> PendingResult:
        """Queue the sampling of the newest forward and the copy of its tokens to the host.

        masks: by row of the sampling requests, what may come next, one bit for each token
        """
        step, slots, count = forward.step, forward.step.sampled_slots, len(forward.requests)
        logits, prompts = forward.logits[:count], forward.logits[count:]
        prompt_logprobs: tuple[Tensor, ...] = ()
        if step.prompt_targets is not None:
            top = max(request.params.prompt_logprobs or 0 for request, *_ in forward.prompt_rows)
            with invariant(self._deterministic):
                prompt_logprobs = log_probabilities(prompts, step.prompt_targets, top)
        if not count:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return PendingResult(none, [], [], forward.prompt_rows, prompt_logprobs)
        sampling = step.sampling
        if masks:
            rows = np.array(list(masks), dtype=np.int64)
            sent = send({"mask_rows": rows, "mask": np.stack(list(masks.values()))}, self.device)
            sampling = replace(sampling, mask=sent["mask"], mask_rows=sent["mask_rows"])
        # INVALID_TOKEN ends its request, but the next step may have been launched before the host knows, and embeds 0 for it
        tokens = sample(logits, sampling, self._counts, slots, self._last_tokens)
        if sampling.repetition is not None:
            self._token_counts().record(slots, tokens)
        wanted = [request.params.logprobs for request in forward.requests]
        logprobs: tuple[Tensor, ...] = ()
        if step.logprob_rows is not None:
            index = step.logprob_rows
            with invariant(self._deterministic):
                logprobs = log_probabilities(logits[index], tokens[index], max(count or 0 for count in wanted))
        return PendingResult(tokens, wanted, logprobs, forward.prompt_rows, prompt_logprobs)

    def _run(self, step: _Step) -> Tensor:
        """Logits of one forward, the sampled rows first."""
        if isinstance(step.inputs, Inputs):
            return self._forward(step.inputs)
        assert self._graphs is not None
        try:
            return self._graphs.run(step.inputs)
        except Exception as error:
            inputs = self._graphs.inputs(step.inputs)
            self._graphs = None
            log.warning("no CUDA graphs from now on: %s", error)
            return self._forward(inputs)

    def _forward(self, inputs: Inputs) -> Tensor:
        last = self._last_tokens[(-1 - inputs.input_ids).clamp(min=0)]
        input_ids = torch.where(inputs.input_ids < 0, last, inputs.input_ids)
        with invariant(self._deterministic):
            return paged_forward(self.model, input_ids, inputs.position_ids, inputs.paged, inputs.logits_indices)

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self.max_num_seqs, self.vocab_size, self.device)
        return self._counts

    def _prepare(self, batch: ScheduledBatch) -> _Step:
        ids: list[int] = []
        for chunk in batch.chunks:
            self._fill_table(chunk)
            end = chunk.start + chunk.length
            ids += chunk.request.tokens[chunk.start : end]
            if end > len(chunk.request.tokens):
                ids.append(-1 - chunk.slot)
        slots = np.array([chunk.slot for chunk in batch.chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in batch.chunks], dtype=np.int64)
        lengths = np.array([chunk.length for chunk in batch.chunks], dtype=np.int64)
        samples = np.array([chunk.samples for chunk in batch.chunks], dtype=bool)
        ends = np.cumsum(lengths)
        seqused = starts + lengths
        max_seqlen_q = int(lengths.max())
        max_seqlen_k = int(seqused.max())
        # token t of the batch is token t - (ends - lengths)[its chunk] of its chunk
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        pages = self._table[np.repeat(slots, lengths), positions // self.page_size].astype(np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": np.array(ids, dtype=np.int64),
            "position_ids": positions,
            "slot_mapping": pages * self.page_size + positions % self.page_size,
            "slots": slots,
            "seqused_k": seqused.astype(np.int32),
        }
        decoding = max_seqlen_q == 1 and bool(samples.all())
        starts_q = np.concatenate([[0], ends])
        if self._deterministic and not decoding:
            # each token is a sequence of its own, which ends with it
            arrays |= {"slots": np.repeat(slots, lengths), "seqused_k": (positions + 1).astype(np.int32)}
            starts_q = np.arange(ends[-1] + 1)
            max_seqlen_q = 1
        arrays["cu_seqlens_q"] = starts_q.astype(np.int32)
        firsts = zip(batch.chunks, ends - lengths, strict=True)
        rows = [np.arange(first, first + chunk.prompt_rows) for chunk, first in firsts if chunk.prompt_rows]
        arrays["logits_indices"] = np.concatenate([ends[samples] - 1, *rows])
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        sampling = sampling_arrays(requests, seqused[samples].tolist(), self.vocab_size)
        others = sampling | self._table_changes() | {"sampled_slots": slots[samples]}
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if wanted:
            others["logprob_rows"] = np.array(wanted, dtype=np.int64)
        shape = None
        padded = {}
        if rows:
            targets = [c.request.prompt[c.start + 1 : c.start + 1 + c.prompt_rows] for c in batch.chunks if c.prompt_rows]
            others["prompt_targets"] = np.concatenate([np.array(x, dtype=np.int64) for x in targets])
        elif self._graphs is not None:
            shape = self._graphs.shape_for(len(ids), len(slots), max_seqlen_k, decoding=decoding)
            padded = {} if shape is None else pad(arrays, shape) | others
        if self._graphs is not None and padded and packed_size(padded) <= len(self._graphs.block):
            sent = send(padded, self.device, self._graphs.block)
        else:
            shape = None
            sent = send(arrays | others, self.device)
        if self._changed:
            self._device_table.view(-1).index_copy_(0, sent["table_index"], sent["table_pages"])
            self._changed.clear()
        return _Step(
            inputs=shape or self._inputs(sent, max_seqlen_q, max_seqlen_k, fresh=not starts.any() and not self._deterministic),
            sampled_slots=sent["sampled_slots"],
            logprob_rows=sent.get("logprob_rows"),
            prompt_targets=sent.get("prompt_targets"),
            sampling=SampleParams(
                **{name: sent[name] for name in sampling},
                largest_top_k=int(sampling["top_k"].max()) if "top_k" in sampling else None,
            ),
        )

    def _inputs(self, fields: Mapping[str, Tensor], queries: int, keys: int, *, fresh: bool = False) -> Inputs:
        width = -(-keys // self.page_size)
        return Inputs(
            input_ids=fields["input_ids"],
            position_ids=fields["position_ids"],
            logits_indices=fields["logits_indices"],
            paged=PagedBatch(
                kv_caches=self.kv_caches,
                slot_mapping=fields["slot_mapping"],
                cu_seqlens_q=fields["cu_seqlens_q"],
                block_table=self._device_table[:, :width].index_select(0, fields["slots"]),
                seqused_k=fields["seqused_k"],
                max_seqlen_q=queries,
                max_seqlen_k=keys,
                fresh=fresh,
                **self._options,
            ),
        )

    def _fill_table(self, chunk: Chunk) -> None:
        pages = chunk.request.pages
        slot = chunk.slot
        first = int(self._filled[slot])
        last = len(pages)
        if first != last:
            self._table[slot, first:last] = pages[first:]
            self._filled[slot] = last
            self._changed.append((slot, first, last))

    def _table_changes(self) -> dict[str, NDArray[Any]]:
        """What the device's table lacks: places in it, row after row, and the pages there."""
        if not self._changed:
            return {}
        width = self._table.shape[1]
        # a slot may have come twice if a step failed before its changes were sent: the same places with the same pages
        index = np.concatenate([np.arange(slot * width + first, slot * width + last) for slot, first, last in self._changed])
        return {"table_index": index, "table_pages": self._table.reshape(-1)[index]}


@dataclass(frozen=True, slots=True)
class Forward:
    """A launched forward whose tokens have not been sampled.

    logits: (rows, vocab), one for each of `requests`, then those of `prompt_rows`; valid until the next launch
    """

    step: _Step
    logits: Tensor
    requests: list[Request]
    prompt_rows: PromptRows


@dataclass(frozen=True, slots=True)
class _Step:
    """inputs: or the shape of a graph, if they are in its block"""

    inputs: Inputs | Shape
    sampled_slots: Tensor
    logprob_rows: Tensor | None
    prompt_targets: Tensor | None
    sampling: SampleParams


def _full_step(config: EngineConfig, max_model_len: int) -> ScheduledBatch:
    """As many tokens and sampled rows as a step may have, on page 0, with the costliest sampling."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // count, max_model_len)
    batch = ScheduledBatch()
    for slot in range(count):
        params = SamplingParams(top_p=0.9, top_k=50, frequency_penalty=0.1, logprobs=20, prompt_logprobs=20)
        request = Request(f"largest-{slot}", [0] * length, params, 1, slot=slot)
        request.pages = [0] * -(-length // config.page_size)
        batch.admitted.append(request)
        rows = min(length - 1, PROMPT_ROWS - batch.num_prompt_rows)
        batch.chunks.append(Chunk(request, slot, 0, length, True, rows))
    return batch
