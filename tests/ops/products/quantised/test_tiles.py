"""The tiles of products with quantised weights: what was measured, and what must hold for every size."""

from __future__ import annotations

import pytest
import torch
from product_cases import dense

from fa_serve.ops.products.quantised.tiles import (
    Float8Tile,
    GemvTile,
    UnpackRowTile,
    WgmmaTile,
    count_parts,
    float8_tile,
    gemv_tile,
    run_width,
    unit_columns,
    unpack_row_tile,
    unpack_tile,
    wgmma_tile,
)


@pytest.mark.parametrize(
    ("n", "k", "values", "tile"),
    [
        (28672, 4096, "int4", GemvTile(16, 4, 3, 5)),
        (6144, 4096, "int4", GemvTile(16, 8, 2, 3)),
        (4096, 4096, "int4", GemvTile(16, 8, 3, 2)),
        (4096, 14336, "int4", GemvTile(16, 8, 3, 2)),
        (28672, 4096, "float8", GemvTile(16, 4, 2, 5)),
        (6144, 4096, "float8", GemvTile(16, 8, 3, 3)),
        (4096, 4096, "float8", GemvTile(16, 8, 4, 2)),
    ],
)
def test_tiles_of_one_token_are_those_that_were_measured(n: int, k: int, values: str, tile: GemvTile) -> None:
    assert gemv_tile(dense(values, n, k)) == tile


@pytest.mark.parametrize(
    ("n", "k", "values", "gated", "tile"),
    [
        (6144, 4096, "int4", False, UnpackRowTile(16, 1024, 8)),
        (28672, 4096, "int4", True, UnpackRowTile(8, 1024, 8)),
        (1024, 4096, "int4", False, UnpackRowTile(8, 1024, 8)),
        (6144, 4096, "float8", False, UnpackRowTile(8, 512, 4)),
        (6144, 256, "int4", False, UnpackRowTile(16, 256, 4)),
    ],
)
def test_portable_tiles_of_one_token(n: int, k: int, values: str, gated: bool, tile: UnpackRowTile) -> None:
    assert unpack_row_tile(dense(values, n, k, gated=gated)) == tile


def test_portable_products_of_few_tiles_are_split() -> None:
    """Two programs for each multiprocessor, of 1,024 columns or more."""
    sizes = ((28672, 4096), (6144, 4096), (4096, 14336), (4096, 512))
    assert [unpack_tile(dense("int4", n, k, tokens=2)).splits for n, k in sizes] == [1, 4, 8, 1]
    assert unpack_tile(dense("int4", 4096, 14336, tokens=2, dtype=torch.float32)).splits == 1


@pytest.mark.parametrize(
    ("m", "n", "k", "values", "tile"),
    [
        (2, 28672, 4096, "int4", WgmmaTile(16, 64, 3, 1)),
        (16, 28672, 4096, "float8", WgmmaTile(16, 64, 4, 1, True)),
        (32, 28672, 4096, "int4", WgmmaTile(32, 64, 2, 1)),
        (64, 28672, 4096, "int4", WgmmaTile(64, 128, 2, 1)),
        (64, 28672, 4096, "float8", WgmmaTile(64, 128, 3, 1)),
        (16, 4096, 14336, "int4", WgmmaTile(16, 64, 3, 8)),
        (17, 4096, 14336, "int4", WgmmaTile(32, 64, 2, 8)),
        (16, 6144, 4096, "int4", WgmmaTile(16, 64, 3, 4)),
        (64, 6144, 4096, "float8", WgmmaTile(64, 64, 4, 2, True)),
        (64, 4096, 14336, "int4", WgmmaTile(64, 64, 2, 4)),
        (65, 4096, 14336, "int4", WgmmaTile(128, 64, 3, 2)),
        (128, 6144, 4096, "int4", WgmmaTile(128, 64, 3, 1)),
        (16, 64, 1024, "float8", WgmmaTile(16, 64, 4, 1, True)),
    ],
)
def test_tiles_of_several_tokens_are_those_that_were_measured(m: int, n: int, k: int, values: str, tile: WgmmaTile) -> None:
    assert wgmma_tile(dense(values, n, k, tokens=m)) == tile


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (64, 128)])
@pytest.mark.parametrize("m", [2, 16, 17, 33, 64, 65, 128])
def test_tiles_of_float8_fit_and_every_range_has_columns(m: int, n: int, k: int) -> None:
    tile = float8_tile(dense("float8", n, k, tokens=m, group=0))
    assert m <= tile.block_m
    assert tile.stages >= 2
    assert tile.stages * (tile.block_m + tile.block_n) * 128 <= 227 << 10
    blocks = -(-k // 128)
    assert (tile.splits - 1) * -(-blocks // tile.splits) < blocks


def test_tiles_of_float8_are_those_that_were_measured() -> None:
    assert float8_tile(dense("float8", 28672, 4096, tokens=128)) == Float8Tile(128, 64, 4, 1)
    assert float8_tile(dense("float8", 4096, 14336, tokens=16)) == Float8Tile(16, 64, 8, 4)
    assert float8_tile(dense("float8", 4096, 4096, tokens=64)) == Float8Tile(64, 64, 8, 2)


@pytest.mark.parametrize(
    ("values", "group", "unit", "parts", "width"),
    [
        ("int4", 128, 256, 2, 32),
        ("int4", 96, 256, 8, 32),
        ("float8", 128, 32, 2, 128),
        ("float8", 32, 32, 8, 32),
        ("float8", 0, 32, 1, 128),
    ],
)
def test_a_block_is_read_in_parts_of_one_group_each(values: str, group: int, unit: int, parts: int, width: int) -> None:
    product = dense(values, group=group)
    assert (unit_columns(product), count_parts(product, 256), run_width(product)) == (unit, parts, width)
