"""`hopper.hopper_tiles`: the chosen tiles fit the GPU, and heads are grouped as documented."""

from __future__ import annotations

import pytest

from fa_serve.backends.hopper.hopper_tiles import HEAD_DIMS, TileConfig, forward_tiles, head_group


def shared_bytes(tiles: TileConfig, head_dim: int, head_dim_v: int) -> int:
    """Shared memory of a thread block. Hopper has 232,448 bytes for one, and 233,472 for all of a multiprocessor."""
    first, second, value = HEAD_DIMS[head_dim, head_dim_v]
    queries = tiles.q_stages * tiles.block_m * (first + second)
    keys = tiles.stages * tiles.block_n * (first + second + value)
    out = tiles.block_m * value // tiles.o_parts if tiles.o_parts else 0
    return 2 * (queries + keys + out) + 1024


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("seqlen", [1, 64, 65, 512, 1024, 2048, 4096, 100_000])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (127, 0)], ids=["full", "causal", "window"])
def test_chosen_tiles_fit_the_chip(dims: tuple[int, int], seqlen: int, window: tuple[int, int]) -> None:
    for varlen, paged in ((False, False), (True, False), (True, True)):
        tiles = forward_tiles(*dims, window, seqlen, seqlen, varlen, paged)
        assert shared_bytes(tiles, *dims) <= 232_448
        assert tiles.blocks_per_sm * shared_bytes(tiles, *dims) <= 233_472
        at_launch, consumer = tiles.registers
        threads = 128 * (tiles.groups + 1)
        assert at_launch % 8 == 0
        assert consumer % 8 == 0
        assert tiles.blocks_per_sm * threads * at_launch <= 65_536
        assert 128 * (tiles.groups * consumer + 24) <= threads * at_launch


def test_rows_that_see_few_keys_take_small_tiles() -> None:
    small = forward_tiles(64, 64, (-1, 0), 2048, 2048, False)
    assert (small.block_m, small.block_n, small.blocks_per_sm) == (64, 64, 3)
    assert forward_tiles(64, 64, (127, 0), 100_000, 100_000, True, True) == small
    assert forward_tiles(64, 64, (-1, 0), 500, 8000, True, True).block_m == 128, "the rows of a chunk see all keys before it"
    assert forward_tiles(64, 64, (-1, -1), 512, 512, False).block_m == 192
    assert forward_tiles(128, 128, (127, 0), 4096, 4096, False).block_m == 64
    assert forward_tiles(128, 128, (-1, 0), 1024, 1024, False).block_m == 128


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
