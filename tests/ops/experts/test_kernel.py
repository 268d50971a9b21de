"""The tiles of experts: what must hold for every size, and what was measured fastest."""

from __future__ import annotations

import pytest
import torch
from quantized import float4_weight

from fa_serve import ops
from fa_serve.ops.experts.kernel import experts_at_once, grouped_tile, quantized_tile, reads_by_rows


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


def test_quantised_experts_have_sizes_and_rows() -> None:
    """Two experts of 64 outputs of 32 values, from 64 inputs."""
    weights = ops.ExpertWeights(float4_weight(2 * 2 * 32, 64), None, float4_weight(2 * 64, 32), None, ops.Gate("silu"))
    assert weights.sizes == (2, 64, 32)
    assert reads_by_rows(2, 1, weights), "rows of quantised weights are contiguous"
    assert not reads_by_rows(4, 2, weights)


@pytest.mark.parametrize(
    ("pairs_per_expert", "block_m"), [(0, 32), (0.1, 16), (8, 16), (9, 32), (20, 32), (21, 64), (5000, 64)]
)
def test_quantised_tiles_follow_the_pairs_of_an_expert(pairs_per_expert: float, block_m: int) -> None:
    tile = quantized_tile(pairs_per_expert, 2)
    assert (tile.block_m, tile.block_n) == (block_m, 64)
    assert quantized_tile(pairs_per_expert, 4) == quantized_tile(0, 4), "float32 has one tile"


@pytest.mark.parametrize(
    ("num_experts", "megabytes", "expected"), [(32, 33, 12), (32, 17, 16), (128, 6, 64), (128, 3, 128), (8, 700, 4), (6, 1, 8)]
)
def test_experts_that_are_dequantised_at_once_fit_in_their_memory(num_experts: int, megabytes: int, expected: int) -> None:
    """Four at least, because of addresses; equal parts; gpt-oss' gate and up weights take 33 MB an expert."""
    found = experts_at_once(num_experts, megabytes << 20)
    assert found == expected
    assert found * megabytes <= 512 or found == 4
