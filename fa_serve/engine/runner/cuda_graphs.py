"""CUDA graphs of whole steps: the launches of a forward are captured once for each shape and replayed in one call.

    graphs = StepGraphs(model, forward, inputs, device, max_batch=256, max_tokens=8192, max_keys=4096, vocab=32000, ...)
    shape = graphs.shape_for(13, 13, 700, decoding=True)         # Shape(16, 16, 1, 1024), to which the caller pads
    views = send(pad(arrays, shape), device, graphs.block)
    logits = graphs.run(shape)               # (shape.batch, vocab); overwritten by the next run

A graph reads and writes the same addresses each time. Therefore the numbers of a step are sent into a fixed block of memory,
one block for all graphs: first the fields of `pad`, then whatever else the caller sends. The pages of each sequence come from
its row of the device's block table. The tables of the model that it reads stay as long as the graph, whatever the model puts in
their place (`capture`). How attention splits its keys among the SMs is fixed at capture and depends on the longest
sequence, so there are graphs for a few key lengths (KEY_LENGTHS) of each size. Decisions that depend on lengths known only to
the device are made at each replay.

Decoding has one graph for each batch size, and another one for steps that verify drafts (speculation/drafts.py). Steps with
prompts have too many shapes for that: they are padded to a multiple of TOKEN_MULTIPLE, and there are never more than
MAX_PROMPT_GRAPHS of them. With graphs the GPU does not wait for the launches of small models, nor of small steps of large
models. All graphs share one memory pool. The largest step with prompts is captured before any other, so that the pool never
grows later.

`prepare_one` captures likely shapes ahead, at start-up and when there is no request. Once it has been called, no step waits for
a capture: a step takes a graph that is only a little too large, or runs eagerly, and a shape of prompts that comes
CAPTURE_AFTER times is captured in the next idle moment. The first step with images adds the likely shapes of such steps.
Without `prepare_one`, as in offline use, steps capture: decoding when a shape first comes, and prompts when it has come
CAPTURE_AFTER times.

Graphs run the same forward as eager steps. A model that cannot be captured, for example because it reads something back from
the device, stays eager, and the log says why. With several ranks the engine ends. Left out: steps that want log-probabilities
of prompts.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fa_serve.engine.config import MAX_DRAFTS
from fa_serve.engine.runner.batch_arrays import BatchArrays
from fa_serve.engine.runner.group_arrays import group_padding
from fa_serve.engine.runner.image_arrays import image_padding, pad_images
from fa_serve.engine.runner.lora_arrays import lora_padding, name_padding
from fa_serve.engine.runner.state_arrays import num_graph_pieces, padding_state_arrays
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
    lora:           which token has which adapter; None if none has one
    images:         embeddings of images
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    slots: Tensor
    paged: PagedBatch
    lora: LoraStep | None = None
    images: StepImages | None = None


class Shape(NamedTuple):
    """The padded sizes of a captured step.

    tokens: of all sequences; batch: sequences; queries: tokens of one sequence, 1 if all decode; keys: of one sequence
    lora:   sequences may have adapters; groups: they may share pages that are read once
    axes:   of positions in a step with embeddings of images; 0 for a step without images
    """

    tokens: int
    batch: int
    queries: int
    keys: int
    lora: bool = False
    groups: bool = False
    axes: int = 0

    @property
    def kind(self) -> str:
        """What the step computes beside last tokens: "nothing", "drafts" or "prompts"."""
        if self.queries == 1:
            return "nothing"
        few = self.queries <= MAX_DRAFTS + 1 and self.tokens == self.batch * self.queries
        return "drafts" if few else "prompts"

    @property
    def rows(self) -> int:
        """Rows of logits: one for each sequence, or with drafts one for each token."""
        return self.tokens if self.kind == "drafts" else self.batch


class MakeInputs(Protocol):
    """Makes the inputs of a forward from the fields of `pad`, on the device."""

    def __call__(
        self, fields: Mapping[str, Tensor], max_seqlen_q: int, max_seqlen_k: int, *, fresh: bool = False
    ) -> Inputs: ...


OnError = Callable[[Exception], None]
KEY_LENGTHS = (1024, 4096, 16384)
"""Lengths of the longest sequence for which there are graphs, in addition to the longest possible one."""
EXTRA_BYTES = 1 << 20
"""Bytes of the block for what comes after the fields of `pad`."""
TOKEN_MULTIPLE = 64
"""Steps with prompts are padded to a multiple of this. The padding costs little beside waiting for launches."""
PROMPT_BATCHES = (16, 64)
"""Numbers of sequences in steps with prompts for which there are graphs, in addition to the largest possible one."""
CAPTURE_AFTER = 2
"""How often a step with prompts must come before it is captured.

