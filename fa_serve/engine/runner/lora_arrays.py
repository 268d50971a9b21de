"""Which tokens of a step have which adapter: a `ScheduledBatch` in, the fields of `fa_serve.ops.LoraBatch` out.

    adapters = step_adapters(batch, slot_of)         # None if no sequence of the step has an adapter
    arrays = lora_arrays(adapters, logits_indices, tokens=64, queries=1)      # NumPy arrays, sent with the others of the step
    step = lora_step(memory, sent, adapters, queries=1)                       # tensors on the device

Tokens are sorted by adapter and cut into tiles of one adapter each. Left out: which adapter is in which slot
(fa_serve.engine.lora.pool).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.lora.pool import Adapter
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.hf.lora.product import LoraStep
from fa_serve.ops.lora.problem import MOST_MERGED_TOKENS, SMALL_TILE_ROWS

LARGE_TILE_ROWS = 64
"""Rows of a tile in steps with prompts and more tokens than MOST_MERGED_TOKENS. Tiles of other steps have SMALL_TILE_ROWS."""
_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step on the host.

    slots:    slot of each token's adapter; -1 for a token without an adapter
    is_eager: the step must run without a CUDA graph
    outer:    the slots of adapters with parts that pages do not hold, such as the embedding's, in order
    """

    slots: NDArray[np.int64]
    is_eager: bool
    outer: tuple[int, ...]


def step_adapters(batch: ScheduledBatch, slot_of: Callable[[Adapter], int]) -> StepAdapters | None:
    """The adapters of the sequences of a step; None if no sequence has an adapter."""
    adapters = [chunk.sequence.request.adapter for chunk in batch.chunks]
    known = {adapter: slot_of(adapter) for adapter in adapters if adapter is not None}
    if not known:
        return None
    slots = [-1 if adapter is None else known[adapter] for adapter in adapters]
    lengths = [chunk.length for chunk in batch.chunks]
    outer = sorted(slot for adapter, slot in known.items() if adapter.outer_bytes)
    return StepAdapters(np.repeat(np.array(slots, dtype=np.int64), lengths), any(x.is_eager for x in known), tuple(outer))


def tile_rows(tokens: int, queries: int) -> int:
    """Rows of a tile. tokens: of the step, padding included; queries: largest number of tokens of a sequence"""
    return SMALL_TILE_ROWS if tokens <= MOST_MERGED_TOKENS or queries <= SMALL_TILE_ROWS else LARGE_TILE_ROWS


def lora_padding(tokens: int, batch: int, queries: int) -> dict[str, NDArray[Any]]:
    """The fields of a step without adapters, with the most tiles that `tokens` tokens of `batch` sequences can have."""
    block_rows = tile_rows(tokens, queries)
    tiles = np.zeros((tokens // block_rows + min(batch + 1, tokens), 3), dtype=np.int32)
    found = _tiles_of(-1, 0, tokens, block_rows)
    tiles[: len(found)] = found
    return {
        "lora_rows": np.arange(tokens, dtype=np.int32),
        "lora_tiles": tiles,
        "lora_slots": np.full(tokens, -1, dtype=np.int32),
    }


def name_padding(padded: Mapping[str, NDArray[Any]], tokens: int, num_tiles: int, queries: int) -> None:
    """Name the rows past the step's `tokens` in tiles without an adapter, which follow the step's `num_tiles` tiles."""
    tiles = padded["lora_tiles"]
    total = len(padded["lora_rows"])
    found = _tiles_of(-1, tokens, total - tokens, tile_rows(total, queries))
    tiles[num_tiles:] = 0
    tiles[num_tiles : num_tiles + len(found)] = found


def lora_arrays(
    adapters: StepAdapters, logits_indices: NDArray[np.int64], tokens: int, queries: int
) -> dict[str, NDArray[Any]]:
    """The fields of a step. logits_indices: the token of each row of the logits; tokens, queries: as in `tile_rows`"""
    rows, tiles = tile_arrays(adapters.slots, tile_rows(tokens, queries))
    fields: dict[str, NDArray[Any]] = {
        "lora_rows": rows,
        "lora_tiles": tiles,
        "lora_slots": adapters.slots.astype(np.int32),
    }
    for slot in adapters.outer:
        fields[f"lora_tokens_{slot}"] = np.flatnonzero(adapters.slots == slot)
        fields[f"lora_logits_{slot}"] = np.flatnonzero(adapters.slots[logits_indices] == slot)
    return fields


def lora_step(memory: LoraMemory, fields: Mapping[str, Tensor], adapters: StepAdapters | None, queries: int) -> LoraStep | None:
    """What the products of a step read; None if the step has none of the fields of `lora_arrays`.

    fields: on the device; adapters: those of a step without a CUDA graph, None in a graph
    """
    if "lora_tiles" not in fields:
        return None
    outer = () if adapters is None else adapters.outer
    rows = fields["lora_rows"]
    batch = memory.batch(rows, fields["lora_tiles"], fields["lora_slots"], tile_rows(len(rows), queries))
    return LoraStep(batch, [(slot, fields[f"lora_tokens_{slot}"], fields[f"lora_logits_{slot}"]) for slot in outer])


def tile_arrays(slots: NDArray[np.int64], block_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The fields `rows` and `tiles` of `LoraBatch`, without padding. slots: slot of each row, -1 for a row without adapter"""
    keys = np.where(slots < 0, _NONE, slots)
    rows = np.argsort(keys, kind="stable").astype(np.int32)
    tiles = [np.zeros((0, 3), dtype=np.int32)]
    first = 0
    for slot, count in zip(*(x.tolist() for x in np.unique(keys, return_counts=True)), strict=True):
        tiles.append(_tiles_of(-1 if slot == _NONE else slot, first, count, block_rows))
        first += count
    return rows, np.concatenate(tiles)


def _tiles_of(slot: int, first: int, count: int, block_rows: int) -> NDArray[np.int32]:
    """The tiles of `count` entries from `first` on, (tiles, 3)."""
    tiles = [(slot, first + start, min(block_rows, count - start)) for start in range(0, count, block_rows)]
    return np.array(tiles, dtype=np.int32).reshape(-1, 3)
