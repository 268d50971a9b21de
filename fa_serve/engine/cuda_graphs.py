"""Decoding steps as CUDA graphs: the launches of a whole forward, recorded once for each shape and replayed in one call.

    graphs = DecodeGraphs(forward, kv_caches, table, max_batch=256, page_size=16, vocab=32000, dtype=dtype)
    shape = graphs.shape_for(13, 700)        # (16, 1024): sequences, to which the caller pads, and keys of the longest
    views = send(arrays, device, graphs.block)
    logits = graphs.run(shape)               # (size, vocab); overwritten by the next run

A graph reads and writes the same addresses each time, so a step's numbers are sent into a fixed block of memory, one for all
graphs: first FIELDS, each of them `size` long, then whatever the caller likes. The pages of each sequence are taken from its
row of the device's table. How attention splits its keys among the SMs is fixed when it is recorded and depends on the longest
sequence, so there are graphs for a few lengths (LENGTHS) of each size: at most len(sizes) * (len(LENGTHS) + 1).

All graphs share one pool of memory. The largest is captured first, at the start, so that the pool is as large as it ever gets;
the others when a step of their shape first comes, or before that, one by one, while there is nothing else to do: `prepare_one`,
which has kernels of prompts compiled as well. Who prepares would rather not wait for a capture: a step then takes a graph that
is a little too large, if there is one. Padding rows are sequences without keys, which write nothing.

The forward is the one that eager steps take. A model that cannot be captured (one that reads something back from the device)
stays eager, and the log says why. Left out: prompts, whose steps are long enough to hide their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.transfer import packed_size, unpack
from fa_serve.hf import PagedBatch

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one forward takes. input_ids (total,) int64: -(slot + 1) stands for the last token sampled in that slot."""

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    paged: PagedBatch


FIELDS = {"input_ids": np.int64, "position_ids": np.int64, "slot_mapping": np.int64, "slots": np.int64, "seqused_k": np.int32}
LENGTHS = (1024, 4096, 16384)  # keys of the longest sequence, beside the longest there can be
ROOM = 1 << 20  # bytes of the block for what comes after FIELDS
# Steps with prompts that differ in the kernels that they compile: (decoding sequences, tokens of a prompt). Attention has tiles
# for up to 64 queries and for more, and shares keys in another way with the batch. On Hopper, 512 requests of many lengths were
# left with one kernel to compile after these and the captures, with 18 before: that of their sampling.
REHEARSALS = ((0, 128), (20, 128), (40, 128), (100, 128), (1, 128), (1, 48), (0, 48))


