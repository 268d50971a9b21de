"""What a step says about the states of its sequences: a `ScheduledBatch` in, the fields of `fa_serve.ops.StateBatch` out.

    arrays.inputs.update(state_arrays(batch))         # NumPy arrays, sent with the others of the step
    states = state_batch(sent, page_size, max_seqlen_q)  # tensors on the device

Left out: which states a sequence reads and writes, which the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.ops import FEW_ROWS, PIECE_ROWS, StateBatch
from fa_serve.spec import ParameterError

PIECES_OF_SEQUENCE = 3
"""Pieces of a sequence that a graph has room for in addition to full ones: the first and the last piece, and one that is cut
where a state is kept. A step with more pieces runs without a graph."""


def check_settings_with_states(name: str, config: EngineConfig, *, drafting: bool) -> None:
    """Raise ParameterError for settings that are not available for models with states. name: name of the model's class"""
    if config.deterministic:
        rule = f"be False for {name}, which keeps states: chunks of prompts and single tokens round them differently"
        raise ParameterError("deterministic", rule, config.deterministic)
    if config.lora_budget and config.tensor_parallel > 1:
        rule = f"be 0, and lora empty, with tensor_parallel above 1 for {name}, which keeps states"
        raise ParameterError("lora_bytes", rule, config.lora_budget)
    if drafting:
        raise ParameterError("speculative", f"name a draft model that keeps no states, unlike {name}", config.model_name)


def state_arrays(batch: ScheduledBatch) -> dict[str, NDArray[Any]]:
    """What the scheduler has decided for the chunks of a step."""
    targets = [chunk.stores[-1][1] if chunk.stores and chunk.length <= FEW_ROWS else -1 for chunk in batch.chunks]
    pieces = []
    first = 0
    for sequence, chunk in enumerate(batch.chunks):
        if chunk.length > FEW_ROWS:
            stores = dict(chunk.stores)
            for low, high in _pieces(chunk.start, chunk.start + chunk.length, stores):
                pieces.append((first + low - chunk.start, high - low, sequence, stores.get(high, -1)))
        first += chunk.length
    return _arrays([chunk.source for chunk in batch.chunks], targets, pieces)


def empty_state_arrays(lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
    """The fields for sequences of these lengths that begin in the step and write no states."""
    firsts = np.cumsum([0, *lengths])
    pieces = [
        (int(firsts[sequence]) + low, high - low, sequence, -1)
        for sequence, length in enumerate(lengths)
        if length > FEW_ROWS
        for low, high in _pieces(0, length)
    ]
    none = [-1] * len(lengths)
    return _arrays(none, none, pieces)


def num_graph_pieces(batch: int, tokens: int, prompts: bool) -> int:
    """How many pieces a graph of `batch` sequences and `tokens` tokens has room for. Only steps with prompts have pieces."""
    return tokens // PIECE_ROWS + PIECES_OF_SEQUENCE * batch if prompts else 0


def padding_state_arrays(batch: int, tokens: int, prompts: bool) -> dict[str, NDArray[Any]]:
    """The fields for `batch` sequences of padding in a step of `tokens` tokens."""
    none = np.full(batch, -1, dtype=np.int32)
    pieces = np.zeros((num_graph_pieces(batch, tokens, prompts), 4), dtype=np.int32)
    pieces[:, 3] = -1
    return {"sources": none, "targets": none.copy(), "pieces": pieces}


def state_batch(fields: Mapping[str, Tensor], page_size: int, max_seqlen_q: int) -> StateBatch:
    """The tensors of a step. fields: on the device, those of `state_arrays` and of `batch_arrays`"""
    return StateBatch(
        page_size=page_size,
        sources=fields["sources"],
        targets=fields["targets"],
        slots=fields["slots"],
        cu_seqlens=fields["cu_seqlens_q"],
        seqused_k=fields["seqused_k"],
        chunks=fields["pieces"],
        most_rows=1 if max_seqlen_q == 1 else FEW_ROWS,
        even_seqs=max(1, len(fields["input_ids"]) // max_seqlen_q),
    )


def _arrays(
    sources: Sequence[int], targets: Sequence[int], pieces: Sequence[tuple[int, int, int, int]]
) -> dict[str, NDArray[Any]]:
    return {
        "sources": np.array(sources, dtype=np.int32),
        "targets": np.array(targets, dtype=np.int32),
        "pieces": np.array(pieces, dtype=np.int32).reshape(-1, 4),
    }


def _pieces(start: int, end: int, stores: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
    """The positions start .. end - 1 as (first, end), cut at multiples of PIECE_ROWS and at the positions of `stores`."""
    cuts = {start, end, *range(start // PIECE_ROWS * PIECE_ROWS + PIECE_ROWS, end, PIECE_ROWS), *stores}
    return pairwise(sorted(cuts))
