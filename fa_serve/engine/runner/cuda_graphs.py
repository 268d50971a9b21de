"""CUDA graphs of whole steps: the launches of a forward are captured once for each shape and replayed in one call.

    graphs = StepGraphs(model, forward, inputs, device, max_batch=256, max_tokens=8192, max_keys=4096, vocab=32000, ...)
    shape = graphs.shape_for(13, 13, 700, decoding=True)         # Shape(16, 16, 1, 1024), to which the caller pads
    padded = graphs.steps.padded(arrays, shape)
    views = send(padded, device, graphs.block)
    logits = graphs.run(shape)               # (shape.batch, vocab); overwritten by the next run

A graph reads and writes the same addresses at each replay. Therefore the arrays of a step are sent into a fixed block of
memory, which all graphs share: first the fields of `padding`, then whatever else the caller sends. Each sequence's pages are
read from its row of the device's block table. A graph also keeps the tables of the model that it reads, such as tables of
positions, because the model may replace them (`capture`). How attention splits its keys among the SMs is fixed at capture and
depends on the longest sequence, so there are graphs for a few key lengths (KEY_LENGTHS) of each size. Decisions that depend on
lengths known only to the device are made at each replay.

Decoding has one graph for each batch size, and another for steps of this size that verify drafts. Steps with prompts have too
many shapes for that: their tokens are padded to a multiple of TOKEN_MULTIPLE, and there are at most MAX_PROMPT_GRAPHS graphs of
such steps. With graphs the GPU does not wait while the host launches the kernels of a small model, or of a small step of a
large model. All graphs share one memory pool. The largest step with prompts is captured before other steps with prompts, so
that the pool does not grow later.

`prepare_one` captures likely shapes ahead, at start-up and while there is no request. After its first call, no step waits for a
capture: a step uses a graph that is only a little too large, or runs eagerly, and a shape with prompts that has occurred
CAPTURE_AFTER times is captured in the next idle moment. The first step with images adds the likely shapes of such steps.
Without `prepare_one`, as in offline use, the steps themselves capture: a decoding shape at its first occurrence, and a shape
with prompts after CAPTURE_AFTER occurrences.

Graphs run the same forward as eager steps. A model that cannot be captured, for example because it reads something back from
the device, stays eager, and the log says why; with several ranks, the engine ends instead. Left out: steps that want
log-probabilities of prompts, which run eagerly.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fa_serve.engine.runner.batch_arrays import BatchArrays
from fa_serve.engine.runner.padded_steps import PaddedSteps, Shape, padding
from fa_serve.engine.runner.state_arrays import num_graph_pieces
from fa_serve.engine.runner.transfer import PackedTensors, packed_size, send
from fa_serve.engine.speculation.drafts import draft_limit
from fa_serve.hf import PagedBatch
from fa_serve.hf.images import StepImages
from fa_serve.hf.lora.product import LoraStep

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one forward takes.

    input_ids:      (total,) int64; -(slot + 1) stands for the last token sampled in that slot
    position_ids:   (total,) int64, or (axes, total)
    logits_indices: (n,) int64, the tokens whose logits are wanted
    slots:          (batch,) int64, the slot of each sequence; a sequence without keys is padding
    lora:           which token has which adapter; None if no token has an adapter
    images:         embeddings of images; None for a step without images
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    slots: Tensor
    paged: PagedBatch
    lora: LoraStep | None = None
    images: StepImages | None = None


class MakeInputs(Protocol):
    """Makes the inputs of a forward from the fields of `padding`, on the device."""

    def __call__(
        self, fields: Mapping[str, Tensor], max_seqlen_q: int, max_seqlen_k: int, *, fresh: bool = False
    ) -> Inputs: ...


OnError = Callable[[Exception], None]
KEY_LENGTHS = (1024, 4096, 16384)
"""Lengths of the longest sequence for which there are graphs, in addition to the longest possible one."""
EXTRA_BYTES = 1 << 20
"""Bytes of the block for what comes after the fields of `padding`."""
TOKEN_MULTIPLE = 64
"""Steps with prompts are padded to a multiple of this. The padding costs little compared with waiting for launches."""
PROMPT_BATCHES = (16, 64)
"""Numbers of sequences in steps with prompts for which there are graphs, in addition to the largest possible one."""
CAPTURE_AFTER = 2
"""How often a shape with prompts must occur before it is captured.

