"""The tiles of experts: what must hold for every size, and what was measured fastest."""

from __future__ import annotations

import pytest
import torch
from product_cases import dense, of_experts, with_pairs

from fa_serve.ops.moe.tiles import (
    HOPPER_INVARIANT_TILES,
    GroupedWgmmaTile,
    expert_row_tile,
    grouped_tile,
    grouped_wgmma_tile,
    matrix_tile,
    one_expert_tile,
)
from fa_serve.ops.products import tiles as products_tiles


@pytest.mark.parametrize("pairs_per_expert", [0.1, 4, 16, 17, 96, 97, 5000])
@pytest.mark.parametrize("arch", [0, 80, 86, 89, 90, 100, 120])
def test_tiles_follow_the_pairs_of_an_expert_and_fit_in_shared_memory(pairs_per_expert: float, arch: int) -> None:
    tile = grouped_tile(with_pairs(pairs_per_expert, arch=arch))
    assert tile.block_m >= min(pairs_per_expert, 16)
    stage = (tile.block_m + tile.block_n) * tile.block_k * 2
    assert stage * tile.num_stages <= {0: 65536, 90: 232448}.get(arch, 101376)


def test_tiles_of_hopper_are_those_measured_fastest() -> None:
    found = [grouped_tile(with_pairs(pairs))[:3] for pairs in (0.06, 8, 16, 64, 128, 512)]
    assert found == [(16, 128, 128), (16, 128, 128), (32, 128, 64), (64, 128, 64), (128, 256, 64), (128, 256, 64)]


@pytest.mark.parametrize(
    ("values", "changes"),
    [("float4", {}), ("float", {"arch": 80}), ("float", {"arch": 100}), ("float", {"dtype": torch.float32})],
)
def test_deterministic_mode_has_one_tile_where_another_one_would_add_in_another_order(values: str, changes: dict) -> None:
    found = {grouped_tile(with_pairs(0, values, tokens=tokens, **changes)) for tokens in (1, 70, 5000, 500_000)}
    assert len(found) == 1


def test_tiles_of_deterministic_mode_on_hopper_follow_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_experts": 128, "top_k": 8, "n": 1536, "k": 2048}
    found = [grouped_tile(with_pairs(0, tokens=tokens, **sizes))[:2] for tokens in (1, 2, 3, 256, 1536, 1537, 8192)]
    assert found == [(64, 32), (64, 32), (64, 128), (64, 128), (64, 128), (128, 256), (128, 256)]
    assert {grouped_tile(with_pairs(0, tokens=tokens, **sizes)) for tokens in (1, 64, 8192)} == set(HOPPER_INVARIANT_TILES)
    for tile in HOPPER_INVARIANT_TILES:
        assert tile.block_m >= 64, "fewer rows would be another instruction"
        assert (tile.block_m + tile.block_n) * tile.block_k * 2 * tile.num_stages <= 227 << 10
    monkeypatch.setattr(products_tiles, "CHOOSES_BY_ROWS", False)
    assert {grouped_tile(with_pairs(0, tokens=tokens, **sizes))[:2] for tokens in (1, 8192)} == {(64, 128)}


@pytest.mark.parametrize(
    ("pairs_per_expert", "block_m"), [(0, 32), (0.1, 16), (8, 16), (9, 32), (20, 32), (21, 64), (5000, 64)]
)
def test_quantised_tiles_follow_the_pairs_of_an_expert(pairs_per_expert: float, block_m: int) -> None:
    tile = grouped_tile(with_pairs(pairs_per_expert, "float4"))
    assert (tile.block_m, tile.block_n, tile.block_k) == (block_m, 64, 32)
    wide = grouped_tile(with_pairs(pairs_per_expert, "float8", group=0))
    assert (wide.block_m, wide.block_k) == (block_m, 128), "the columns of a part of float8 weights"
    in_float32 = grouped_tile(with_pairs(pairs_per_expert, "float4", dtype=torch.float32))
    assert in_float32 == grouped_tile(with_pairs(0, "float4", dtype=torch.float32)), "float32 has one tile"


@pytest.mark.parametrize(
    ("pairs_per_expert", "block_m"), [(0.1, 16), (8, 16), (9, 32), (20, 32), (48, 64), (49, 128), (5000, 128)]
)
def test_tiles_have_room_for_random_routing(pairs_per_expert: float, block_m: int) -> None:
    assert grouped_wgmma_tile(with_pairs(pairs_per_expert, "float4")) == GroupedWgmmaTile(block_m, 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (256, 28672, 4096, GroupedWgmmaTile(256, 128)),
        (256, 6144, 4096, GroupedWgmmaTile(128, 64)),
        (256, 4096, 14336, GroupedWgmmaTile(128, 64, 2)),
        (256, 4096, 4096, GroupedWgmmaTile(128, 64, 2)),
        (256, 4096, 2048, GroupedWgmmaTile(128, 64)),
        (257, 4096, 14336, GroupedWgmmaTile(128, 64)),
    ],
)
def test_two_programs_share_the_columns_of_a_tile_where_there_are_few(m: int, n: int, k: int, tile: GroupedWgmmaTile) -> None:
    assert one_expert_tile(dense("int4", n, k, tokens=m)) == tile


def test_the_ring_of_matrices_fits_in_shared_memory() -> None:
    tile = matrix_tile(with_pairs(64))
    staging = 2 * 64 * 64 * 2
    assert tile.stages * 2 * 64 * (tile.block_m + tile.block_n) + staging + 16 * tile.stages <= 227 << 10


@pytest.mark.parametrize(("k", "gated", "mixed"), [(64, 64, 64), (768, 512, 256), (2880, 512, 256)])
def test_a_row_is_read_in_long_pieces(k: int, gated: int, mixed: int) -> None:
    product = {"values": "float", "n": 96, "k": k, "top_k": 8}
    assert expert_row_tile(of_experts(**product, gated=True))[:3] == (4, gated, 8)
    assert expert_row_tile(of_experts(**product))[:3] == (4, mixed, 8)
    assert expert_row_tile(of_experts(**product, gated=True, matrix_dtype=torch.float32)).vector == 4


@pytest.mark.parametrize(("k", "packed", "float8"), [(64, 256, 64), (768, 512, 512), (2880, 512, 512)])
@pytest.mark.parametrize("gated", [False, True])
def test_quantised_rows_are_read_in_whole_units(k: int, packed: int, float8: int, gated: bool) -> None:
    """Of 256 columns for 4-bit weights, of 32 for float8."""
    assert expert_row_tile(of_experts("float4", 96, k, gated=gated))[:2] == (8, packed)
    assert expert_row_tile(of_experts("float8", 96, k, group=0, gated=gated))[:2] == (8, float8)
    assert expert_row_tile(of_experts("float8", 96, 16, group=0, gated=gated))[:2] == (8, 32)
