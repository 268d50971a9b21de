"""The tiles of the product of one token: what must hold for every size, and what was measured."""

from __future__ import annotations

import pytest

from fa_serve.ops.products.row import row_tiles


@pytest.mark.parametrize("n", [1, 5, 1000, 4096, 151936])
@pytest.mark.parametrize("k", [64, 1024, 3000, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_row_tiles_fill_the_gpu(n: int, k: int, gated: bool) -> None:
    block_n, block_k = row_tiles(132, n, k, gated)
    assert block_n == 1 or -(-n // block_n) >= 256
    assert block_n * block_k * (1 + gated) <= 8192, "more than a program can have in flight"
    assert block_k & (block_k - 1) == 0


def test_row_tiles_are_those_measured_fastest() -> None:
    assert row_tiles(132, 6144, 4096, gated=False) == (8, 1024)
    assert row_tiles(132, 4096, 14336, gated=False) == (8, 512)
    assert row_tiles(132, 14336, 4096, gated=True) == (4, 1024)
    assert row_tiles(132, 3072, 1024, gated=True) == (4, 512)