A capture takes the host about as long as one eager step, which each replay saves: 9 to 18 ms for 28 layers on an H200.
"""
MAX_PROMPT_GRAPHS = 256
"""Maximum number of graphs of steps with prompts."""
MAX_TOKENS_AHEAD = 512
"""Steps with prompts are captured in advance up to this many tokens, and at the largest possible number."""


class StepGraphs:
    """Owner of the graphs and of the memory that they read and write.

    model:      the model that `forward` runs
    forward:    takes what `inputs` makes and returns logits (n, vocab)
    max_batch:  sequences in a step; max_tokens: tokens in a step; max_keys: keys of a sequence
    max_drafts: drafts of a sequence in a step
    vocab, dtype: number of columns and dtype of the logits
    prompts:    capture steps with prompts too
    states:     the model keeps states, so that steps have the fields of `state_arrays`
    lora:       capture steps with adapters too
    least_group_keys: a step has groups if they save reading this many keys; 0 if steps have no groups
    fresh_tokens: with this many tokens or more, a step without keys from earlier steps runs eagerly: attention is faster then
    on_error:   called with the error of a failed capture, before steps run without that graph; may raise
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Inputs], Tensor],
        inputs: MakeInputs,
        device: torch.device,
        *,
        max_batch: int,
        max_tokens: int,
        max_keys: int,
        max_drafts: int = 0,
        vocab: int,
        dtype: torch.dtype,
        prompts: bool,
        states: bool = False,
        on_error: OnError,
        lora: bool = False,
        least_group_keys: int = 0,
        fresh_tokens: int | None = None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._make_inputs = inputs
        self._device = device
        self._prompts = prompts
        self._states = states
        self._lora = lora
        self._least_group_keys = least_group_keys
        self._fresh_tokens = fresh_tokens
        self._on_error = on_error
        self.sizes = batch_sizes(max_batch)
        self.key_lengths = [*(length for length in KEY_LENGTHS if length < max_keys), max_keys]
        self._prompt_batches = [*(size for size in PROMPT_BATCHES if size < max_batch), max_batch]
        tokens = _rounded(max_tokens)
        self._largest = Shape(tokens, max_batch, tokens, max_keys)
        self.block = torch.zeros(
            packed_size(padding(self._largest._replace(lora=lora, groups=least_group_keys > 0), states=states)) + EXTRA_BYTES,
            dtype=torch.uint8,
            device=device,
        )
        # queries of each sequence that verifies drafts, by batch size: as many as the smallest batch padded to it may have
        smaller = [0, *self.sizes[:-1]]
        limits = {size: draft_limit(max_drafts, before + 1) for size, before in zip(self.sizes, smaller, strict=True)}
        self._queries = {size: 1 + limit for size, limit in limits.items() if limit}
        rows = max([max_batch, *(size * queries for size, queries in self._queries.items())])
        self._logits = torch.zeros(rows, vocab, dtype=dtype, device=device)
        # Shapes come from fixed lists of sizes, so these two hold a few thousand entries at most.
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._num_seen: Counter[Shape] = Counter()
        self._pool: Any = None
        # shapes to capture in advance, the next one last; None until `prepare_one` is called
        self._missing: list[Shape] | None = None
        self._prepares_images = False
        self.steps = PaddedSteps(device, states)
        self.num_captures = 0

    def shape_of(self, arrays: BatchArrays, lora: bool = False) -> Shape | None:
        """The shape for a step, or None if it runs eagerly: see `shape_for`. lora: whether sequences have adapters"""
        axes = arrays.num_axes if arrays.images else 0
        uses_fresh_keys = arrays.fresh and self._fresh_tokens is not None and arrays.num_tokens >= self._fresh_tokens
        if arrays.num_prompt_logits or uses_fresh_keys:
            return None
        shape = self.shape_for(
            arrays.num_tokens,
            arrays.num_sequences if arrays.decoding else max(arrays.num_sequences, len(arrays.inputs["logits_indices"])),
            arrays.max_seqlen_k,
            decoding=arrays.decoding,
            queries=arrays.max_seqlen_q,
            lora=lora,
            groups=arrays.has_groups,
            axes=axes,
        )
        if shape is not None and self._states:
            room = num_graph_pieces(shape.batch, shape.tokens, shape.kind == "prompts")
            return shape if len(arrays.inputs["pieces"]) <= room else None
        return shape

    def shape_for(
        self,
        tokens: int,
        batch: int,
        max_seqlen_k: int,
        *,
        decoding: bool,
        queries: int = 1,
        lora: bool = False,
        groups: bool = False,
        axes: int = 0,
    ) -> Shape | None:
        """The shape for a step of `batch` sequences with `tokens` tokens, the longest sequence having `max_seqlen_k` keys.

        decoding: every sequence computes its last token and drafts, at most `queries` tokens; otherwise `batch` is the larger
                  one of the number of sequences and the number of tokens that are sampled

        Returns the smallest shape that holds the step if it is captured; otherwise a captured shape with as many tokens, or for
        decoding with up to a quarter more; otherwise None, and the step runs eagerly. Until `prepare_one` is called, steps
        capture: a decoding step gets the smallest shape at once, and a step with prompts gets it if it is worth a capture.
        """
        keys = next(length for length in self.key_lengths if length >= max_seqlen_k)
        if decoding and not axes:
            size = next((size for size in self.sizes if size >= batch), 0)
            if not size or (queries > 1 and queries > self._queries.get(size, 1)):
                return None
            queries = self._queries[size] if queries > 1 else 1
            shape = Shape(size * queries, size, queries, keys, lora, groups)
            limit = shape.tokens + shape.tokens // 4
        else:
            tokens = _rounded(tokens)
            limit = tokens
            size = next((size for size in self._prompt_batches if size >= batch), 0)
            if not size:
                return None
            shape = Shape(tokens, size, tokens, keys, lora, axes=axes)
        if shape in self._replays or (decoding and self._missing is None):
            return shape
        held = [
            x
            for x in self._replays
            if shape.tokens <= x.tokens <= limit
            and x.batch >= size
            and x.keys >= keys
            and x.kind == shape.kind
            and (x.lora, x.groups, x.axes) == (lora, groups, axes)
            and x.queries >= shape.queries
        ]
        if held or decoding:
            return min(held, default=None)
        if axes and self._missing is not None and not self._prepares_images:
            # only the first step with images shows how many axes positions have, and that graphs can run such steps
            self._prepares_images = True
            self._missing[:0] = [x._replace(axes=axes) for x in self._shapes_ahead() if x.kind == "prompts" and not x.lora]
        self._num_seen[shape] += 1
        if self._num_seen[shape] < CAPTURE_AFTER or not self._prompts:
            return None
        if self._missing is None:
            return shape if self._may_capture_prompts() else None
        if shape not in self._missing:
            self._missing.append(shape)
        return None

    def _may_capture_prompts(self) -> bool:
        """Whether another step with prompts may be captured. The largest one is captured first."""
        if self._prompts and self._largest not in self._replays:
            try:
                self._capture_empty(self._largest)
            except Exception as error:
                self._on_error(error)
                log.warning("steps with prompts run without CUDA graphs, because a capture failed: %s", error)
                self._prompts = False
        return self._prompts and sum(x.kind == "prompts" for x in self._replays) < MAX_PROMPT_GRAPHS

    def capture_ahead_only(self) -> None:
        """From now on only `prepare_one` captures graphs, and a step without a graph runs eagerly."""
        if self._missing is None:
            self._missing = self._shapes_ahead()

    def prepare_one(self) -> bool:
        """Capture one shape, between steps. Returns False if nothing is left.

        A failure is logged and ends all preparation. After the first call, steps no longer capture.
        """
        self.capture_ahead_only()
        try:
            while self._missing:
                shape = self._missing.pop()
                if shape not in self._replays and (shape.kind != "prompts" or self._may_capture_prompts()):
                    if shape != self._largest:
                        self._capture_empty(shape)
                    return True
        except Exception as error:  # Triton's errors are not RuntimeErrors. A step with the same problem will report it
            self._on_error(error)
            log.warning("no more graphs are captured in advance, because a capture failed: %s", error)
            self._missing = []
        return False

    def run(self, shape: Shape) -> Tensor:
        """Logits of the step in the block, which has been padded to `shape`. They are valid until the next run."""
        if shape in self._replays:
            self._replays[shape]()
        else:
            self._capture(shape)
        return self._logits[: shape.rows]

    def capture_largest(self) -> None:
        """Capture the largest decoding step. Call this first. Raises what the capture raises."""
        self._capture_empty(Shape(self.sizes[-1], self.sizes[-1], 1, self.key_lengths[-1]))

    def close(self) -> None:
        """Free all graphs. Communicators of NCCL cannot be destroyed while a graph refers to them."""
        with suppress(torch.AcceleratorError):  # the device is lost; the error that says so has been raised already
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._replays.clear()

    def inputs(self, shape: Shape) -> Inputs:
        """The inputs in the block, which has been padded to `shape`."""
        return self._make_inputs(PackedTensors(self.block, padding(shape, states=self._states)), shape.queries, shape.keys)

    def _shapes_ahead(self) -> list[Shape]:
        """The shapes to capture in advance, the next one last.

        Shapes with few keys come first; among them decoding before prompts, and then batches whose size is a power of two.
        """
        shapes = [Shape(size, size, 1, keys) for keys in self.key_lengths for size in self.sizes]
        shapes += [Shape(size * n, size, n, keys) for keys in self.key_lengths for size, n in self._queries.items()]
        if self._prompts:
            few = range(TOKEN_MULTIPLE, min(MAX_TOKENS_AHEAD, self._largest.tokens) + 1, TOKEN_MULTIPLE)
            sizes = [(tokens, batch) for tokens in {*few, self._largest.tokens} for batch in self._prompt_batches]
            shapes += [Shape(tokens, batch, tokens, keys) for tokens, batch in sizes for keys in self.key_lengths[:2]]
        if self._least_group_keys:
            single = [x for x in shapes if x.queries == 1 and (x.batch - 1) * x.keys >= self._least_group_keys]
            shapes += [shape._replace(groups=True) for shape in single]
        if self._lora:
            shapes += [shape._replace(lora=True) for shape in shapes]
        return sorted(shapes, key=lambda x: (x.keys, x.kind == "prompts", x.batch & (x.batch - 1) != 0, x), reverse=True)

    def _capture_empty(self, shape: Shape) -> None:
        """Capture a step that consists of padding only."""
        send(padding(shape, states=self._states), self._device, self.block)
        self._capture(shape)

    def _capture(self, shape: Shape) -> None:
        """Compute the step in the block, and capture its launches."""

        def step() -> None:
            self._logits[: shape.rows].copy_(self._forward(self.inputs(shape)))

        self.num_captures += 1
        step()  # compiles kernels and allocates workspaces, which must not happen during the capture
        try:
            self._replays[shape], self._pool = capture(step, self._pool, self._model)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch does not do this by itself during a capture
            self._replays[shape], self._pool = capture(step, self._pool, self._model)


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ...: a step has at most 7 rows of padding, and never more than half of its rows."""
    return [size for size in (1, 2, 4) if size < largest] + [*range(8, largest, 8), largest]


def capture(function: Callable[[], None], pool: Any, model: nn.Module) -> tuple[Callable[[], None], Any]:
    """Capture a function. Returns a call that replays its launches, and the graph's memory pool. pool: None makes a new one

    model: the model that the function runs, and must have run before. The returned call keeps the model's tables, which the
           graph reads: Kosmos-2, for example, replaces its table of positions when a forward has more tokens than the table.
           Left out: parameters, whose owner says when they move

    Unlike `torch.cuda.graph` this does not empty the allocator's cache, which the next prompts would have to fill again.

    cuBLAS keeps a workspace for each stream, and a graph uses the workspace of the stream on which it was captured. Code with
    its own stream, such as the towers, is captured on that stream, so graphs that may be replayed at once share no workspace.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    stream = _capture_stream() if current == torch.cuda.default_stream() else current
    torch.cuda.synchronize()
    tables = _tables(model)
    with _no_garbage_collection(), torch.cuda.stream(stream):
        # other threads may allocate pinned memory during the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    # a tensor that the function itself has replaced is not a table, but something that every forward makes
    kept = [table for holder, name, table in tables if holder.get(name) is table]
    return partial(_replay, graph, kept), graph.pool()


def _replay(graph: torch.cuda.CUDAGraph, kept: list[Tensor]) -> None:
    """kept: tensors that the graph reads, held here so that they are not freed"""
    graph.replay()


def _tables(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Buffers and other tensors that modules have, as (dict that holds it, name, tensor)."""
    holders: list[dict[str, Any]] = [held for module in model.modules() for held in (module._buffers, vars(module))]
    return [(held, name, x) for held in holders for name, x in held.items() if isinstance(x, Tensor)]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside this context, Python starts no collection of cyclic garbage, which could free the graph of a closed engine and so
    abort a capture. Left out: collections that another thread asks for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1)
def _capture_stream() -> Any:
    """The stream on which work of the default stream is captured, because the default stream itself cannot be captured."""
    stream: Any = torch.cuda.Stream
    return stream()
