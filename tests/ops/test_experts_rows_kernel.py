"""The tiles of experts for few tokens. Their kernels are tested in test_experts_kernel_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from quantized import float4_weight, float8_weight

from fa_serve.ops.experts_primitives import prefetched_share
from fa_serve.ops.experts_rows_kernel import gated_tile, mixed_tile


def matrices(experts: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(experts, n, k, dtype=dtype, device="meta")


@pytest.mark.parametrize(("k", "gated", "mixed"), [(64, 64, 64), (768, 512, 256), (2880, 512, 256)])
def test_a_row_is_read_in_long_pieces(k: int, gated: int, mixed: int) -> None:
    assert gated_tile(matrices(2, 96, k))[:3] == (4, gated, 8)
    assert mixed_tile(matrices(2, 96, k), 8)[:3] == (4, mixed, 8)
    assert gated_tile(matrices(2, 96, k, torch.float32)).vector == 4


def test_columns_that_are_contiguous_are_read_in_long_pieces() -> None:
    weight = matrices(2, 2880, 2880).transpose(1, 2)
    assert gated_tile(weight)[:3] == (64, 64, 1)
    assert mixed_tile(weight, 4)[:3] == (16, 64, 1)


@pytest.mark.parametrize(("k", "packed", "float8"), [(64, 256, 64), (768, 512, 512), (2880, 512, 512)])
def test_quantised_rows_are_read_in_whole_units(k: int, packed: int, float8: int) -> None:
    """Of 256 columns for 4-bit weights, of 32 for float8."""
    for tile in (gated_tile, lambda weight: mixed_tile(weight, 2)):
        assert tile(float4_weight(2, k))[:2] == (8, packed)
        assert tile(float8_weight(2, k, group_size=k))[:2] == (8, float8)
        assert tile(float8_weight(2, 16, group_size=16))[:2] == (8, 32)


def test_programs_share_the_prefetch_of_the_experts_of_a_token() -> None:
    """All of an expert if the cache has room, in multiples of 16 bytes, and nothing of experts with gaps between their rows."""
    expert = 2048 * 768 * 2
    weight = matrices(128, 2048, 768)
    assert prefetched_share(weight, 128, 8, 512) == (4 * 768 * 2, expert)
    assert prefetched_share(weight.transpose(1, 2), 128, 8, 512) == (4 * 768 * 2, expert)
    assert prefetched_share(weight[:, :, :512], 128, 8, 512) == (0, 0)
    share, _ = prefetched_share(weight, 128, 32, 2 * 512)
    assert share % 16 == 0
    assert 31 << 20 < 32 * 2 * 512 * share <= 32 << 20
    packed = float4_weight(4 * 64, 288)
    assert prefetched_share(packed, 4, 2, 8) == (packed.data.nbytes // 32, packed.data.nbytes // 4)
