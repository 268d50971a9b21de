"""The loop over blocks of columns, emulated on a CPU: which blocks it begins with, and what it copies and does not read."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from quantized import float8_weight, int4_weight
from rounded_once import randn

from fa_serve.ops.products.quantised import wgmma as quantized_wgmma_kernel
from fa_serve.ops.products.quantised.wgmma import WgmmaTile, launch_quantized_wgmma
from fa_serve.testing import assert_matches_reference


@pytest.mark.parametrize(
    "tile", [WgmmaTile(16, 64, 3, 1, True), WgmmaTile(16, 64, 5, 1, True), WgmmaTile(16, 64, 3, 1)], ids=str
)
@pytest.mark.parametrize("values", ["int4", "float8"])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_programs_begin_with_different_blocks(
    blocks: int, values: str, tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs, with fewer blocks than stages, and with odd numbers of blocks. What follows the tokens is not read."""
    n = 192
    if values == "int4":
        k = 256 * blocks
        weight = int4_weight(n, k, group_size=128, zeros=True, dtype=torch.bfloat16)
    else:
        k = 128 * blocks
        weight = float8_weight(n, k, group_size=k)
    tokens = torch.full((8, k), torch.nan, dtype=torch.bfloat16)
    x = tokens[:3].copy_(randn(3, k, dtype=torch.bfloat16))
    monkeypatch.setattr(quantized_wgmma_kernel, "wgmma_tile", lambda *sizes: tile)
    with emulated(quantized_wgmma_kernel):
        y = launch_quantized_wgmma(x, weight, None, None, 1.0)
    matrix = weight.dequantize(torch.float64)
    assert_matches_reference(y, x.double() @ matrix.t(), x @ matrix.bfloat16().t())
