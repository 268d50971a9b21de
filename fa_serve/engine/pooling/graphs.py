"""CUDA graphs of an encoder: the launches of its layers are captured once for each of a few sizes of batches.

    graphs = EncoderGraphs(model, max_tokens=512)
    packed, hidden = graphs.run(inputs)        # None for a batch that is too large; hidden is overwritten by the next run

A batch is padded to one of the sizes in TOKENS with up to PADDINGS more sequences, and with empty sequences after them, so that
a few graphs serve all batches. Sizes lie close together where padding costs more than the launches that a graph saves.
Attention is planned for the longest input, and its table of tiles has room for all sequences. So a size has a graph for each of
the lengths in LONGEST that an input can have, and the shorter the inputs are, the more of them a graph takes (`most_inputs`).
Each batch is copied to the same memory. Pooling, and everything after it, is launched without a graph. Left out: how a graph is
captured (runner/cuda_graphs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fa_serve.engine.pooling.inputs import EncoderInputs
from fa_serve.engine.runner.cuda_graphs import capture
from fa_serve.hf.encoders.packed import PackedInputs, PackedModel

log = logging.getLogger("fa_serve.engine")

TOKENS = (
    *(16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144),
    *range(7168, 16385, 1024),
)
"""Sizes to which batches are padded. Where the host is slow, the launches of a large model take longer than its work on 4,096
tokens: 16 texts of 512 tokens through 28 layers of width 1,024 took 49 ms, and 14 ms in a batch that keeps the GPU busy. On the
host of an H200, 12 layers of width 768 took 7.5 ms to launch and 6.4 ms to compute with 16,384 tokens."""
PADDINGS = 16
"""The most sequences of padding that are not empty."""
LONGEST = (64, 512)
"""The input lengths that attention is planned for, unless a batch has a longer input."""
ALWAYS_INPUTS = 64
"""A graph takes so many inputs at least, however long they may be."""
Capture = Callable[[Callable[[], None], Any, nn.Module], tuple[Callable[[], None], Any]]


@dataclass(slots=True)
class _Graph:
    """inputs: what it reads"""

    inputs: PackedInputs
    replay: Callable[[], None] | None = None


class EncoderGraphs:
    """Owner of the graphs and of the memory that they read.

    max_tokens: the most tokens of an input, and of a sequence of padding. The sizes end before the first gap that PADDINGS
                sequences of so many tokens cannot fill
    most:       the most tokens of a batch; sizes that are larger than needed for it are left out
    """

    def __init__(self, model: PackedModel, max_tokens: int, most: int = TOKENS[-1], capture: Capture = capture) -> None:
        self._model = model
        self._max_tokens = max_tokens
        paddings = (size - below for below, size in pairwise((0, *TOKENS)))
        room = PADDINGS * min(max_tokens, LONGEST[0])
        sizes = [size for size, _ in takewhile(lambda each: each[1] <= room, zip(TOKENS, paddings, strict=True))]
        self._sizes = [size for below, size in pairwise((0, *sizes)) if below < most]
        self._capture = capture
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}  # by size, longest input, and whether tokens have types
        self._pool: Any = None
        self._hidden: Tensor | None = None  # (largest size, hidden_size): what all graphs write, or each would keep its own

    def run(self, inputs: EncoderInputs) -> tuple[PackedInputs, Tensor] | None:
        """The inputs on the device and the hidden states of all tokens, (total, hidden_size); None if no graph takes them."""
        total = len(inputs.ids)
        size = next((size for size in self._sizes if size >= total), None)
        if size is None:
            return None
        longest = min(each for each in self._lengths(size) if each >= inputs.lengths.max())
        if len(inputs) > most_inputs(size, longest):
            return None
        key = (size, longest, inputs.types is not None)
        known = self._graphs.get(key)
        packed = _padded(inputs, size, longest, self._model.device, None if known is None else known.inputs)
        graph = known or self._captured(key, packed)
        if graph is None or graph.replay is None:
            return None
        if graph is known:
            graph.replay()
        assert self._hidden is not None
        types = None if packed.type_ids is None else packed.type_ids[:total]
        borders = packed.cu_seqlens[: len(inputs) + 1]
        real = PackedInputs(packed.ids[:total], types, packed.positions[:total], borders, inputs.lengths.tolist(), packed.words)
        return real, self._hidden[:total]

    def capture_ahead(self, *, takes_types: bool) -> None:
        """Capture all sizes, the largest first, so that the pool of memory does not grow."""
        for size in reversed(self._sizes):
            ids = np.zeros(size, dtype=np.int32)
            for longest in self._lengths(size):
                ends = np.array([*range(0, size, longest), size])
                self.run(EncoderInputs(ids, ends, ids if takes_types else None))

    def _lengths(self, size: int) -> list[int]:
        """The input lengths that this size has graphs for: the longest, and those of LONGEST with which it takes more inputs.

        Attention is faster if it is planned for up to LONGEST[1] tokens, so that is among them even with no more inputs.
        """
        limit = min(size, self._max_tokens)
        shorter = [each for each in LONGEST if each < limit]
        return [*(each for each in shorter if each == LONGEST[1] or most_inputs(size, each) > ALWAYS_INPUTS), limit]

    def _captured(self, key: tuple[int, int, bool], packed: PackedInputs) -> _Graph | None:
        """Capture a graph, and run it for these inputs. If it cannot be captured, no other capture is tried."""
        graph = _Graph(packed._replace(lengths=[key[1]]))
        largest = self._sizes[-1]

        def step() -> None:
            hidden = self._model.hidden(graph.inputs)
            if self._hidden is None:
                self._hidden = hidden.new_empty(largest, hidden.shape[1])
            self._hidden[: len(hidden)].copy_(hidden)

        try:
            step()  # what is compiled or planned at the first call is not captured
            graph.replay, self._pool = self._capture(step, self._pool, self._model.model)
        except (RuntimeError, ValueError) as error:
            log.warning("an encoder's layers cannot be captured in a CUDA graph, so they are launched one by one: %s", error)
            self._sizes = []
            return None
        graph.replay()
        self._graphs[key] = graph
        return graph


def most_inputs(size: int, longest: int) -> int:
    """The most inputs of a batch that is padded to `size` tokens, and of which an input has up to `longest` tokens."""
    return max(ALWAYS_INPUTS, 4 * size // longest)


def _padded(inputs: EncoderInputs, size: int, longest: int, device: torch.device, there: PackedInputs | None) -> PackedInputs:
    """The inputs with padding, on the device. longest: tokens of a sequence of padding; there: where to write them"""
    total = len(inputs.ids)
    ids = np.pad(inputs.ids, (0, size - total))
    types = None if inputs.types is None else np.pad(inputs.types, (0, size - total))
    ends = np.full(most_inputs(size, longest) + PADDINGS + 1, size)
    ends[: len(inputs) + 1] = inputs.ends
    behind = ends[len(inputs) + 1 :][:PADDINGS]
    behind[:] = np.minimum(total + longest * np.arange(1, PADDINGS + 1), size)
    return PackedInputs.of(ids, types, ends, device, there)
