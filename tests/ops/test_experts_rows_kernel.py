"""The tiles of experts for few tokens. Their kernels are tested in test_experts_kernel_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from quantized import float4_weight, float8_weight

from fa_serve.ops.experts_rows_kernel import row_tile


@pytest.mark.parametrize(("k", "block_k"), [(64, 64), (768, 512), (2880, 512)])
def test_a_row_is_read_in_long_pieces(k: int, block_k: int) -> None:
    assert row_tile(torch.empty(2, 96, k)) == (8, block_k)


@pytest.mark.parametrize(("k", "packed", "float8"), [(64, 256, 64), (768, 512, 512), (2880, 512, 512)])
def test_quantised_rows_are_read_in_whole_units(k: int, packed: int, float8: int) -> None:
    """Of 256 columns for 4-bit weights, of 32 for float8."""
    assert row_tile(float4_weight(2, k)) == (8, packed)
    assert row_tile(float8_weight(2, k, group_size=k)) == (8, float8)
    assert row_tile(float8_weight(2, 16, group_size=16)) == (8, 32)
