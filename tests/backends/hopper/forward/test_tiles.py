"""`hopper.hopper_tiles`: the chosen tiles fit the GPU, and heads are grouped as documented."""

from __future__ import annotations

from itertools import product

import pytest

from fa_serve.backends.hopper.forward import tiles as choices
from fa_serve.backends.hopper.forward.tiles import (
    SHARED_BYTES,
    HopperTiles,
    head_group,
    heads_to_pack,
    hopper_forward_tiles,
    key_columns,
    key_splits,
    list_tiles,
    packs_queries,
    tree_tiles,
    value_columns,
)


def shared_bytes(tiles: HopperTiles, head_dim: int, head_dim_v: int) -> int:
    """Shared memory of a thread block. Hopper has 233,472 bytes for all of a multiprocessor."""
    d0, d1 = key_columns(head_dim)
    dv0, dv1 = value_columns(head_dim_v)
    queries = tiles.q_stages * tiles.block_m * (d0 + d1)
    keys = tiles.stages * tiles.block_n * (d0 + d1 + dv0 + dv1)
    out = tiles.block_m * (dv0 // tiles.o_parts + dv1) if tiles.o_parts else 0
    return 2 * (queries + keys + out) + 1024


ALL_WIDTHS = [16, 32, 40, 64, 72, 96, 128, 136, 160, 192, 256]


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [
        (8, (32, 0)),
        (40, (32, 16)),
        (56, (64, 0)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (104, (128, 0)),
        (128, (128, 0)),
        (144, (128, 16)),
        (160, (128, 32)),
        (192, (128, 64)),
    ],
)
def test_two_parts_cover_a_head(head_dim: int, columns: tuple[int, int]) -> None:
    assert key_columns(head_dim) == value_columns(head_dim) == columns


def test_wide_heads() -> None:
    """wgmma takes values of 256 columns in one part; Q and K have two parts of 128."""
    for head_dim in (200, 224, 256):
        assert key_columns(head_dim) == (128, 128)
        assert value_columns(head_dim) == (256, 0)


@pytest.mark.parametrize("dims", list(product(ALL_WIDTHS, ALL_WIDTHS)), ids=str)
def test_chosen_tiles_fit_the_chip(dims: tuple[int, int]) -> None:
    lengths = (1, 64, 65, 512, 1024, 2048, 4096, 100_000)
    windows = ((-1, -1), (-1, 0), (127, 0))
    kinds = ((False, False), (True, False), (True, True))
    chosen = [hopper_forward_tiles(*dims, w, n, n, *kind) for n, w, kind in product(lengths, windows, kinds)]
    for rows, keys in product((64, 128), (64, 128)):
        tiles = list_tiles(*dims, (rows, keys))
        assert rows % tiles.block_m == keys % tiles.block_n == 0
        chosen.append(tiles)
    for tiles in chosen:
        assert shared_bytes(tiles, *dims) <= SHARED_BYTES
        assert tiles.blocks_per_sm * shared_bytes(tiles, *dims) <= 233_472
        at_launch, consumer = tiles.registers
        threads = 128 * (tiles.groups + 1)
        assert at_launch % 8 == 0
        assert consumer % 8 == 0
        assert tiles.blocks_per_sm * threads * at_launch <= 65_536
        assert 128 * (tiles.groups * consumer + 24) <= threads * at_launch
        assert tiles.o_parts or value_columns(dims[1])[0] == key_columns(dims[0])[0]
        assert tiles.o_parts or value_columns(dims[1])[1] in (0, key_columns(dims[0])[1])


def test_rows_that_see_few_keys_take_small_tiles() -> None:
    small = hopper_forward_tiles(64, 64, (-1, 0), 2048, 2048, False)
    assert (small.block_m, small.block_n, small.blocks_per_sm) == (64, 64, 3)
    assert hopper_forward_tiles(64, 64, (127, 0), 100_000, 100_000, True, True) == small
    assert hopper_forward_tiles(64, 64, (-1, 0), 500, 8000, True, True).block_m == 128, (
        "the rows of a chunk see all keys before it"
    )
    assert hopper_forward_tiles(64, 64, (-1, -1), 512, 512, False).block_m == 192
    assert hopper_forward_tiles(64, 64, (-1, 0), 4096, 4096, False).block_m == 128
    assert hopper_forward_tiles(64, 64, (-1, 0), 4096, 4096, True) == small, "packed sequences may be shorter"
    assert hopper_forward_tiles(128, 128, (127, 0), 4096, 4096, False).block_m == 64
    assert hopper_forward_tiles(128, 128, (-1, 0), 1024, 1024, False).block_m == 128
    assert hopper_forward_tiles(128, 128, (-1, 0), 512, 512, False).block_m == 128
    assert hopper_forward_tiles(128, 128, (-1, 0), 197, 197, True).blocks_per_sm == 2
    assert hopper_forward_tiles(96, 96, (-1, 0), 512, 512, True).blocks_per_sm == 3
    assert hopper_forward_tiles(96, 96, (-1, 0), 1024, 1024, True).block_m == 128


def test_short_tiles_leave_exponentials_to_ptxas_unless_pages_would_need_one_more_kernel() -> None:
    assert not hopper_forward_tiles(128, 128, (-1, 0), 512, 512, True).softmax_first
    assert hopper_forward_tiles(128, 128, (-1, 0), 513, 513, True).softmax_first
    assert hopper_forward_tiles(128, 128, (-1, 0), 512, 512, True, True).softmax_first


@pytest.mark.parametrize(("seqlen", "rows"), [(192, 192), (197, 64), (257, 64), (384, 192), (577, 64), (730, 192), (1500, 192)])
def test_small_tiles_where_the_last_large_one_is_nearly_empty(seqlen: int, rows: int) -> None:
    for varlen in (False, True):
        assert hopper_forward_tiles(64, 64, (-1, -1), seqlen, seqlen, varlen).block_m == rows
    assert hopper_forward_tiles(64, 64, (-1, -1), seqlen, seqlen, True, True).block_m == 128
    assert hopper_forward_tiles(80, 80, (-1, -1), seqlen, seqlen, True).block_m == 128


def test_head_group_keeps_heads_of_one_key_head_together() -> None:
    assert head_group(64, 4, 1 << 20, 200) == (64, 4)
    assert head_group(64, 4, 8 << 20, 200) == (8, 4)
    assert head_group(64, 4, 1 << 30, 200) == (4, 4)
    assert head_group(2, 1, 0, 1) == (2, 2)
    assert head_group(64, 4, 1 << 20, 32, equal=True) == (4, 4)
    assert head_group(16, 1, 8 << 20, 128, equal=True) == (2, 4)


def test_the_last_group_gives_every_multiprocessor_several_tiles() -> None:
    assert head_group(64, 1, 16 << 20, 32) == (1, 13)
    assert head_group(64, 4, 16 << 20, 32) == (4, 16)
    assert head_group(8, 1, 16 << 20, 128) == (8, 8), "if the last group is half of the heads, there is one group"
    assert head_group(256, 1, 16 << 20, 4) == (1, 32), "groups do not grow beyond the heads that fit the cache"


@pytest.mark.parametrize(
    ("heads_per_kv", "queries", "expected"),
    [(1, 4, 1), (4, 16, 4), (4, 17, 1), (64, 2, 64), (128, 2, 1), (7, 4, 8), (12, 4, 16)],
)
def test_heads_share_tiles_if_queries_are_few_and_boxes_fit(heads_per_kv: int, queries: int, expected: int) -> None:
    assert heads_to_pack(heads_per_kv, queries, may_pad=True) == expected
    fits = expected == heads_per_kv
    assert heads_to_pack(heads_per_kv, queries, may_pad=False) == (expected if fits else 1)


@pytest.mark.parametrize(
    ("heads_per_kv", "queries", "keys", "rows", "expected"),
    [
        (2, 300, 5300, 128, 2),  # 5 tiles instead of 6
        (8, 300, 5300, 128, 8),  # 19 instead of 24
        (4, 20, 5300, 64, 4),
        (8, 256, 5300, 128, 1),  # no row is empty
        (8, 300, 1199, 128, 1),  # too few keys for each query
        (8, 300, 0, 128, 1),  # keys are not in pages
        (7, 300, 5300, 128, 1),  # no power of two
        (128, 300, 5300, 128, 1),
        (8, 700, 9000, 128, 1),  # 44 instead of 48
        (1, 300, 5300, 128, 1),
    ],
)
def test_heads_share_the_tiles_of_chunks_that_would_be_nearly_empty(
    heads_per_kv: int, queries: int, keys: int, rows: int, expected: int
) -> None:
    assert heads_to_pack(heads_per_kv, queries, keys, rows=rows, may_pad=True) == expected


@pytest.mark.parametrize(("tiles", "expected"), [(1, 16), (40, 13), (152, 3), (500, 1), (5000, 1)])
def test_the_device_may_split_the_keys_of_shared_tiles_into_waves(tiles: int, expected: int) -> None:
    assert key_splits(tiles, 132, 300, 5300, packed_heads=True) == expected
    assert key_splits(tiles, 132, 300, 1199, packed_heads=True) == 1


@pytest.mark.parametrize(
    ("heads", "dim", "sizes", "expected"),
    [
        ((32, 8), 128, (16, 16, 2048), True),
        ((64, 8), 128, (16, 16, 2048), True),
        ((32, 32), 128, (16, 16, 2048), True),
        ((32, 8), 128, (128, 4, 1024), True),
        ((32, 8), 128, (14, 4, 1024), False),
        ((32, 8), 128, (128, 1, 1024), False),
        ((32, 8), 128, (128, 17, 1024), False),
        ((32, 8), 128, (128, 4, 100_000), True),
        ((28, 4), 128, (128, 4, 1024), True),
        ((16, 8), 256, (128, 4, 1024), False),
        ((64, 8), 64, (32, 8, 1024), True),
        ((32, 8), 128, (32, 8, 4096), True),
        # half of the thread blocks would have a tile
        ((32, 8), 128, (16, 3, 1024), False),
        ((32, 8), 128, (16, 8, 4095), True),
        ((32, 8), 128, (16, 8, 4096), False),
        ((28, 4), 128, (32, 2, 4096), False),
        ((28, 4), 128, (32, 8, 4096), False),
        ((28, 4), 128, (32, 10, 4096), True),
        ((64, 8), 64, (32, 4, 4096), False),
    ],
)
def test_few_queries_of_enough_sequences(heads: tuple[int, int], dim: int, sizes: tuple[int, int, int], expected: bool) -> None:
    assert packs_queries(dim, dim, heads[0] // heads[1], heads[1], *sizes) == expected


@pytest.mark.parametrize(
    ("tiles", "queries", "keys", "expected"),
    [
        (32, 256, 4096, 16),
        (64, 512, 8704, 8),
        (112, 512, 8704, 4),
        (128, 512, 8704, 1),
        (160, 512, 8704, 3),
        (256, 512, 8704, 1),
        (270, 512, 8704, 1),
        (32, 256, 2047, 1),
        (32, 2048, 4096, 1),
        (256, 4, 4096, 8),
        (256, 4, 4095, 1),
        (1024, 4, 4096, 2),
        (8, 4, 4096, 16),
    ],
)
def test_keys_are_split_where_tiles_are_few_or_queries_are(tiles: int, queries: int, keys: int, expected: int) -> None:
    assert key_splits(tiles, 132, queries, keys) == expected


@pytest.mark.parametrize("halves", [False, True])
def test_tiles_of_the_tree_fit(halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "HALVES_TREE_TILES", halves)
    for dims, count in product(product(range(8, 129, 8), repeat=2), (64, 500)):
        tiles = tree_tiles(*dims, count)
        assert tiles.groups == (1 if halves and count == 64 else 2)
        assert shared_bytes(tiles, *dims) * tiles.blocks_per_sm <= SHARED_BYTES
