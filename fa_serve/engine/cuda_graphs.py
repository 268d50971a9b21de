"""Steps as CUDA graphs: the launches of a whole forward, recorded once for each shape and replayed in one call.

    graphs = StepGraphs(forward, inputs, device, max_batch=256, max_tokens=8192, max_keys=4096, vocab=32000, dtype=dtype)
    shape = graphs.shape_for(13, 13, 700, decoding=True)         # Shape(16, 16, 1, 1024), to which the caller pads
    views = send(pad(arrays, shape), device, graphs.block)
    logits = graphs.run(shape)               # (shape.batch, vocab); overwritten by the next run

A graph reads and writes the same addresses each time, so a step's numbers are sent into a fixed block of memory, one for all
graphs: first those of `pad`, then whatever the caller likes. The pages of each sequence are taken from its row of the device's
table. How attention splits its keys among the SMs is fixed when it is recorded and depends on the longest sequence, so there
are graphs for a few lengths (LENGTHS) of each size. What is decided by lengths that only the device knows is decided anew.

Decoding has a graph for each size of batch: the largest is captured at the start, the others when a step of their shape first
comes. Steps with prompts are of too many shapes for that: one is captured when it has come SIGHTINGS times, and never more than
MOST of them, padded to TOKENS. So the GPU does not wait for the launches of small models, and of small steps of large ones. In
idle moments `prepare_one` captures in advance what is likely, and has kernels of the other prompts compiled. Who prepares would
rather not wait for a capture: a step then takes a graph that is a little too large, if there is one. All graphs share one pool
of memory; of prompts the largest is captured before any other, so that the pool is as large as it ever gets.

The forward is the one that eager steps take. A model that cannot be captured (one that reads something back from the device)
stays eager, and the log says why. Left out: steps that want log-probabilities of prompts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.transfer import packed_size, send, unpack
from fa_serve.hf import PagedBatch

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one forward takes. input_ids (total,) int64: -(slot + 1) stands for the last token sampled in that slot."""

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    paged: PagedBatch


class Shape(NamedTuple):
    """Upper bounds of a recorded step: tokens, sequences, tokens of one sequence (1: each decodes), keys of one."""

    tokens: int
    batch: int
    queries: int
    keys: int


class MakeInputs(Protocol):
    """fields: those of `pad`, on the device"""

    def __call__(self, fields: Mapping[str, Tensor], queries: int, keys: int, *, fresh: bool = False) -> Inputs: ...


LENGTHS = (1024, 4096, 16384)  # keys of the longest sequence, beside the longest there can be
ROOM = 1 << 20  # bytes of the block for what comes after the fields
TOKENS = 64  # steps with prompts are padded to a multiple of it: little beside what a step that must wait for launches costs
BATCHES = (16, 64)  # sequences of such steps, beside the most there can be
SIGHTINGS = 2  # recording takes the host about as long as one step that it saves: 9 to 18 ms on an H200, with 28 layers
MOST = 256
AHEAD = 512  # tokens of a step with prompts up to which it is captured in advance, and the longest there can be
# Steps with prompts that differ in the kernels that they compile: (decoding sequences, tokens of a prompt). Attention has tiles
# for up to 64 queries and for more, and shares keys in another way with the batch. On Hopper, 512 requests of many lengths were
# left with one kernel to compile after these and the captures, with 18 before: that of their sampling.
REHEARSALS = ((0, 128), (20, 128), (40, 128), (100, 128), (1, 128), (1, 48), (0, 48))


