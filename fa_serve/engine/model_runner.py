"""The model, the KV cache and the tensors of a step: a `ScheduledBatch` in, sampled tokens out.

    runner = ModelRunner(model, config)
    pending = runner.launch(batch)           # returns when the work is queued, not when it is done
    tokens = pending.tokens()                # waits for the device; one token for each chunk that samples

A step's numbers are put together in one block of host memory and sent in one copy. A token that was sampled by the step before
may not be known on the host yet: the device keeps the last sampled token of each slot, and an input id -(slot + 1) stands for
it. Left out: which tokens (scheduler.py), the choice of a token (sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.engine import kv_cache
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request import Request, SamplingParams
from fa_serve.engine.sampler import SampleParams, random_keys, sample
from fa_serve.engine.scheduler import Chunk, ScheduledBatch
from fa_serve.hf import PagedBatch, attention_layers, paged_forward


@dataclass(slots=True)
class PendingTokens:
    """The tokens of a launched step, on their way to the host."""

    host: Tensor
    arrived: torch.Event | None

    def tokens(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.host.tolist()
        return tokens


class ModelRunner:
    """Owner of everything that lives on the device. Before the first step it needs its cache: `allocate`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model: PreTrainedModel = model.train(False)
        self.device = model.device
        self.vocab_size = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.page_size = config.page_size
        self.max_num_seqs = config.max_num_seqs
        self.layers = attention_layers(model)
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        # per slot, on the host: the pages of its sequence, and how many of them are filled in
        self._table = np.zeros((config.max_num_seqs, 0), dtype=np.int32)
        self._filled = np.zeros(config.max_num_seqs, dtype=np.int64)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Make the KV cache; its content is lost if there was one."""
        self.kv_caches = []
        self.kv_caches = kv_cache.allocate(self.layers, num_pages, self.page_size, self.device)
        self._table = np.zeros((self.max_num_seqs, -(-max_model_len // self.page_size)), dtype=np.int32)

    def fit_num_pages(self, config: EngineConfig, max_model_len: int) -> int:
        """How many pages the device has room for beside the weights and the largest step."""
        size = kv_cache.bytes_per_page(self.layers, self.page_size)
        if self.device.type != "cuda":
            enough = self.max_num_seqs * -(-max_model_len // self.page_size)
            return min(enough, max(int(kv_cache.available_memory() * kv_cache.CPU_SHARE) // size, 1))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.allocate(1, max_model_len)
        self.launch(_largest_step(config, max_model_len)).tokens()
        peak = torch.cuda.max_memory_allocated(self.device)
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
    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        """Queue one step: forward, sampling, and the copy of the tokens back to the host."""
        step = self._prepare(batch)
        input_ids = torch.where(step.input_ids < 0, self._last_tokens[(-1 - step.input_ids).clamp(min=0)], step.input_ids)
        logits = paged_forward(self.model, input_ids, step.position_ids, step.paged, step.logits_indices)
        if not len(step.sampled_slots):
            return PendingTokens(torch.empty(0, dtype=torch.int64), None)
        tokens = sample(logits, step.sampling)
        self._last_tokens[step.sampled_slots] = tokens
        if self.device.type != "cuda":
            return PendingTokens(tokens, None)
        host = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.Event("cuda")
        arrived.record()
        return PendingTokens(host, arrived)

    def _prepare(self, batch: ScheduledBatch) -> _Step:
        for request in batch.admitted:
            self._filled[request.slot] = 0
        ids: list[int] = []
        for chunk in batch.chunks:
            self._fill_table(chunk)
            end = chunk.start + chunk.length
            ids += chunk.request.tokens[chunk.start : end]
            if end > len(chunk.request.tokens):
                ids.append(-1 - chunk.slot)
        chunks, sampling = batch.chunks, [chunk for chunk in batch.chunks if chunk.samples]
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        ends = np.cumsum(lengths)
        seqused = starts + lengths
        # token t of the batch is token t - (ends - lengths)[its chunk] of its chunk
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        rows = np.repeat(slots, lengths)
        slot_mapping = (
            self._table[rows, positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
        )
        max_seqlen_k = int(seqused.max())
        table = self._table[slots, : -(-max_seqlen_k // self.page_size)]
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)

        block = _Block()
        input_ids = block.add(np.array(ids, dtype=np.int64))
        position_ids = block.add(positions)
        slot_ids = block.add(slot_mapping)
        logits_indices = block.add(ends[samples] - 1)
        sampled_slots = block.add(slots[samples])
        cu_seqlens_q = block.add(np.concatenate([[0], ends]).astype(np.int32))
        seqused_k = block.add(seqused.astype(np.int32))
        block_table = block.add(table)
        params = _add_params(block, sampling)
        tensors = block.send(self.device)
        return _Step(
            input_ids=tensors[input_ids],
            position_ids=tensors[position_ids],
            logits_indices=tensors[logits_indices],
            sampled_slots=tensors[sampled_slots],
            paged=PagedBatch(
                kv_caches=self.kv_caches, slot_mapping=tensors[slot_ids], block_table=tensors[block_table],
                seqused_k=tensors[seqused_k], cu_seqlens_q=tensors[cu_seqlens_q], max_seqlen_q=int(lengths.max()),
                max_seqlen_k=max_seqlen_k,
            ),
            sampling=SampleParams(**{name: tensors[index] for name, index in params.items()}),
        )  # fmt: skip

    def _fill_table(self, chunk: Chunk) -> None:
        pages, slot = chunk.request.pages, chunk.slot
        if len(pages) != self._filled[slot]:
            self._table[slot, self._filled[slot] : len(pages)] = pages[self._filled[slot] :]
            self._filled[slot] = len(pages)


@dataclass(frozen=True, slots=True)
class _Step:
    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    sampled_slots: Tensor
    paged: PagedBatch
    sampling: SampleParams


class _Block:
    """Arrays of several types that travel to the device in one copy."""

    ALIGN = 16

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.generic]] = []

    def add(self, array: NDArray[np.generic]) -> int:
        self._arrays.append(np.ascontiguousarray(array))
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        starts, size = [], 0
        for array in self._arrays:
            starts.append(size)
            size += -(-array.nbytes // self.ALIGN) * self.ALIGN
        # the pinned memory goes back to torch's cache, which waits for the copy before it hands it out again
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        view = host.numpy()
        for start, array in zip(starts, self._arrays, strict=True):
            view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        block = host.to(device, non_blocking=True)
        return [
            block[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
            for start, array in zip(starts, self._arrays, strict=True)
        ]


def _largest_step(config: EngineConfig, max_model_len: int) -> ScheduledBatch:
    """As many tokens and as many sampled rows as a step may have, on page 0, with the costliest sampling."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // count, max_model_len)
    batch = ScheduledBatch()
    for slot in range(count):
        request = Request(f"largest-{slot}", [0] * length, SamplingParams(top_p=0.9, top_k=50), 1, slot=slot)
        request.pages = [0] * -(-length // config.page_size)
        batch.admitted.append(request)
        batch.chunks.append(Chunk(request, slot, 0, length, samples=True))
    return batch


def _add_params(block: _Block, sampling: Sequence[Chunk]) -> dict[str, int]:
    """Add what the sampler needs to the block, as far as some request asks for it; field of SampleParams -> index."""
    params = [chunk.request.params for chunk in sampling]
    if all(p.greedy for p in params):
        return {}
    seeds = np.array([chunk.request.seed for chunk in sampling], dtype=np.int64)
    positions = np.array([chunk.start + chunk.length for chunk in sampling], dtype=np.int64)
    fields = {
        "keys": block.add(random_keys(seeds, positions)),
        "temperature": block.add(np.array([p.temperature for p in params], dtype=np.float32)),
    }
    if any(p.top_k for p in params):
        fields["top_k"] = block.add(np.array([p.top_k or 1 << 62 for p in params], dtype=np.int64))
    if any(p.top_p < 1.0 for p in params):
        fields["top_p"] = block.add(np.array([p.top_p for p in params], dtype=np.float32))
    return fields
