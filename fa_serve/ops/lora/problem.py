"""The adapters of one product in memory, and which token of a step takes which adapter.

    weights = LoraWeights(a, b, scales, ones, factors, counters, widths)     # of a product with k columns and merged parts
    batch = LoraBatch(rows, tiles, slots, pages, num_pages, block_rows=16)

The memory of adapters is divided into pages of PAGE_RANKS ranks. An adapter has as many pages as its largest rank needs, in any
order, and one slot. The slot's row of `LoraBatch.pages` lists the pages. Left out: the allocation of pages.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PAGE_RANKS = 16
"""Ranks in a page: the smallest number of columns that tensor cores multiply."""
SMALL_TILE_ROWS = 16
"""Rows of a tile in steps of few tokens. Tiles of other steps have more, because most of their rows are prompts'."""
MOST_MERGED_TOKENS = 128
"""The most tokens that product.py multiplies, in tiles of SMALL_TILE_ROWS. For more, cuBLAS multiplies and kernel.py adds
adapters."""
LORA_COUNTERS = 65
COUNTER_WORDS = 16
"""The counters of a product, and the int64 words from one counter to the next, so that each has its own cache line
(row_product.py)."""


class LoraWeights(NamedTuple):
    """The adapters of one product. The product is one part, or several parts whose rows are merged, such as q, k and v.

    A token with an adapter gets, in the columns of part p,

        y += (y - base bias) * factor                 only for DoRA, before the next line
        y += scale * (x A^T) B^T + scale * bias

    a:       (num_pages, parts, PAGE_RANKS, k), contiguous except for the first stride
    b:       (num_pages, PAGE_RANKS, n), contiguous except for the first stride: the columns of a part hold its B^T
    scales:  (slots, parts) float32; 0 where an adapter does not change a part
    ones:    (slots, parts) int32: the rank whose x A^T counts as 1, so that its row of b is the bias; -1 without a bias
    factors: (slots, parts) int32: the rank whose row of b is DoRA's factor minus 1, and whose row of a is 0; -1 without DoRA
    counters: (LORA_COUNTERS, COUNTER_WORDS) int64, contiguous, initially 0: programs of a launch count here (row_product.py)
    widths:  columns of each part; their sum is n

    scales, ones and factors are contiguous except for the first stride, which is the same for all three.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    ones: Tensor
    factors: Tensor
    counters: Tensor
    widths: tuple[int, ...]


class LoraBatch(NamedTuple):
    """Which rows of a step have which adapter.

    rows:       (entries,) int32: row numbers, sorted by adapter; entries that belong to no tile are not read
    tiles:      (num_tiles, 3) int32: the slot of a tile, its first entry in `rows`, and its number of entries, up to
                block_rows. A tile with 0 entries is padding. Tiles of one slot are neighbours. The slot is -1 for rows without
                an adapter, whose tiles come last. Together the tiles cover each row of a step once
    slots:      (entries,) int32: the slot of each row, in the order of the step; -1 for a row without an adapter
    pages:      (slots, max_pages) int32, the pages of each slot
    num_pages:  (slots,) int32, how many pages each slot has
    block_rows: the most rows of a tile: a power of two, at least 16
    """

    rows: Tensor
    tiles: Tensor
    slots: Tensor
    pages: Tensor
    num_pages: Tensor
    block_rows: int
