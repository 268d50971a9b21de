"""The order of pairs in Triton's interpreter: sorted by expert, listed in tiles, and added in the order of the router."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from product_cases import of_experts

from fa_serve.ops.moe.order import most_tiles, plan_list, plan_sort, plan_total
from fa_serve.ops.products.problem import Product


def routed(tokens: int, top_k: int) -> tuple[Product, torch.Tensor]:
    """Seven experts, and pairs that belong to others."""
    index = torch.randint(-1, 8, (tokens, top_k), generator=torch.Generator().manual_seed(1))
    return of_experts("float", 40, 24, num_experts=7, top_k=top_k, tokens=tokens, arch=80), index


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (40, 3), (64, 8), (1100, 8)])
def test_pairs_are_sorted_by_expert_and_then_by_place(tokens: int, top_k: int) -> None:
    product, index = routed(tokens, top_k)
    order, starts = plan_sort(product)(index)
    flat = index.flatten()
    expected = [pair for expert in range(7) for pair in (flat == expert).nonzero().flatten().tolist()]
    assert order[: len(expected)].tolist() == expected
    assert starts.tolist() == [int(((flat >= 0) & (flat < expert)).sum()) for expert in range(8)]


@pytest.mark.parametrize("block_m", [4, 16])
def test_each_tile_has_pairs_of_one_expert(block_m: int) -> None:
    product, index = routed(40, 3)
    _, starts = plan_sort(product)(index)
    tiles = plan_list(product, block_m)(starts).tolist()
    assert len(tiles) == most_tiles(product, block_m)
    begins = starts.tolist()
    expected = [
        (expert, first, begins[expert + 1])
        for expert in range(7)
        for first in range(begins[expert], begins[expert + 1], block_m)
    ]
    assert [tuple(tile) for tile in tiles[: len(expected)]] == expected
    assert all(first >= end for _, first, end in tiles[len(expected) :]), "tiles that do not exist have no rows"


@pytest.mark.parametrize(("pairs", "experts", "tiles"), [(1, 7, 1), (7, 7, 7), (70, 7, 10), (64, 1, 4), (65, 1, 5)])
def test_any_routing_has_room(pairs: int, experts: int, tiles: int) -> None:
    """Tiles of 16: each expert that is met wastes less than one."""
    product = replace(of_experts("float"), tokens=pairs, top_k=1, num_experts=experts)
    assert most_tiles(product, 16) == tiles


def test_pairs_of_a_token_are_added_by_the_weights_of_the_router() -> None:
    product, index = routed(9, 3)
    parts = torch.randn(27, 40, generator=torch.Generator().manual_seed(2))
    weights = torch.rand(9, 3, generator=torch.Generator().manual_seed(3))
    out = torch.empty(9, 40)
    plan_total(product)((parts, index, weights, out))
    known = ((index >= 0) & (index < 7))[:, :, None]
    expected = (torch.where(known, parts.view(9, 3, 40), 0) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(out, expected)