class StepGraphs:
    """Owner of the graphs. `forward` takes what `inputs` makes and returns logits (n, vocab).

    prompts: record steps with prompts too; rehearse: run some of them in idle moments
    """

    def __init__(
        self,
        forward: Callable[[Inputs], Tensor],
        inputs: MakeInputs,
        device: torch.device,
        *,
        max_batch: int,
        max_tokens: int,
        max_keys: int,
        vocab: int,
        dtype: torch.dtype,
        prompts: bool,
        rehearse: bool,
    ) -> None:
        self._forward = forward
        self._make_inputs = inputs
        self._device = device
        self._prompts = prompts
        self.sizes = batch_sizes(max_batch)
        self.lengths = [*(length for length in LENGTHS if length < max_keys), max_keys]
        self._batches = [*(size for size in BATCHES if size < max_batch), max_batch]
        most = _rounded(max_tokens)
        self._largest = Shape(most, max_batch, most, max_keys)
        self.block = torch.zeros(packed_size(padding(self._largest)) + ROOM, dtype=torch.uint8, device=device)
        self._logits = torch.zeros(max_batch, vocab, dtype=dtype, device=device)
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._seen: Counter[Shape] = Counter()
        self._pool: Any = None
        self._missing: list[Shape] | None = None  # to be captured, the next one last; None: nobody prepares
        self._rehearsals = list(reversed(REHEARSALS)) if rehearse else []

    def shape_for(self, tokens: int, batch: int, longest: int, *, decoding: bool) -> Shape | None:
        """The smallest shape that holds so many tokens of so many sequences, the longest of which has so many keys.

        If it is not captured: another one that is, of as many tokens or, while decoding steps are being prepared, up to a
        quarter more. None for a step with prompts that is not worth a capture.
        """
        keys = next(length for length in self.lengths if length >= longest)
        if decoding:
            size = next(size for size in self.sizes if size >= batch)
            shape = Shape(size, size, 1, keys)
            limit = size + size // 4
        else:
            tokens = _rounded(tokens)
            limit = tokens
            size = next(size for size in self._batches if size >= batch)
            shape = Shape(tokens, size, tokens, keys)
        if shape in self._replays or (decoding and self._missing is None):
            return shape
        held = [
            x
            for x in self._replays
            if shape.tokens <= x.tokens <= limit and x.batch >= size and x.keys >= keys and (x.queries == 1) == decoding
        ]
        if held or decoding:
            return min(held, default=shape)
        self._seen[shape] += 1
        return shape if self._seen[shape] >= SIGHTINGS and self._make_room() else None

    def _make_room(self) -> bool:
        """Whether another step with prompts may be captured; the largest one has been."""
        if self._prompts and self._largest not in self._replays:
            try:
                self._capture_empty(self._largest)
            except Exception as error:
                log.warning("steps with prompts run without CUDA graphs: %s", error)
                self._prompts = False
        return self._prompts and sum(x.queries > 1 for x in self._replays) < MOST

    def prepare_one(self) -> bool:
        """For an idle moment, between steps: one step with a prompt, or the capture of one shape. False if nothing is left.

        A failure is logged, and nothing is prepared any more; steps still record what they need.
        """
        if self._missing is None:
            shapes = [Shape(size, size, 1, keys) for keys in self.lengths for size in self.sizes]
            if self._prompts:
                few = range(TOKENS, min(AHEAD, self._largest.tokens) + 1, TOKENS)
                sizes = [(tokens, batch) for tokens in {*few, self._largest.tokens} for batch in self._batches]
                shapes += [Shape(tokens, batch, tokens, keys) for tokens, batch in sizes for keys in self.lengths[:2]]
            # those of few keys first, of these decoding before prompts, and of these the powers of two
            self._missing = sorted(shapes, key=lambda x: (x.keys, x.queries > 1, x.batch & (x.batch - 1) != 0, x), reverse=True)
        try:
            if self._rehearsals:
                self._forward(self._rehearsal(*self._rehearsals.pop()))
                return True
            while self._missing:
                shape = self._missing.pop()
                if shape not in self._replays and (shape.queries == 1 or self._make_room()):
                    if shape != self._largest:
                        self._capture_empty(shape)
                    return True
        except Exception as error:  # Triton's are no RuntimeErrors, and a step fails by itself if it has to
            log.warning("no more steps are captured in advance: %s", error)
            self._missing = []
            self._rehearsals = []
        return False

    def run(self, shape: Shape) -> Tensor:
        """Logits of the step in the block, whose arrays have been padded to the shape; valid until the next run."""
        if shape in self._replays:
            self._replays[shape]()
        else:
            self._capture(shape)
        return self._logits[: shape.batch]

    def capture_largest(self) -> None:
        """Of decoding; to be called first. Raises whatever the model or a kernel does that a graph cannot hold."""
        self._capture_empty(Shape(self.sizes[-1], self.sizes[-1], 1, self.lengths[-1]))

    def inputs(self, shape: Shape) -> Inputs:
        """What is in the block."""
        return self._make_inputs(unpack(self.block, padding(shape)), shape.queries, shape.keys)

    def _rehearsal(self, decoding: int, length: int) -> Inputs:
        """A step that writes no keys and reads what slot 0 had, whatever it is."""
        decoding = min(decoding, self.sizes[-1] - 1)
        length = min(length, self.lengths[-1])
        lengths = np.array([1] * decoding + [length], dtype=np.int32)
        arrays = padding(Shape(decoding + length, decoding + 1, length, length))
        arrays |= {"seqused_k": lengths, "cu_seqlens_q": np.cumsum([0, *lengths], dtype=np.int32)}
        return self._make_inputs(send(arrays, self._device), length, length, fresh=decoding == 0)

    def _capture_empty(self, shape: Shape) -> None:
        """Capture a step of padding alone."""
        send(padding(shape), self._device, self.block)
        self._capture(shape)

    def _capture(self, shape: Shape) -> None:
        """Compute the step in the block, and record how."""

        def step() -> None:
            self._logits[: shape.batch].copy_(self._forward(self.inputs(shape)))

        step()  # compiles kernels and makes workspaces, which must not happen while recording
        try:
            self._replays[shape], self._pool = record(step, self._pool)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # which torch does not do by itself while it records
            self._replays[shape], self._pool = record(step, self._pool)


def padding(shape: Shape) -> dict[str, NDArray[Any]]:
    """What a step sends, here of sequences that hold no keys, of one token each while there are tokens, and write none."""
    tokens = shape.tokens
    batch = shape.batch
    return {
        "input_ids": np.zeros(tokens, dtype=np.int64),
        "position_ids": np.zeros(tokens, dtype=np.int64),
        "slot_mapping": np.full(tokens, -1, dtype=np.int64),
        "slots": np.zeros(batch, dtype=np.int64),
        "seqused_k": np.zeros(batch, dtype=np.int32),
        "cu_seqlens_q": np.minimum(np.arange(batch + 1, dtype=np.int32), tokens),
        "logits_indices": np.zeros(batch, dtype=np.int64),
    }


def pad(arrays: Mapping[str, NDArray[Any]], shape: Shape) -> dict[str, NDArray[Any]]:
    """A step with padding behind it, up to the shape."""
    padded = padding(shape)
    batch = len(arrays["slots"])
    for name, array in arrays.items():
        padded[name][: len(array)] = array
    ends = padded["cu_seqlens_q"]
    ends[batch:] = np.minimum(ends[batch] + np.arange(len(ends) - batch), shape.tokens)
    return padded


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKENS) * TOKENS


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ...: at most 8 rows of padding, and never more than half."""
    return [size for size in (1, 2, 4) if size < largest] + [*range(8, largest, 8), largest]


def record(function: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """A function's kernels as one call, and the pool its memory is from: a new one if None is given.

    Unlike `torch.cuda.graph` it leaves the allocator its cache, which the next prompts would have to fill again.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream()
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
