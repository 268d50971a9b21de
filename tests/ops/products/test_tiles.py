"""The tiles of the product of one token with a matrix: what must hold for every size, and what was measured; and splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from product_cases import dense

from fa_serve.ops.products import tiles
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import select_kernel
from fa_serve.ops.products.tiles import (
    FEW_ROWS_ROOM,
    ONE_TILE,
    InvariantWgmmaTile,
    choose_splits,
    columns_ahead,
    few_rows_bytes,
    hopper_invariant_tile,
    invariant_rows_tile,
    invariant_tile,
    matrix_row_tile,
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
    assert len({invariant_tile(dense("float", tokens=tokens, arch=80)) for tokens in (1, 63, 1000)}) == 1
    assert invariant_tile(dense("float", dtype=torch.float32)).block_m == 32


@pytest.mark.parametrize(
    ("n", "k", "gated", "sizes"),
    [
        pytest.param(4096, 1024, False, (32, 256), id="qkv-0.6B"),
        pytest.param(1024, 3072, False, (8, 256), id="down-0.6B"),
        pytest.param(6144, 1024, True, (8, 256), id="gate-0.6B"),
        pytest.param(6144, 4096, False, (16, 256), id="qkv-8B"),
        pytest.param(28672, 4096, True, (16, 128), id="gate-8B"),
        pytest.param(151936, 1024, False, (64, 128), id="head"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_tiles_of_few_rows(n: int, k: int, gated: bool, sizes: tuple[int, int], tokens: int) -> None:
    """Two programs fit on a multiprocessor, and all multiprocessors have about as many tiles."""
    product = dense("float", n, k, gated=gated, invariant=True, tokens=tokens, num_sms=132)
    found = invariant_rows_tile(product)
    assert (found.block_n, found.block_k) == sizes
    weights = found.block_n * found.block_k * found.stages * 2 * (1 + gated)
    assert found.stages > 1
    assert few_rows_bytes(product) + weights <= FEW_ROWS_ROOM


@pytest.mark.parametrize(
    ("n", "tokens", "sizes"),
    [
        pytest.param(4096, 1, (64, 32), id="few-rows"),
        pytest.param(1024, 64, (64, 16), id="few-columns"),
        pytest.param(28672, 64, (64, 128), id="many-columns"),
        pytest.param(4096, 256, (64, 64), id="256-rows"),
        pytest.param(1024, 256, (64, 32), id="256-rows-few-columns"),
        pytest.param(4096, 8192, (128, 256), id="many-rows"),
    ],
)
def test_a_hopper_tile_gives_most_multiprocessors_a_program(n: int, tokens: int, sizes: tuple[int, int]) -> None:
    tile = hopper_invariant_tile(dense("float", n, 4096, tokens=tokens, invariant=True))
    assert (tile.block_m, tile.block_n) == sizes
    assert (tile.segments, tile.apart) == (1, False), "segments would be other bits"


def test_tiles_follow_the_number_of_rows_on_hopper_alone_and_where_they_are_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = dense("float", 4096, 4096, tokens=8192, invariant=True)

    def chosen(**changes: Any) -> tuple[str, Any]:
        choice = select_kernel(replace(product, **changes))
        return choice.kernel.name, choice.tile

    monkeypatch.setattr(tiles, "CHOOSES_BY_ROWS", False)
    assert chosen() == ("invariant", ONE_TILE)
    monkeypatch.setattr(tiles, "CHOOSES_BY_ROWS", True)
    assert chosen() == ("invariant_wgmma", InvariantWgmmaTile(256, 4, 2))
    assert chosen(arch=80) == ("invariant", ONE_TILE)
    assert chosen(dtype=torch.float32) == ("invariant", invariant_tile(replace(product, dtype=torch.float32)))
    for changes in ({"tokens": 128}, {"gluon": False}, {"aligned": False}, {"matrix_dtype": torch.float16}, {"k": 4100}):
        assert chosen(**changes)[0] == "invariant", changes
    assert all(tile.block_m >= 64 for tile in tiles.HOPPER_TILES), "another instruction would multiply fewer rows"


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


def test_columns_that_are_requested_ahead() -> None:
    """Those of a small weight, in units of 16 bytes for each of the threads of a row, on GPUs with programmatic launches."""
    small = Product(values="float", n=1024, k=3072, tokens=1, dtype=torch.bfloat16, matrix_dtype=torch.bfloat16, arch=90)
    assert columns_ahead(small, 1024, 32) == 2048
    assert columns_ahead(small, 1000, 32) == 2048, "2,072 columns are left, and a unit has 256"
    assert columns_ahead(small, 3072, 32) == 0
    assert columns_ahead(replace(small, n=1366), 1024, 32) == 0, "more than 8 MiB"
    assert columns_ahead(replace(small, matrix_dtype=torch.float32), 1024, 32) == 0, "12 MiB"
    assert columns_ahead(replace(small, n=512, matrix_dtype=torch.float32), 1024, 32) == 2048
    assert columns_ahead(replace(small, arch=80), 1024, 32) == 0
    assert columns_ahead(replace(small, aligned=False), 1024, 32) == 0
    assert columns_ahead(replace(small, k=3076), 1024, 32) == 0, "rows begin at addresses that are not multiples of 16"
