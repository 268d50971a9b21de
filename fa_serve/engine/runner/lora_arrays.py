"""Which tokens of a step have which adapter: the slots of sequences in, the fields of `fa_serve.ops.LoraBatch` out.

    arrays = lora_arrays(slots, lengths, logits_indices, block_rows=16)       # NumPy arrays, sent with the others of the step

Tokens are sorted by adapter and cut into tiles of one adapter each. Left out: which adapter is in which slot
(fa_serve.engine.lora.pool).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DECODING_ROWS = 16
PROMPT_ROWS = 64
"""Rows of a tile where sequences compute one token and drafts, and where there are prompts."""


def tile_rows(queries: int) -> int:
    """Rows of a tile. queries: largest number of tokens of a sequence"""
    return DECODING_ROWS if queries <= DECODING_ROWS else PROMPT_ROWS


def max_tiles(tokens: int, batch: int, block_rows: int) -> int:
    """The number of tiles that so many tokens of `batch` sequences have at most."""
    return tokens // block_rows + min(batch, tokens)


def tile_arrays(slots: NDArray[Any], block_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The fields `rows` and `tiles`, without padding. slots: of each row, -1 for one without an adapter

    `rows` has an entry for each row; those of rows without an adapter come last.
    """
    none = np.iinfo(np.int64).max
    keys = np.where(slots < 0, none, slots)
    rows = np.argsort(keys, kind="stable").astype(np.int32)
    tiles = []
    first = 0
    for slot, count in zip(*(x.tolist() for x in np.unique(keys, return_counts=True)), strict=True):
        if slot != none:
            tiles += [(slot, first + start, min(block_rows, count - start)) for start in range(0, count, block_rows)]
            first += count
    return rows, np.array(tiles, dtype=np.int32).reshape(-1, 3)
