"""Launches the persistent kernel of a decoding step: what it needs beside the tensors of a step, and which steps it computes.

    stack = DecodeStack(layers, sizes)             # raises UnsupportedStackError with the reason
    if stack.refusal(step) is None:
        stack.compute(x, step)                     # x (total, hidden) becomes the output of the last layer

All programs of the kernel wait for each other, so all of them must be resident. There is one for each multiprocessor, and the
launch is cooperative: the driver refuses a grid that does not fit, and starts none of two such grids in part. A stack owns the
counters, which go on from launch to launch, so its launches must follow each other on one stream, as those of an engine do.

Left out: which layers may be computed like this (hf/surgery/fuse/stack.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, multiprocessors
from fa_serve.ops.decode_step.kernel import ADDRESSES, decode_layers
from fa_serve.ops.decode_step.layout import (
    DEFAULT_TILE,
    MOST_STEP_TOKENS,
    PHASE_STRIDE,
    PHASES,
    StepLayout,
    StepShape,
    StepTile,
    layout_of,
    splits_of,
    takes_words,
    unsupported_shape,
)
from fa_serve.ops.decode_step.stacked import StackLayer, StackOptions, StackStep, UnsupportedStackError
from fa_serve.ops.decode_step.word_kernel import decode_words
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS

_MOST_TABLES = 64
"""Tables that a stack keeps, a few kilobytes each. An engine that allocates its caches anew needs another one, and no graph
outlives its caches."""


class DecodeStack:
    """All layers of a model, and the memory of the kernel that computes them.

    programs: of the grid; None is one for each multiprocessor
    tile:     what is tuned; see `layout.StepTile`
    num_calls: how often `compute` has been called; a replay of a graph calls nothing

    Raises UnsupportedStackError for layers that the kernel does not compute.
    """

    def __init__(
        self,
        layers: Sequence[StackLayer],
        options: StackOptions,
        *,
        programs: int | None = None,
        tile: StepTile = DEFAULT_TILE,
    ) -> None:
        first = layers[0]
        device = first.qkv.device
        self._layers = layers
        self._options = options
        self._tile = tile
        self._arch = spec.arch_of(device)
        self._programs = multiprocessors(device, 1) if programs is None else programs
        self.shape = _shape_of(first, options)
        reason = self._unsupported()
        if reason is not None:
            raise UnsupportedStackError(reason)
        dtype = first.qkv.dtype
        attended = options.num_heads * options.head_dim
        self._qkv = torch.empty(MOST_STEP_TOKENS, self.shape.qkv_rows, dtype=dtype, device=device)
        self._attended = torch.empty(MOST_STEP_TOKENS, attended, dtype=dtype, device=device)
        self._gated = torch.empty(MOST_STEP_TOKENS, self.shape.intermediate, dtype=dtype, device=device)
        self._counters = torch.zeros(PHASES * PHASE_STRIDE, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(MOST_STEP_TOKENS * self.shape.num_kv_heads, dtype=torch.int32, device=device)
        self._done = torch.zeros(self._programs, dtype=torch.int64, device=device)
        # room for the splits of all KV heads of any step, which is made before an engine counts what is left for its cache
        most = self._layout(MOST_STEP_TOKENS, MOST_STEP_TOKENS, 1).parts_of_unit
        self._parts = torch.empty(len(self._pairs) * most, dtype=torch.float32, device=device)
        one = self._layout(1, 1, 1)
        self._words: tuple[Tensor, ...] = ()
        if tile.tagged and takes_words(one):
            word = torch.int32 if dtype.itemsize == 2 else torch.int64
            self._words = (
                torch.zeros(one.words, dtype=word, device=device),
                torch.zeros(self.shape.num_kv_heads * one.parts_of_unit, dtype=torch.int64, device=device),
                torch.zeros(self._programs, dtype=torch.int64, device=device),
            )
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._launches: dict[tuple[object, ...], tuple[Launch, StepLayout]] = {}
        self.num_calls = 0

    def _unsupported(self) -> str | None:
        first = self._layers[0]
        if any(layer.constants() != first.constants() for layer in self._layers):
            return "its layers differ in more than the values of their weights"
        for layer in self._layers:
            for name, x in layer.weights().items():
                if x is not None and (not x.is_contiguous() or x.data_ptr() % 16 or x.dtype != first.qkv.dtype):
                    return f"{name} must be contiguous, aligned to 16 bytes, and of the dtype of the other weights"
        if first.before_attention[1:] != first.before_mlp[1:]:
            return "its two norms differ in more than their weights"
        if (first.q_norm is None) != (first.k_norm is None):
            return "queries or keys alone have a norm"
        if (
            first.q_norm is not None
            and first.k_norm is not None
            and (first.q_norm[1:] != first.k_norm[1:] or len(first.q_norm.weight) != self._options.head_dim)
        ):
            return "the norms of queries and keys must be those of each head, and equal but for their weights"
        if first.qkv.dtype not in (torch.bfloat16, torch.float32):
            return f"weights must have the dtype bfloat16 or float32, got {first.qkv.dtype}"
        return unsupported_shape(self.shape, 1)

    def refusal(self, step: StackStep) -> str | None:
        """Why the kernel does not compute this step, or None."""
        total = len(step.slot_mapping)
        k_cache, v_cache = step.caches[0]
        if not 1 <= total <= MOST_STEP_TOKENS or step.max_seqlen_q > MOST_STEP_TOKENS:
            return f"the step must have 1 to {MOST_STEP_TOKENS} tokens, got {total}"
        for cache in (x for pair in step.caches for x in pair):
            if cache.dtype != self._qkv.dtype or cache.stride() != k_cache.stride() or cache.stride(3) != 1:
                return "caches must have one layout and the dtype of the weights"
        if v_cache.shape != k_cache.shape:
            return "keys and values must have equal shapes"
        if step.cos.stride() != step.sin.stride() or step.cos.stride(1) != 1:
            return "cos and sin must have equal strides and contiguous rows"
        if max(k_cache.stride()) >= 1 << 31:
            return "a page of the cache must have fewer than 2^31 numbers"
        return None

    def compute(self, x: Tensor, step: StackStep, *, first: int = 0, count: int | None = None) -> Tensor:
        """The output of the layers from `first` on, `count` of them or all. x (total, hidden) is overwritten and returned."""
        count = len(self._layers) - first if count is None else count
        self.num_calls += 1
        batch = len(step.seqused_k)
        if self._words and len(x) == batch == 1:
            self._compute_one(x, step, first, count)
            return x
        launch, layout = self._launch_for(step)
        tensors = (
            x,
            self._qkv,
            self._attended,
            self._gated,
            self._parts,
            self._counters,
            self._pairs,
            self._done,
            self._table_of(step.caches),
            step.cos,
            step.sin,
            step.slot_mapping,
            step.block_table,
            step.seqused_k,
            step.cu_seqlens_q,
        )
        launch(tensors, first, count, len(x), batch, splits_of(layout, batch), step.block_table.stride(0), step.cos.stride(0))
        return x

    def _compute_one(self, x: Tensor, step: StackStep, first: int, count: int) -> None:
        k_cache = step.caches[0][0]
        key = ("one", k_cache.stride(), k_cache.shape[1])
        if key not in self._launches:
            self._launches[key] = self._make_launch(decode_words, step, self._layout(1, 1, k_cache.shape[1]))
        launch, _ = self._launches[key]
        tensors = (
            x,
            *self._words,
            self._table_of(step.caches),
            step.cos,
            step.sin,
            step.slot_mapping,
            step.block_table,
            step.seqused_k,
        )
        launch(tensors, first, count)

    def words(self) -> tuple[Tensor, ...]:
        """What programs share if numbers carry their layer: words, splits, and how many tags were used. Else nothing."""
        return self._words

    def memory(self) -> tuple[Tensor, ...]:
        """What the programs of a step share: buffers, then counters."""
        buffers = (self._qkv, self._attended, self._gated, self._parts)
        return (*buffers, self._counters, self._pairs, self._done)

    def _launch_for(self, step: StackStep) -> tuple[Launch, StepLayout]:
        k_cache = step.caches[0][0]
        key = (len(step.slot_mapping) == 1, step.max_seqlen_q, k_cache.stride(), k_cache.shape[1])
        if key not in self._launches:
            layout = self._layout(len(step.slot_mapping), step.max_seqlen_q, k_cache.shape[1])
            self._launches[key] = self._make_launch(decode_layers, step, layout)
        return self._launches[key]

    def _make_launch(self, kernel: Any, step: StackStep, layout: StepLayout) -> tuple[Launch, StepLayout]:
        options = self._options
        first = self._layers[0]
        norm = first.before_attention
        head_norm = norm if first.q_norm is None else first.q_norm
        numbers = (norm.eps, norm.offset, head_norm.eps, head_norm.offset, options.multiplier, options.softmax_scale)
        launch = Launch(
            kernel,
            self._programs,
            varying=[float(number) for number in numbers],
            strides=step.caches[0][0].stride()[:3],
            fixed=(layout,),
            options={"num_warps": self._tile.num_warps, "launch_cooperative_grid": self._programs > 1},
        )
        return launch, layout

    def _layout(self, tokens: int, max_seqlen_q: int, page_size: int) -> StepLayout:
        return layout_of(
            self.shape,
            programs=self._programs,
            arch=self._arch,
            tokens=tokens,
            max_seqlen_q=max_seqlen_q,
            page_size=page_size,
            kind=ACTIVATION_KINDS[self._options.activation],
            tile=self._tile,
        )

    def _table_of(self, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The addresses of all layers, (layers, len(ADDRESSES)) int64. It is made by a step that is not captured.

        Graphs read it, so those of earlier caches stay, up to _MOST_TABLES.
        """
        key = tuple([x.data_ptr() for pair in caches for x in pair])
        if key not in self._tables:
            rows = [
                _addresses(layer.weights() | {"k_cache": k, "v_cache": v})
                for layer, (k, v) in zip(self._layers, caches, strict=True)
            ]
            while len(self._tables) >= _MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=self._qkv.device)
        return self._tables[key]


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def _addresses(tensors: Mapping[str, Tensor | None]) -> list[int]:
    found = [tensors[name] for name in ADDRESSES]
    return [0 if x is None else x.data_ptr() for x in found]


def _shape_of(layer: StackLayer, options: StackOptions) -> StepShape:
    rows, hidden = layer.qkv.shape
    return StepShape(
        hidden=hidden,
        intermediate=layer.down.shape[1],
        num_heads=options.num_heads,
        num_kv_heads=(rows // options.head_dim - options.num_heads) // 2,
        head_dim=options.head_dim,
        rotary_dim=options.rotary_dim,
        head_norms=layer.q_norm is not None,
        qkv_bias=layer.qkv_bias is not None,
        itemsize=layer.qkv.element_size(),
    )
