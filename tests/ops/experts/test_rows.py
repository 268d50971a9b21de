"""The tiles of experts for few tokens. Their kernels are tested in test_experts_kernel_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from quantized import float4_weight, float8_weight

from fa_serve.ops.experts.rows import gated_tile, mixed_tile


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