class DecodeGraphs:
    """Owner of the graphs. `forward` takes `Inputs` and returns logits (n, vocab); table: (num_slots, max_pages), int32."""

    def __init__(
        self, forward: Callable[[Inputs], Tensor], kv_caches: Sequence[tuple[Tensor, Tensor]], table: Tensor, *, max_batch: int,
        page_size: int, vocab: int, dtype: torch.dtype, **options: Any,
    ) -> None:  # fmt: skip
        self._forward, self._kv_caches, self._table, self._page_size = forward, kv_caches, table, page_size
        self._options = options  # of PagedBatch
        self.sizes = batch_sizes(max_batch)
        longest = table.shape[1] * page_size
        self.lengths = [*(length for length in LENGTHS if length < longest), longest]
        largest = self.sizes[-1]
        self.block = torch.zeros(packed_size(_fields(largest)) + ROOM, dtype=torch.uint8, device=table.device)
        self._rows = torch.arange(largest + 1, device=table.device)
        self._cu_seqlens_q = self._rows.int()
        self._logits = torch.zeros(largest, vocab, dtype=dtype, device=table.device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Any = None
        self._missing: list[tuple[int, int]] | None = None  # to be captured, the next one last; None: nobody prepares
        prompts = 0 if options.get("num_splits") else len(REHEARSALS)  # with fixed splits every token is a sequence
        self._rehearsals = list(reversed(REHEARSALS[:prompts]))

    def shape_for(self, batch: int, longest: int) -> tuple[int, int]:
        """The smallest shape that holds a batch whose longest sequence has so many keys; if it is not captured and others are
        being prepared, a captured one of up to a quarter more sequences, or of longer ones."""
        size = next(size for size in self.sizes if size >= batch)
        shape = size, next(length for length in self.lengths if length >= longest)
        if self._missing is None or shape in self._replays:
            return shape
        held = [other for other in self._replays if size <= other[0] <= size + size // 4 and other[1] >= shape[1]]
        return min(held, default=shape)

    def prepare_one(self) -> bool:
        """For an idle moment, between steps: one step with a prompt, or the capture of one shape. False if nothing is left.

        A failure is logged, and nothing is prepared any more; steps still record what they need.
        """
        if self._missing is None:
            shapes = [(size, length) for length in self.lengths for size in self.sizes]
            # those of few keys first, and of these the powers of two
            self._missing = sorted(shapes, key=lambda shape: (shape[1], shape[0] & (shape[0] - 1) != 0, shape), reverse=True)
        try:
            if self._rehearsals:
                self._forward(self._rehearsal(*self._rehearsals.pop()))
                return True
            while self._missing:
                if (shape := self._missing.pop()) not in self._replays:
                    self._capture_empty(shape)
                    return True
        except RuntimeError as error:
            log.warning("no more decoding steps are captured in advance: %s", error)
            self._missing, self._rehearsals = [], []
        return False

    def run(self, shape: tuple[int, int]) -> Tensor:
        """Logits of the step in the block, whose arrays have been padded to the shape; valid until the next run."""
        if shape in self._replays:
            self._replays[shape]()
        else:
            self._capture(shape)
        return self._logits[: shape[0]]

    def capture_largest(self) -> None:
        """To be called first. Raises RuntimeError if the model does what a graph cannot hold."""
        self._capture_empty((self.sizes[-1], self.lengths[-1]))

    def inputs(self, shape: tuple[int, int]) -> Inputs:
        """What is in the block."""
        size, length = shape
        fields = unpack(self.block, _fields(size))
        return Inputs(
            fields["input_ids"],
            fields["position_ids"],
            self._rows[:size],
            PagedBatch(
                kv_caches=self._kv_caches,
                slot_mapping=fields["slot_mapping"],
                block_table=self._table[:, : -(-length // self._page_size)].index_select(0, fields["slots"]),
                seqused_k=fields["seqused_k"],
                cu_seqlens_q=self._cu_seqlens_q[: size + 1],
                max_seqlen_q=1,
                max_seqlen_k=length,
                **self._options,
            ),
        )

    def _rehearsal(self, decoding: int, length: int) -> Inputs:
        """A step that writes no keys and reads those of page 0, whatever they are."""
        decoding, length = min(decoding, self.sizes[-1] - 1), min(length, self._table.shape[1] * self._page_size)
        lengths = torch.tensor([1] * decoding + [length], dtype=torch.int32, device=self._table.device)
        total, batch = decoding + length, decoding + 1
        zeros = torch.zeros(total, dtype=torch.int64, device=self._table.device)
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return Inputs(
            zeros,
            zeros,
            (ends[1:] - 1).long(),
            PagedBatch(
                kv_caches=self._kv_caches,
                slot_mapping=zeros - 1,
                block_table=self._table.new_zeros(batch, -(-length // self._page_size)),
                seqused_k=lengths,
                cu_seqlens_q=ends,
                max_seqlen_q=length,
                max_seqlen_k=length,
                fresh=decoding == 0,
                **self._options,
            ),
        )

    def _capture_empty(self, shape: tuple[int, int]) -> None:
        """Capture a step of padding alone."""
        fields = unpack(self.block, _fields(shape[0]))
        for name, tensor in fields.items():
            tensor.fill_(-1 if name == "slot_mapping" else 0)
        self._capture(shape)

    def _capture(self, shape: tuple[int, int]) -> None:
        """Compute the step in the block, and record how."""

        def step() -> None:
            self._logits[: shape[0]].copy_(self._forward(self.inputs(shape)))

        step()  # compiles kernels and makes workspaces, which must not happen while recording
        try:
            self._replays[shape], self._pool = record(step, self._pool)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # which torch does not do by itself while it records
            self._replays[shape], self._pool = record(step, self._pool)


def _fields(size: int) -> dict[str, NDArray[Any]]:
    return {name: np.empty(size, dtype=dtype) for name, dtype in FIELDS.items()}


def pad(arrays: dict[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
    """A decoding step with rows added that hold no keys and write none."""
    padded = {name: np.zeros(size, dtype=array.dtype) for name, array in arrays.items()}
    padded["slot_mapping"][:] = -1
    for name, array in arrays.items():
        padded[name][: len(array)] = array
    return padded


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ...: at most 8 rows of padding, and never more than half."""
    return [size for size in (1, 2, 4) if size < largest] + [*range(8, largest, 8), largest]


def record(function: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """A function's kernels as one call, and the pool its memory is from: a new one if None is given.

    Unlike `torch.cuda.graph` it leaves the allocator its cache, which the next prompts would have to fill again.
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # other threads may allocate pinned memory meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    return graph.replay, graph.pool()


@lru_cache(maxsize=1)
def _capture_stream() -> Any:
    """One for all graphs, because cuBLAS keeps a workspace for each stream."""
    stream: Any = torch.cuda.Stream
    return stream()
