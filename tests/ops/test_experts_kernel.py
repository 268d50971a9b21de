"""The tiles of experts: what must hold for every size, and what was measured fastest."""

from __future__ import annotations

import pytest
import torch

from fa_serve import ops
from fa_serve.ops.experts_kernel import grouped_tile, reads_by_rows, row_tile


@pytest.mark.parametrize("pairs_per_expert", [0.1, 4, 16, 17, 96, 97, 5000])
@pytest.mark.parametrize("arch", [0, 80, 86, 89, 90, 100, 120])
def test_tiles_follow_the_pairs_of_an_expert_and_fit_in_shared_memory(pairs_per_expert: float, arch: int) -> None:
    tile = grouped_tile(pairs_per_expert, 2, arch)
    assert tile.block_m >= min(pairs_per_expert, 16)
    stage = (tile.block_m + tile.block_n) * tile.block_k * 2
    assert stage * tile.num_stages <= {0: 65536, 90: 232448}.get(arch, 101376)


def test_tiles_of_hopper_are_those_measured_fastest() -> None:
    found = [grouped_tile(pairs, 2, 90)[:3] for pairs in (0.06, 8, 16, 64, 128, 512)]
    assert found == [(16, 128, 128), (16, 128, 128), (32, 128, 64), (64, 128, 64), (128, 256, 64), (128, 256, 64)]


@pytest.mark.parametrize("element_size", [2, 4])
def test_deterministic_mode_has_one_tile(element_size: int) -> None:
    """A tile by the number of rows would change the order of sums."""
    assert grouped_tile(0, element_size, 90) == grouped_tile(0, element_size, 90)
    assert grouped_tile(0, 2, 90).block_m == 64
    assert grouped_tile(0, 4, 90).block_m == 32


def make_experts(num_experts: int, k: int, *, transposed: bool = False) -> ops.ExpertWeights:
    gate_up = torch.empty(num_experts, 2 * k, k)
    down = torch.empty(num_experts, k, k)
    if transposed:
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    return ops.ExpertWeights(gate_up, None, down, None, ops.Gate("silu"))


def test_few_tokens_meet_different_experts() -> None:
    few = make_experts(8, 16)
    many = make_experts(128, 16)
    assert reads_by_rows(8, 1, few), "one token meets each expert once"
    assert reads_by_rows(16, 2, many)
    assert not reads_by_rows(32, 4, many)
    assert not reads_by_rows(4, 2, few)
    assert not reads_by_rows(8, 1, make_experts(8, 16, transposed=True)), "its rows are not contiguous"


@pytest.mark.parametrize(("k", "block_k"), [(64, 64), (768, 512), (2880, 512)])
def test_a_row_is_read_in_long_pieces(k: int, block_k: int) -> None:
    assert row_tile(torch.empty(2, 96, k)) == (8, block_k)
