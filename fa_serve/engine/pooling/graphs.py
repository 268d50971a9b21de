"""CUDA graphs for small batches of an encoder: the launches of its layers are captured once for each of a few sizes.

    graphs = EncoderGraphs(model, max_tokens=512)
    packed, hidden = graphs.run(inputs)        # None for a batch that is too large; hidden is overwritten by the next run

A batch is padded with one more sequence up to a size of TOKENS, and with empty sequences up to MAX_INPUTS + 1, so a few graphs
serve all small batches. Sizes lie close together where padding costs more than the launches that a graph saves. What a batch is
made of is copied to the same memory each time. Pooling and what is behind it is launched as usual. Larger batches keep a GPU
busy while the next launches come. Left out: how a graph is captured (runner/cuda_graphs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa_serve.engine.pooling.inputs import EncoderInputs
from fa_serve.engine.runner.cuda_graphs import capture
from fa_serve.hf.encoders.packed import PackedInputs, PackedModel

log = logging.getLogger("fa_serve.engine")

TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes to which batches are padded."""
MAX_INPUTS = 32
"""Inputs of a batch that takes a graph."""

Capture = Callable[[Callable[[], None], Any], tuple[Callable[[], None], Any]]


@dataclass(slots=True)
class _Graph:
    """inputs: what it reads; hidden: what it writes, (tokens, hidden_size)"""

    inputs: PackedInputs
    hidden: Tensor | None = None
    replay: Callable[[], None] | None = None


class EncoderGraphs:
    """Owner of the graphs and of the memory that they read.

    max_tokens: of an input. Padding is one as well, so there are no sizes behind two that lie further apart
    most:       tokens of a batch; larger sizes are of no use
    """

    def __init__(self, model: PackedModel, max_tokens: int, most: int = TOKENS[-1], capture: Capture = capture) -> None:
        self._model = model
        self._max_tokens = max_tokens
        paddings = (size - below for below, size in pairwise((0, *TOKENS)))
        sizes = [size for size, _ in takewhile(lambda each: each[1] <= max_tokens, zip(TOKENS, paddings, strict=True))]
        self._sizes = [size for below, size in pairwise((0, *sizes)) if below < most]
        self._capture = capture
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool: Any = None

    def run(self, inputs: EncoderInputs) -> tuple[PackedInputs, Tensor] | None:
        """The inputs on the device and the hidden states of all tokens, (total, hidden_size); None if no graph takes them."""
        total = len(inputs.ids)
        size = next((size for size in self._sizes if size >= total), None)
        if size is None or len(inputs) > MAX_INPUTS:
            return None
        key = (size, inputs.types is not None)
        known = self._graphs.get(key)
        packed = _padded(inputs, size, self._model.device, None if known is None else known.inputs)
        graph = known or self._captured(key, packed)
        if graph is None or graph.replay is None:
            return None
        if graph is known:
            graph.replay()
        assert graph.hidden is not None
        types = None if packed.type_ids is None else packed.type_ids[:total]
        borders = packed.cu_seqlens[: len(inputs) + 1]
        real = PackedInputs(packed.ids[:total], types, packed.positions[:total], borders, inputs.lengths.tolist(), packed.words)
        return real, graph.hidden[:total]

    def capture_ahead(self, *, takes_types: bool) -> None:
        """Capture all sizes, the largest first, so that the pool of memory does not grow."""
        for size in reversed(self._sizes):
            ids = np.zeros(size, dtype=np.int32)
            ends = np.array([*range(0, size, min(size, self._max_tokens)), size])
            self.run(EncoderInputs(ids, ends, ids if takes_types else None))

    def _captured(self, key: tuple[int, bool], packed: PackedInputs) -> _Graph | None:
        """A graph, which has run for these inputs. If it cannot be captured, no other one is tried."""
        graph = _Graph(packed._replace(lengths=[min(key[0], self._max_tokens)]))

        def step() -> None:
            graph.hidden = self._model.hidden(graph.inputs)

        try:
            step()  # what is compiled or planned at the first call is not captured
            graph.replay, self._pool = self._capture(step, self._pool)
        except (RuntimeError, ValueError) as error:
            log.warning("an encoder's layers cannot be captured in a CUDA graph, so they are launched one by one: %s", error)
            self._sizes = []
            return None
        graph.replay()
        self._graphs[key] = graph
        return graph


def _padded(inputs: EncoderInputs, size: int, device: torch.device, there: PackedInputs | None) -> PackedInputs:
    """The inputs with padding, on the device. there: where to write them"""
    more = size - len(inputs.ids)
    ids = np.pad(inputs.ids, (0, more))
    types = None if inputs.types is None else np.pad(inputs.types, (0, more))
    ends = np.full(MAX_INPUTS + 2, size)
    ends[: len(inputs) + 1] = inputs.ends
    return PackedInputs.of(ids, types, ends, device, there)
