"""The tiles of experts: what must hold for every size. Their speed has not been measured yet."""

from __future__ import annotations

import pytest
import torch

from fa_serve.ops.experts_kernel import are_few, grouped_tile, row_tile


@pytest.mark.parametrize("pairs_per_expert", [0.1, 4, 16, 17, 96, 97, 5000])
@pytest.mark.parametrize("arch", [0, 80, 86, 89, 90, 100, 120])
def test_tiles_follow_the_pairs_of_an_expert_and_fit_in_shared_memory(pairs_per_expert: float, arch: int) -> None:
    tile = grouped_tile(pairs_per_expert, 2, arch)
    assert tile.block_m == (16 if pairs_per_expert <= 16 else 64 if pairs_per_expert <= 96 else 128)
    stage = (tile.block_m + tile.block_n) * tile.block_k * 2
    assert stage * tile.num_stages <= (65536 if arch == 0 else 101376)


@pytest.mark.parametrize("element_size", [2, 4])
def test_deterministic_mode_has_one_tile(element_size: int) -> None:
    """A tile by the number of rows would change the order of sums."""
    assert grouped_tile(0, element_size, 90) == grouped_tile(0, element_size, 90)
    assert grouped_tile(0, 2, 90).block_m == 64
    assert grouped_tile(0, 4, 90).block_m == 32


def test_few_tokens_meet_different_experts() -> None:
    assert are_few(8, 1, 8), "one token meets each expert once"
    assert are_few(32, 4, 128)
    assert not are_few(40, 5, 128)
    assert not are_few(4, 2, 8)


@pytest.mark.parametrize(("k", "block_k"), [(64, 64), (768, 512), (2880, 512)])
def test_a_row_is_read_along_its_contiguous_side(k: int, block_k: int) -> None:
    weight = torch.empty(2, 96, k)
    assert row_tile(weight) == (8, block_k)
    assert row_tile(weight.transpose(1, 2).contiguous().transpose(1, 2)) == (64, 64)
