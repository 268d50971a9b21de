"""Tiles of the portable kernels: the bounds that other parts of the package rely on."""

from __future__ import annotations

from itertools import product

import pytest

from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.triton.tiles import (
    DECODE_MIN_ROWS,
    backward_tiles,
    batch_block,
    combine_tiles,
    decode_tiles,
    forward_tiles,
    sparse_tiles,
)

ARCHS = (0, 80, 86, 89, 90, 100, 120)
DIMS = (16, 64, 96, 128, 192, 256, 512)


def test_no_tile_over_pages_reads_more_keys_than_the_scheduler_keeps() -> None:
    """The scheduler gives pages behind a window back; a larger tile would read pages of other sequences."""
    for arch, itemsize, dim, q, k, causal in product(ARCHS, (2, 4), DIMS, (64, 4096), (100, 100_000), (True, False)):
        tile = forward_tiles(arch, itemsize, dim, dim, q, k, causal=causal, paged=True, masked=False)
        assert tile.block_n <= MAX_KEYS_PER_TILE
    for arch, (itemsize, kv_itemsize), dim, batch, q, k, splits in product(
        ARCHS, ((2, 1), (2, 2), (4, 4)), DIMS, (1, 64), (1, 16), (100, 100_000), (0, 4)
    ):
        tiles = decode_tiles(arch, 132, itemsize, kv_itemsize, dim, dim, 32, 8, batch, q, k, splits)
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        assert tiles.block_m >= DECODE_MIN_ROWS


def test_sparse_tiles_divide_the_blocks_of_the_lists() -> None:
    """A tile of rows lies in one block of queries, and a block of keys is a whole number of tiles."""
    for arch, itemsize, dim, block_q, block_k, groups, queries in product(
        ARCHS, (2, 4), DIMS, (64, 128), (64, 128), (1, 3, 8, 71), (1, 5, 64, 5000)
    ):
        tiles = sparse_tiles(arch, 132, itemsize, dim, dim, block_q * groups, block_k, groups * queries, 8, 0, 0)
        assert block_q * groups % tiles.block_m == block_k % tiles.block_n == 0
        assert tiles.block_m >= 16
        assert tiles.splits == 1
    assert sparse_tiles(90, 132, 2, 128, 128, 512, 64, 4, 8, 16384, 0).splits == 33
    assert sparse_tiles(90, 132, 2, 128, 128, 512, 64, 4, 8, 16384, 3).splits == 3


@pytest.mark.parametrize("batch", [1, 32, 33, 256, 257, 5000])
def test_batch_block_covers_the_batch(batch: int) -> None:
    assert batch_block(batch) >= batch


def test_fixed_splits_are_merged_in_an_order_that_the_batch_does_not_change() -> None:
    for splits in (2, 16, 17, 64):
        assert combine_tiles(False, splits, 128, 8) == combine_tiles(False, splits, 128, 100_000)


def test_backward_tiles_fit_the_padding_of_row_statistics() -> None:
    """Whole tiles of rows are read from statistics that are padded to multiples of 128."""
    for arch, itemsize, dim in product(ARCHS, (2, 4), DIMS):
        tiles = backward_tiles(arch, itemsize, dim, dim)
        assert 128 % tiles.keys.block_m == 128 % tiles.queries.block_m == 0


def test_verify_steps_of_a_hopper_gpu_have_one_tile_of_64_rows() -> None:
    """16 queries of 4 query heads, or 8 of 4, read each key once."""
    for max_q, rows in ((2, 8), (4, 16), (5, 64), (8, 64), (16, 64)):
        tiles = decode_tiles(90, 132, 2, 2, 128, 128, 32, 8, 32, max_q, 4096, 0)
        assert (tiles.block_m, tiles.by_rows) == (rows, rows == 64)
    for arch, kv_itemsize, dim in ((80, 2, 128), (100, 2, 128), (90, 1, 128), (90, 2, 256)):
        assert decode_tiles(arch, 132, 2, kv_itemsize, dim, dim, 32, 8, 32, 8, 4096, 0).block_m == 32
