"""The adapters of one product in memory, and which token of a step takes which adapter.

    weights = LoraWeights(a, b, scales, ones, factors, counters, widths)     # of a product with k columns, merged of parts
    batch = LoraBatch(rows, tiles, slots, pages, num_pages, block_rows=16)

The memory of adapters is divided into pages of PAGE_RANKS ranks. An adapter has as many pages as its largest rank needs, in any
order, and a slot, whose row of `LoraBatch.pages` lists them. Left out: who gets which pages.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PAGE_RANKS = 16
"""Ranks in a page: the least number of columns that a product of tensor cores has."""
LORA_COUNTERS = 65
COUNTER_WORDS = 16
"""Counters of a product, and the words from one to the next: each has a line of the cache (row_product.py)."""


class LoraWeights(NamedTuple):
    """The adapters of one product, whose rows are those of one part or of several parts that are merged.

    A token with an adapter gets, in the columns of part p,

        y += scale * (x A^T) B^T + scale * bias
        y += (y - base bias) * factor                 before that, for DoRA

    a:       (num_pages, parts, PAGE_RANKS, k), only the first stride is free
    b:       (num_pages, PAGE_RANKS, n), only the first stride is free: B^T of each part in the columns of that part
    scales:  (slots, parts) float32; 0 where an adapter leaves a part as it is
    ones:    (slots, parts) int32: the rank whose product with A counts as 1, so that its row of b is the bias of B; -1 for none
    factors: (slots, parts) int32: the rank whose row of b is the factor of DoRA less 1, and whose row of a is 0; -1 for none
    counters: (LORA_COUNTERS, COUNTER_WORDS) int64, contiguous, first 0: what the programs of a launch count (row_product.py)
    widths:  columns of each part; their sum is n

    Of scales, ones and factors only the first stride is free, and it is that of all three.
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

    rows:       (entries,) int32: numbers of rows, sorted by adapter; what no tile names is not read
    tiles:      (num_tiles, 3) int32: a slot, the first of its entries in `rows`, and how many, up to block_rows; 0 is padding.
                Tiles of one slot are neighbours. The slot is -1 for rows without an adapter, whose tiles come last: together
                the tiles name each row of a step once
    slots:      (entries,) int32: of each row, in the order of the step; -1 for one without an adapter
    pages:      (slots, max_pages) int32, the pages of each slot
    num_pages:  (slots,) int32
    block_rows: a power of two, at least 16
    """

    rows: Tensor
    tiles: Tensor
    slots: Tensor
    pages: Tensor
    num_pages: Tensor
    block_rows: int
