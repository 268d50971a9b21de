"""The experts whose matrices are held at once."""

from __future__ import annotations

import pytest

from fa_serve.ops.moe.grouped import experts_at_once


@pytest.mark.parametrize(
    ("num_experts", "megabytes", "expected"), [(32, 33, 12), (32, 17, 16), (128, 6, 64), (128, 3, 128), (8, 700, 4), (6, 1, 8)]
)
def test_experts_that_are_dequantised_at_once_fit_in_their_memory(num_experts: int, megabytes: int, expected: int) -> None:
    """Four at least, because of addresses; equal parts; gpt-oss' gate and up weights take 33 MB an expert."""
    found = experts_at_once(num_experts, megabytes << 20)
    assert found == expected
    assert found * megabytes <= 512 or found == 4
