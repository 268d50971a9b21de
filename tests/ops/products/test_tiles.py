"""The tiles of the product of one token with a matrix: what must hold for every size, and what was measured; and splits."""

from __future__ import annotations

import pytest
import torch
from product_cases import dense

from fa_serve.ops.products.tiles import (
    choose_splits,
    hopper_invariant_tile,
    invariant_segments,
    invariant_tile,
    matrix_row_tile,
    segment_columns,
)


@pytest.mark.parametrize("n", [1, 5, 1000, 4096, 151936])
@pytest.mark.parametrize("k", [64, 1024, 3000, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_row_tiles_fill_the_gpu(n: int, k: int, gated: bool) -> None:
    block_n, block_k = matrix_row_tile(dense("float", n * (1 + gated), k, gated=gated))
    assert block_n == 1 or -(-n // block_n) >= 256
    assert block_n * block_k * (1 + gated) <= 8192, "more than a program can have in flight"
    assert block_k & (block_k - 1) == 0


def test_row_tiles_are_those_measured_fastest() -> None:
    assert matrix_row_tile(dense("float", 6144, 4096)) == (8, 1024)
    assert matrix_row_tile(dense("float", 4096, 14336)) == (8, 512)
    assert matrix_row_tile(dense("float", 2 * 14336, 4096, gated=True)) == (4, 1024)
    assert matrix_row_tile(dense("float", 2 * 3072, 1024, gated=True)) == (4, 512)


def test_an_invariant_product_has_one_tile() -> None:
    assert len({invariant_tile(dense("float", tokens=tokens)) for tokens in (1, 63, 1000)}) == 1
    assert invariant_tile(dense("float", dtype=torch.float32)).block_m == 32


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (5000, 520)])
def test_segments_of_a_hopper_tile_do_not_depend_on_rows(n: int, k: int) -> None:
    tiles = [hopper_invariant_tile(dense("float", n, k, tokens=tokens)) for tokens in (1, 64, 65, 300, 2048, 8192)]
    assert {tile.segments for tile in tiles} == {invariant_segments(n, k)}
    assert all(segment_columns(k, invariant_segments(n, k)) % tile.block_k == 0 for tile in tiles)
    assert all(tile.block_m >= 64 for tile in tiles), "another instruction would multiply fewer rows"
    assert tiles[0].apart == (invariant_segments(n, k) > 1)
    assert not tiles[-1].apart, "many rows have programs enough"


@pytest.mark.parametrize(
    ("programs", "room", "k", "columns", "most", "splits"),
    [
        pytest.param(64, 528, 14336, 1024, 1 << 30, 8, id="room"),
        pytest.param(64, 511, 14336, 1024, 1 << 30, 4, id="no-room-for-8"),
        pytest.param(64, 528, 4096, 1024, 1 << 30, 4, id="columns"),
        pytest.param(64, 528, 4095, 1024, 1 << 30, 2, id="columns-missing"),
        pytest.param(64, 528, 14336, 1024, 2, 2, id="most"),
        pytest.param(600, 528, 14336, 1024, 1 << 30, 1, id="full"),
    ],
)
def test_sums_are_split_while_there_is_room(programs: int, room: int, k: int, columns: int, most: int, splits: int) -> None:
    assert choose_splits(programs, room, k, columns, most) == splits