A capture takes the host about as long as one step that it saves: 9 to 18 ms on an H200 with 28 layers.
"""
MAX_PROMPT_GRAPHS = 256
"""Number of graphs of steps with prompts."""
MAX_TOKENS_AHEAD = 512
"""Steps with prompts of up to so many tokens are captured in advance, and the largest possible one."""


class StepGraphs:
    """Owner of the graphs and of the memory that they read and write.

    model:      what computes
    forward:    takes what `inputs` makes and returns logits (n, vocab)
    max_batch:  sequences in a step; max_tokens: tokens in a step; max_keys: keys of a sequence
    max_drafts: drafts of a sequence in a step
    vocab, dtype: of the logits
    prompts:    capture steps with prompts too
    states:     the model keeps states, so that steps have the fields of `state_arrays`
    lora:       capture steps with adapters too
    least_group_keys: a step has groups if they save reading so many keys; 0 without groups
    fresh_tokens: from so many tokens on, a step without keys from earlier steps runs eagerly, as attention is faster then
    on_error:   called with the error of a capture before steps run without it, and may raise
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
        # by number of sequences, queries of one sequence when drafts are verified: as many as the fewest sequences may have
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
        self.num_captures = 0

    def shape_of(self, arrays: BatchArrays, lora: bool = False) -> Shape | None:
        """The shape for a step, or None if it runs eagerly: see `shape_for`. lora: sequences have adapters"""
        axes = arrays.num_axes if arrays.images else 0
        takes_keys_as_they_come = arrays.fresh and self._fresh_tokens is not None and arrays.num_tokens >= self._fresh_tokens
        if arrays.prompt_spans or takes_keys_as_they_come:
            return None
        shape = self.shape_for(
            arrays.num_tokens,
            arrays.num_sequences if arrays.decoding else max(arrays.num_sequences, len(arrays.sequences)),
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

        decoding: every sequence computes its last token and drafts, at most `queries` tokens; otherwise `batch` is also the
                  number of tokens that are sampled, if these are more

        That is the smallest shape that holds the step. If it is not captured, it is a captured one with as many tokens, or for
        decoding with up to a quarter more. Otherwise it is None, and the step runs eagerly; unless `prepare_one` was never
        called, and the step is worth a capture.
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
            # the first step with images tells how many axes positions have, and that the model's steps with images have graphs
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
        """From now on graphs are captured by `prepare_one` alone, and steps without one run eagerly."""
        if self._missing is None:
            self._missing = self._shapes_ahead()

    def prepare_one(self) -> bool:
        """Capture one shape, between steps. Returns False if nothing is left.

        A failure is logged and ends all preparation. From the first call on, no step captures.
        """
        self.capture_ahead_only()
        try:
            while self._missing:
                shape = self._missing.pop()
                if shape not in self._replays and (shape.kind != "prompts" or self._may_capture_prompts()):
                    if shape != self._largest:
                        self._capture_empty(shape)
                    return True
        except Exception as error:  # Triton's errors are no RuntimeErrors; and a step that has the same problem will report it
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
        """Capture the largest decoding step. To be called first. Raises what the capture raises."""
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

        Shapes of few keys come first, among these decoding before prompts, and among these batches of a power of two.
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


def padding(shape: Shape, *, states: bool = False) -> dict[str, NDArray[Any]]:
    """The fields of a step that consists of padding: its sequences have no keys, one token each while there are tokens, and
    write nothing. states: with the fields of `state_arrays`"""
    tokens = shape.tokens
    batch = shape.batch
    of_states = padding_state_arrays(batch, tokens, shape.kind == "prompts") if states else {}
    return {
        "input_ids": np.zeros(tokens, dtype=np.int64),
        "position_ids": np.zeros(tokens, dtype=np.int64),
        "slot_mapping": np.full(tokens, -1, dtype=np.int64),
        "slots": np.zeros(batch, dtype=np.int64),
        "seqused_k": np.zeros(batch, dtype=np.int32),
        "cu_seqlens_q": np.minimum(np.arange(batch + 1, dtype=np.int32), tokens),
        "logits_indices": np.zeros(shape.rows, dtype=np.int64),
        **of_states,
        **(lora_padding(tokens, batch, shape.queries) if shape.lora else {}),
        **(group_padding(batch) if shape.groups else {}),
        **(image_padding(tokens, shape.axes) if shape.axes else {}),
    }


def pad(arrays: Mapping[str, NDArray[Any]], shape: Shape) -> dict[str, NDArray[Any]]:
    """The fields of a step, followed by padding up to `shape`. arrays: with "image_rows" if the shape has axes"""
    padded = padding(shape, states="pieces" in arrays)
    if shape.axes:
        padded |= pad_images(arrays["image_rows"], arrays["position_ids"], shape.tokens)
    batch = len(arrays["slots"])
    for name, array in arrays.items():
        if shape.axes and name in ("image_rows", "position_ids"):
            continue
        padded[name][: len(array)] = array
    if shape.lora:
        name_padding(padded, len(arrays["input_ids"]), len(arrays["lora_tiles"]), shape.queries)
    ends = padded["cu_seqlens_q"]
    ends[batch:] = np.minimum(ends[batch] + np.arange(len(ends) - batch), shape.tokens)
    if shape.groups:
        padded["group_ends"][len(arrays["group_ends"]) :] = arrays["group_ends"][-1]
    return padded


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ...: a step has at most 7 rows of padding, and never more than half of its rows."""
    return [size for size in (1, 2, 4) if size < largest] + [*range(8, largest, 8), largest]


def capture(function: Callable[[], None], pool: Any, model: nn.Module) -> tuple[Callable[[], None], Any]:
    """The launches of a function as one call, and the memory pool that it uses. If `pool` is None, it makes a new one.

    model: what the function computes, which has computed it before. The call keeps its tables: a forward of more tokens than
           there are positions in the table of Kosmos-2 puts a larger one in its place, and the graph reads the old one. Left
           out: parameters, whose owner says when they move

    Unlike `torch.cuda.graph` this does not empty the allocator's cache, which the next prompts would have to fill again.

    cuBLAS keeps a workspace for each stream, and a graph keeps that of the stream on which it was captured. What has its own
    stream, as towers have, is captured there: graphs that may be replayed at the same time have no workspace in common.
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
    # what the function itself has replaced is no table, but something that every forward makes
    kept = [table for holder, name, table in tables if holder.get(name) is table]
    return partial(_replay, graph, kept), graph.pool()


def _replay(graph: torch.cuda.CUDAGraph, kept: list[Tensor]) -> None:
    """kept: not read here, but by the graph"""
    graph.replay()


def _tables(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Buffers and other tensors that modules have, as (where, name, tensor)."""
    holders: list[dict[str, Any]] = [held for module in model.modules() for held in (module._buffers, vars(module))]
    return [(held, name, x) for held in holders for name, x in held.items() if isinstance(x, Tensor)]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside, Python starts no collection of cyclic garbage. If it held the graph of a closed engine, freeing that would end a
    capture. Left out: collections that another thread asks for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1)
def _capture_stream() -> Any:
    """The stream of all captures for the default stream, on which nothing is captured."""
    stream: Any = torch.cuda.Stream
    return stream()
