"""Decoding steps as CUDA graphs: the launches of a whole forward, recorded once for each batch size and replayed in one call.

    graphs = DecodeGraphs(forward, kv_caches, max_batch=256, max_pages=128, vocab=32000, device=device)
    size = graphs.size_for(13)               # 16: the caller pads its inputs to that
    logits = graphs.run(inputs)              # (size, vocab); overwritten by the next run

A graph reads and writes the same addresses each time, so the inputs are copied into fixed buffers, one object for all sizes.
All graphs share one pool of memory. The largest is captured first, at the start, and the others when a batch of their size
first comes: the pool is as large as it ever gets, and nobody waits for sizes that never occur. Padding rows are sequences
without keys, which write nothing.

The forward is the one that eager steps take. A model that cannot be captured (one that reads something back from the device)
stays eager, and the log says why. Left out: prompts, whose steps are long enough to hide their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_serve.hf import PagedBatch

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one forward takes. input_ids (total,) int64: -(slot + 1) stands for the last token sampled in that slot."""

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    paged: PagedBatch


class Buffers:
    """The fixed addresses of a decoding step of up to `max_batch` sequences, and its logits."""

    def __init__(self, max_batch: int, max_pages: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids, self.position_ids = zeros(max_batch), zeros(max_batch)
        self.slot_mapping = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self.seqused_k = zeros(max_batch, dtype=torch.int32)
        self.block_table = zeros(max_batch, max_pages, dtype=torch.int32)
        self.rows = torch.arange(max_batch + 1, device=device)
        self.cu_seqlens_q = self.rows.int()
        self.logits = zeros(max_batch, vocab, dtype=dtype)

    def copy_from(self, inputs: Inputs) -> None:
        size, paged = len(inputs.input_ids), inputs.paged
        self.input_ids[:size].copy_(inputs.input_ids)
        self.position_ids[:size].copy_(inputs.position_ids)
        self.slot_mapping[:size].copy_(paged.slot_mapping)
        self.seqused_k[:size].copy_(paged.seqused_k)
        self.block_table[:size, : paged.block_table.shape[1]].copy_(paged.block_table)

    def clear(self, size: int) -> None:
        """Make all rows padding."""
        self.input_ids[:size], self.slot_mapping[:size], self.seqused_k[:size] = 0, -1, 0

    def view(self, size: int, kv_caches: Sequence[tuple[Tensor, Tensor]], page_size: int) -> Inputs:
        """The inputs of a step of `size` sequences of any length, at these addresses."""
        return Inputs(
            self.input_ids[:size],
            self.position_ids[:size],
            self.rows[:size],
            PagedBatch(
                kv_caches=kv_caches,
                slot_mapping=self.slot_mapping[:size],
                block_table=self.block_table[:size],
                seqused_k=self.seqused_k[:size],
                cu_seqlens_q=self.cu_seqlens_q[: size + 1],
                max_seqlen_q=1,
                max_seqlen_k=self.block_table.shape[1] * page_size,
            ),
        )


class DecodeGraphs:
    """Owner of the graphs. `forward` takes `Inputs` and returns logits (n, vocab)."""

    def __init__(
        self, forward: Callable[[Inputs], Tensor], kv_caches: Sequence[tuple[Tensor, Tensor]], *, max_batch: int,
        max_pages: int, page_size: int, vocab: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._forward, self._kv_caches, self._page_size = forward, kv_caches, page_size
        self.sizes = batch_sizes(max_batch)
        self._buffers = Buffers(self.sizes[-1], max_pages, vocab, dtype, device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._pool: Any = None

    def size_for(self, batch: int) -> int:
        """The smallest captured size that holds a batch."""
        return next(size for size in self.sizes if size >= batch)

    def run(self, inputs: Inputs) -> Tensor:
        """Logits of padded inputs; valid until the next run."""
        size = len(inputs.input_ids)
        if size not in self._replays:
            self.capture(size)
        self._buffers.copy_from(inputs)
        self._replays[size]()
        return self._buffers.logits[:size]

    def capture(self, size: int) -> None:
        """Record the forward of `size` sequences. Raises RuntimeError if the model does what a graph cannot hold."""
        self._buffers.clear(size)
        inputs, logits = self._buffers.view(size, self._kv_caches, self._page_size), self._buffers.logits[:size]

        def step() -> None:
            logits.copy_(self._forward(inputs))

        step()  # compiles kernels and makes workspaces, which must not happen while recording
        self._replays[size], self._pool = record(step, self._pool)


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ...: at most 8 rows of padding, and never more than half."""
    return [size for size in (1, 2, 4) if size < largest] + [*range(8, largest, 8), largest]


def record(function: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """A function's kernels as one call, and the pool its memory is from: a new one if None is given."""
    graph = torch.cuda.CUDAGraph()
    # other threads may allocate pinned memory meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay, graph.pool()
