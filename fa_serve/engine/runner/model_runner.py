"""The model, the KV cache and the tensors of a step: a `ScheduledBatch` in, sampled tokens out.

    runner = ModelRunner(model, config)
    runner.allocate(num_pages, max_model_len, num_states)
    forward = runner.launch(batch)           # returns when the work is queued, not when it is done
    pending = runner.sample(forward)         # the same; the masks of structured outputs are needed only now
    result = pending.read()                  # waits for the device: one token for each chunk that samples

The arrays of a step are packed into one block of host memory and sent in one copy. The device keeps the last sampled token of
each slot, because the host may not know it yet when it launches the next step. Left out: which tokens are computed
(scheduler.py) and how a token is chosen (sampler.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.encoder import ImageEncoder, find_images, require_encoder
from fa_serve.engine.images.prompt import rows_of
from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.lora.store import AdapterStore
from fa_serve.engine.runner.attention_kinds import least_group_keys, prepare_attention
from fa_serve.engine.runner.batch_arrays import BatchArrays, batch_arrays
from fa_serve.engine.runner.cuda_graphs import Inputs, OnError, StepGraphs
from fa_serve.engine.runner.forward import Forward, SentRows
from fa_serve.engine.runner.group_arrays import group_padding, with_groups
from fa_serve.engine.runner.image_arrays import ImageMemory, axis_positions
from fa_serve.engine.runner.inference import in_inference_mode
from fa_serve.engine.runner.log_probabilities import log_probabilities, processed_scores
from fa_serve.engine.runner.lora_arrays import StepAdapters, lora_arrays, lora_step, step_adapters
from fa_serve.engine.runner.padded_steps import Shape, padding
from fa_serve.engine.runner.results import PendingResult, PromptSpan
from fa_serve.engine.runner.sampled_rows import SampledRows, sampled_rows
from fa_serve.engine.runner.sampler import TokenCounts, sample
from fa_serve.engine.runner.state_arrays import check_settings_with_states, empty_state_arrays, state_arrays, state_batch
from fa_serve.engine.runner.transfer import send
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch, TowerWork
from fa_serve.engine.start.warm_up import EmptyStep, SamplingVariant
from fa_serve.hf import (
    PagedBatch,
    PagedStates,
    StateKey,
    model_layers,
    paged_forward,
    patch_states,
    take_experts,
    take_scaled_experts,
    vocab_size,
)
from fa_serve.hf.images import StepImages
from fa_serve.hf.lora.memory import detach_adapters
from fa_serve.hf.surgery.fuse.fusion import cached_layers, cached_states, fuse_model, unfuse_model
from fa_serve.hf.surgery.fuse.latent import PLAIN_TOKENS
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.launching.compilations import num_compilations
from fa_serve.ops import StateTensors
from fa_serve.ops.deterministic import deterministic_mode
from fa_serve.spec import TREE_SPLITS

log = logging.getLogger("fa_serve.engine")


class ModelRunner:
    """Owner of everything on the device. Call `allocate` before the first step.

    drafting: this is a draft model, whose draws ignore penalties and need no log-probabilities
    on_graph_error: called if a graph fails, before steps run without graphs. Raises if other ranks would still use theirs
    draft:    the runner of the draft model (draft_model.py), whose cache has the same pages; None if there is no draft model
    tokens_ahead: the forward reads token p + tokens_ahead of the sequence at position p: 1 for a draft head, otherwise 0

    Raises UnsupportedModelError for a model that the engine cannot run, and ParameterError for settings that the engine does
    not have for this kind of model.
    """

    tokens_ahead = 0

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        drafting: bool = False,
        on_graph_error: OnError = lambda error: None,
        draft: ModelRunner | None = None,
    ) -> None:
        self.draft = draft
        self._on_graph_error = on_graph_error
        self._drafting = drafting
        self.cascades = config.cascade_attention and not (drafting or config.deterministic)
        self.model: PreTrainedModel = model.train(False)
        self.device = model.device
        self.vocab_size = vocab_size(model)
        self.page_size = config.page_size
        self.eager = config.eager or self.device.type != "cuda"
        self.fuses = config.fuses
        unfuse_model(model)
        detach_adapters(model)
        self.adapters: AdapterStore | None = None
        self.max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        if self.fuses or config.deterministic:
            take_experts(model)
            take_scaled_experts(model)
        self.layers, states, self.indexers = model_layers(model)
        prepare_attention(model, config, self.indexers)
        self.state_memory = kv_cache.StateMemory(states, config.page_size, config.max_num_seqs)
        if states:
            check_settings_with_states(type(model).__name__, config, drafting=drafting)
            patch_states(model)
        self.images = "a draft model takes no images" if drafting else find_images(model, config)
        self._deterministic = config.deterministic
        self._processed = config.logprobs_mode == "processed_logprobs"
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.invariant = config.deterministic
        self._max_drafts = config.max_drafts
        # fields of every PagedBatch
        self._options: dict[str, Any] = {"num_splits": TREE_SPLITS} if config.deterministic else {}
        if config.kv_cache_dtype == "fp8":
            self.layers = {i: replace(layer, kv_dtype=torch.float8_e4m3fn) for i, layer in self.layers.items()}
            self._options["descales"] = kv_cache.descales(model, self.vocab_size, self.layers)
        if config.attention_precision != "bf16":
            self._options["precision"] = config.attention_precision
        self.kv_caches: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[StateKey, StateTensors] = {}
        self._graphs: StepGraphs | None = None
        self._image_memory: ImageMemory | None = None
        self._counts: TokenCounts | None = None
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self._block_table = BlockTable(config.max_num_seqs, 0, self.device)

    @property
    def window(self) -> int | None:
        """The longest window of any layer, including the draft model's, in keys before a token; None if a layer has none."""
        layers = [*self.layers.values(), *(self.draft.layers.values() if self.draft else ())]
        lefts = [layer.window_size[0] for layer in layers]
        return None if min(lefts, default=-1) < 0 else max(lefts)

    def fuse(self) -> int:
        """Fuse layers, routers and shared experts of the model where that is possible. Returns how many layers are fused."""
        fused = fuse_model(self.model, deterministic=self._deterministic)
        self.layers = cached_layers(self.model, self.layers)
        self.state_memory = replace(self.state_memory, specs=cached_states(self.model, self.state_memory.specs))
        if "descales" in self._options and any(layer.values_in_keys for layer in self.layers.values()):
            self._options["descales"] = kv_cache.descales(self.model, self.vocab_size, self.layers)
        return fused

    def refit(self) -> None:
        """Fuse layers and capture graphs again, because weights have moved in memory. The KV cache stays."""
        detach_adapters(self.model)
        unfuse_model(self.model)
        if self.fuses or self._deterministic:
            take_scaled_experts(self.model)
        if self.fuses:
            self.fuse()
        if self.adapters is not None:
            self.adapters.memory.settle(self.model)
        if self._graphs is not None and self.kv_caches:
            self._graphs.close()
            self.make_graphs()

    @torch.inference_mode()
    def rescale(self) -> None:
        """Compute the scales of a float8 cache again, because the weights have changed."""
        if "descales" in self._options:
            kv_cache.rescale(self._options["descales"], self.model, self.vocab_size, self.layers)

    def allocate(self, num_pages: int, max_model_len: int, num_states: int = 0) -> None:
        """Allocate the KV cache and the states. The content of earlier ones is lost."""
        self.kv_caches = {}
        self.states = {}
        self._graphs = None
        self.kv_caches = kv_cache.allocate(self.layers | self.indexers, num_pages, self.page_size, self.device)
        self.states = self.state_memory.allocate(num_states, self.device)
        self._block_table = BlockTable(self.max_num_seqs, -(-max_model_len // self.page_size), self.device)
        if self.draft is not None:
            self.draft.allocate(num_pages, max_model_len)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the keys and values of one page, including those of the draft model."""
        own = kv_cache.bytes_per_page((self.layers | self.indexers).values(), self.page_size)
        return own + (self.draft.bytes_per_page if self.draft else 0)

    @torch.inference_mode()
    def make_graphs(self) -> bool:
        """Capture the largest decoding step. Returns False, and logs why, if this model cannot be captured.

        Call this when the cache has its final address, and again after the cache or the weights have moved.
        """
        if isinstance(self.images, ImageEncoder):
            self._image_memory = ImageMemory(self._max_tokens, self.images.reader.hidden, self.model.dtype, self.device)
        graphs = StepGraphs(
            self.model,
            self._forward,
            self._inputs,
            self.device,
            max_batch=self.max_num_seqs,
            max_tokens=self._max_tokens,
            max_keys=self._block_table.max_pages * self.page_size,
            max_drafts=self._max_drafts,
            vocab=self.vocab_size,
            dtype=self.model.dtype,
            # with other options, attention plans for the longest possible prompt, not for the longest one in the batch
            prompts=self._options.keys() <= {"num_splits"},
            states=bool(self.states),
            on_error=self._on_graph_error,
            lora=self.adapters is not None,
            least_group_keys=least_group_keys(self.model, self.layers.values(), wanted=self.cascades),
            fresh_tokens=PLAIN_TOKENS if any(layer.values_in_keys for layer in self.layers.values()) else None,
        )
        try:
            graphs.capture_largest()
        except Exception as error:
            self._on_graph_error(error)
            log.warning("decoding runs without CUDA graphs, because the first capture failed: %s", error)
            return False
        self._graphs = graphs
        if self.draft is not None:
            self.draft.make_graphs()
        return True

    def close(self) -> None:
        """Free the graphs and the KV cache. No step can run until `allocate` is called again."""
        if self._graphs is not None:
            self._graphs.close()
        self.kv_caches = {}
        self.states = {}
        if isinstance(self.images, ImageEncoder):
            self.images.close()
        if self.draft is not None:
            self.draft.close()

    @torch.inference_mode()
    def prepare_one(self) -> bool:
        """Capture one more graph ahead of time, of this model and the draft model in turn. Returns False if none is left.

        After the first call, steps of either model no longer capture graphs.
        """
        graphs = [x._graphs for x in (self, self.draft) if x is not None and x._graphs is not None]
        for each in graphs:
            each.capture_ahead_only()
        return any(each.prepare_one() for each in sorted(graphs, key=lambda each: each.num_captures))

    @property
    def num_captures(self) -> int:
        """How many CUDA graphs have been captured, including those of the draft model."""
        own = 0 if self._graphs is None else self._graphs.num_captures
        return own + (0 if self.draft is None else self.draft.num_captures)

    def preparations(self) -> tuple[int, int]:
        """How many kernels have been compiled or loaded so far, and how many CUDA graphs have been captured."""
        return sum(num_compilations()), self.num_captures

    @torch.inference_mode()
    def run_warm_up(self, work: EmptyStep | SamplingVariant) -> None:
        """Compute one part of the warm-up plan. No sequence may run."""
        if isinstance(work, EmptyStep):
            self._run_empty(work)
        else:
            self._sample_empty(work)

    def _run_empty(self, step: EmptyStep) -> None:
        """Compute a step that writes no keys, and reads the pages that slot 0 had last, whatever they hold."""
        lengths = [1] * (step.batch - step.num_long) + [step.queries] * step.num_long
        queries = step.queries
        arrays = padding(Shape(step.num_tokens, len(lengths), queries, step.keys))
        arrays["seqused_k"] = np.array(lengths, dtype=np.int32)
        arrays["cu_seqlens_q"] = np.cumsum([0, *lengths], dtype=np.int32)
        if step.logits:
            arrays["logits_indices"] = np.zeros(step.logits, dtype=np.int64)
        if self.state_memory:
            arrays |= empty_state_arrays(lengths)
        variants = [arrays, arrays | group_padding(step.batch)] if self.cascades and queries == 1 else [arrays]
        if self.adapters is not None:  # all tokens use adapter slot 0, which is still empty
            adapters = StepAdapters(np.zeros(step.num_tokens, dtype=np.int64), False, ())
            variants.append(arrays | lora_arrays(adapters, np.zeros(0, np.int64), step.num_tokens, queries))
        for fields in variants:
            inputs = self._inputs(send(fields, self.device), queries, step.keys, fresh=step.fresh)
            paged = replace(inputs.paged, blocks=step.blocks)
            self._forward(replace(inputs, paged=paged))

    def _sample_empty(self, variant: SamplingVariant) -> None:
        """Sample rows of equal logits with these parameters."""
        count = variant.rows
        sequences = variant.sequences(self.vocab_size)
        if variant.params.penalised:
            for slot in dict.fromkeys(variant.slots):
                self._token_counts().start(slot, [0, 0], 1)
        arrays, rows = variant.arrays(sequences, self.vocab_size)
        num_prompt_logits = len(rows.get("prompt_targets", ()))
        spans = [PromptSpan(sequences[0], 1, 1 + num_prompt_logits)] if num_prompt_logits else []
        logits = torch.zeros(count + num_prompt_logits, self.vocab_size, dtype=self.model.dtype, device=self.device)
        logprob_rows = list(range(len(rows.get("logprob_rows", ()))))
        sampled = SampledRows(arrays, rows, sequences, logprob_rows, spans)
        sent = SentRows.of(sampled, send(sampled.arrays, self.device))
        self.sample(Forward(logits, sampled, sent), variant.masks(self.vocab_size)).read()

    @property
    def _array_options(self) -> dict[str, Any]:
        """Arguments of `batch_arrays` and `sampled_rows`."""
        return {"vocab_size": self.vocab_size, "drafting": self._drafting, "tokens_ahead": self.tokens_ahead}

    @in_inference_mode
    def launch(self, batch: ScheduledBatch) -> Forward:
        """Queue the forward of one step, and its part of the encoding of images."""
        towers = batch.towers
        watch = self.encode(towers) if towers is not None and towers.is_read else None
        for sequence in batch.admitted:
            self._block_table.clear(sequence.slot)
            if sequence.request.params.penalised and not self._drafting:
                self._token_counts().start(sequence.slot, sequence.tokens, sequence.num_prompt_tokens)
        arrays = batch_arrays(batch, self._block_table, page_size=self.page_size, **self._array_options)
        if self.states:
            arrays.inputs.update(state_arrays(batch))
        images = None
        if arrays.images:
            images = require_encoder(self.images).step(arrays.images, arrays.inputs["input_ids"])
        adapters = None if self.adapters is None else step_adapters(batch, self.adapters.pool.slot)
        # The results of the step before are awaited for drafts, so the device is idle now: what it samples comes later.
        rows = None if batch.num_drafts else sampled_rows(batch, arrays, **self._array_options)
        inputs, sent = self._prepare(arrays, rows, adapters, images)
        logits = self._run(inputs)[: len(arrays.inputs["logits_indices"])]
        if rows is None:
            rows = sampled_rows(batch, arrays, **self._array_options)
            sent = send(rows.arrays, self.device)
        if self._graphs is not None and isinstance(inputs, Shape):
            self._graphs.steps.stage(inputs)
        if towers is not None and not towers.is_read:
            watch = self.encode(towers)
        return Forward(logits, rows, SentRows.of(rows, sent), watch)

    @torch.inference_mode()
    def encode(self, work: TowerWork) -> Stopwatch:
        """Queue a step's part of the encoding of images: within `launch`, or for a step without tokens. Returns a stopwatch."""
        return require_encoder(self.images).advance(work)

    @in_inference_mode
    def sample(self, forward: Forward, masks: Mapping[int, NDArray[np.int32]] | None = None) -> PendingResult:
        """Queue the sampling of the newest forward and the copy of its tokens to the host.

        masks: for rows of `forward.sequences`, which tokens may come next, one bit for each token
        """
        rows = forward.rows
        sent = forward.sent
        sequences = rows.sequences
        logits = forward.logits[: len(sequences)]
        prompt_logprobs: tuple[Tensor, ...] = ()
        if sent.prompt_targets is not None:
            top = max(span.sequence.request.params.prompt_logprobs or 0 for span in rows.prompt_spans)
            prompt_logprobs = self._log_probabilities(forward.logits[len(sequences) :], sent.prompt_targets, top)
        if not sequences:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return PendingResult(none, spans=rows.prompt_spans, prompt_logprobs=prompt_logprobs)
        sampling = sent.sampling
        if masks:
            mask_rows = np.array(list(masks), dtype=np.int64)
            more = send({"mask_rows": mask_rows, "mask": np.stack(list(masks.values()))}, self.device)
            sampling = replace(sampling, mask=more["mask"], mask_rows=more["mask_rows"])
        slots = sent.sampled_slots
        # An INVALID_TOKEN ends its sequence. A step that is launched before the host has read it embeds token 0 instead.
        tokens = sample(logits, sampling, self._counts, slots, self._last_tokens)
        logprobs: tuple[Tensor, ...] = ()
        wanted = [(row, sequences[row]) for row in rows.logprob_rows]
        if (index := sent.logprob_rows) is not None:
            top = max(sequence.request.params.logprobs or 0 for _, sequence in wanted)
            scores = processed_scores(logits, tokens, sampling, self._counts, slots) if self._processed else logits
            logprobs = self._log_probabilities(scores[index], tokens[index], top)
        if sampling.repetition is not None:
            self._token_counts().record(slots, tokens, sampling)
        return PendingResult(tokens, wanted, logprobs, rows.prompt_spans, prompt_logprobs)

    def _prepare(
        self, arrays: BatchArrays, rows: SampledRows | None, adapters: StepAdapters | None, images: StepImages | None
    ) -> tuple[Inputs | Shape, Mapping[str, Tensor]]:
        """Send the arrays of a step to the device: into the block of the graphs if there is a graph for the step.

        rows: what the step samples; None if it is sent later

        Returns what the forward takes, which is a shape if its inputs are in that block, and what has been sent.
        """
        others = self._block_table.changes() | ({} if rows is None else rows.arrays)
        shape = None
        graphs = self._graphs
        is_captured = arrays.is_plain or self._captures(arrays, images)
        if graphs is not None and is_captured and not (adapters is not None and adapters.is_eager):
            shape = graphs.shape_of(arrays, adapters is not None)
        queries = arrays.max_seqlen_q if shape is None else shape.queries
        if adapters is not None:
            tokens = arrays.num_tokens if shape is None else shape.tokens
            arrays.inputs.update(lora_arrays(adapters, arrays.inputs["logits_indices"], tokens, queries))
        sent = None
        if graphs is not None and shape is not None:
            padded = graphs.steps.padded(arrays.inputs, shape)
            padded.extend(others)
            if images is not None and self._image_memory is not None:
                self._image_memory.fill(images)
            if padded.size <= graphs.block.numel():
                sent = send(padded, self.device, graphs.block)
        if sent is None:
            shape = None
            sent = send(arrays.inputs | others, self.device)
        self._block_table.apply(sent)
        inputs = shape or self._inputs(sent, queries, arrays.max_seqlen_k, fresh=arrays.fresh, adapters=adapters)
        if isinstance(inputs, Inputs) and (images is not None or arrays.blocks):
            paged = replace(inputs.paged, blocks=arrays.blocks)
            inputs = replace(inputs, images=images, paged=paged)
        return inputs, sent

    def _captures(self, arrays: BatchArrays, images: StepImages | None) -> bool:
        """Whether a graph may run a step with images. If so, adds "image_rows" to the inputs."""
        if self._image_memory is None or images is None or images.deep or arrays.blocks:
            return False
        arrays.inputs["image_rows"] = rows_of(arrays.images, arrays.num_tokens)
        return True

    def _inputs(
        self,
        fields: Mapping[str, Tensor],
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        fresh: bool = False,
        adapters: StepAdapters | None = None,
    ) -> Inputs:
        """The inputs of a forward. fields: named as in `padded_steps.padding`, on the device"""
        paged = PagedBatch(
            kv_caches=self.kv_caches,
            slot_mapping=fields["slot_mapping"],
            cu_seqlens_q=fields["cu_seqlens_q"],
            block_table=self._block_table.rows(fields["slots"], -(-max_seqlen_k // self.page_size)),
            seqused_k=fields["seqused_k"],
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            fresh=fresh and not self._deterministic,
            states=PagedStates(self.states, state_batch(fields, self.page_size, max_seqlen_q)) if self.states else None,
            **self._options,
        )
        return Inputs(
            input_ids=fields["input_ids"],
            position_ids=axis_positions(fields),
            images=None if self._image_memory is None else self._image_memory.images(fields),
            logits_indices=fields["logits_indices"],
            slots=fields["slots"],
            lora=None if self.adapters is None else lora_step(self.adapters.memory, fields, adapters, max_seqlen_q),
            paged=with_groups(paged, fields, self._block_table, self.page_size),
        )

    def _run(self, inputs: Inputs | Shape) -> Tensor:
        """The logits of one forward. The rows that are sampled come before those of prompt tokens."""
        if isinstance(inputs, Inputs):
            return self._forward(inputs)
        assert self._graphs is not None
        try:
            return self._graphs.run(inputs)
        except Exception as error:
            self._on_graph_error(error)
            plain = self._graphs.inputs(inputs)
            self._graphs = None
            log.warning("steps run without CUDA graphs from now on, because a capture or a replay failed: %s", error)
            return self._forward(plain)

    def keeping_features(self, batch: PagedBatch) -> AbstractContextManager[None]:
        """A context for a forward of the model that this one drafts for. Only a draft head needs it: it keeps features."""
        return nullcontext()

    def _forward(self, inputs: Inputs) -> Tensor:
        last = self._last_tokens[(-1 - inputs.input_ids).clamp(min=0)]
        input_ids = torch.where(inputs.input_ids < 0, last, inputs.input_ids)
        keeping = nullcontext() if self.draft is None else self.draft.keeping_features(inputs.paged)
        serving = nullcontext() if self.adapters is None else self.adapters.memory.holder.serving(inputs.lora)
        placing: AbstractContextManager[None] = nullcontext()
        if inputs.images is not None:
            placing = require_encoder(self.images).reader.placing(inputs.images)
        with keeping, serving, placing, deterministic_mode(self._deterministic):
            return paged_forward(self.model, input_ids, inputs.position_ids, inputs.paged, inputs.logits_indices)

    def _log_probabilities(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, ...]:
        with deterministic_mode(self._deterministic):
            return log_probabilities(logits, tokens, top)

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self.max_num_seqs, self.vocab_size, self.device)
        return self._counts
