"""The loop over blocks of columns, emulated on a CPU: which blocks it begins with, and what it copies and does not read."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from quantized import float8_weight, int4_weight
from rounded_once import randn

from fa_serve.ops import quantized_wgmma_kernel
from fa_serve.ops.quantized_wgmma_kernel import WgmmaTile, launch_quantized_wgmma
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


@pytest.mark.parametrize(("tokens", "rounded"), [(16, False), (17, True)])
def test_scales_multiply_sums_of_few_tokens(tokens: int, rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, a weight is not rounded: 3 times a scale of 1 + 2^-7 needs 9 bits, and bfloat16 has 8."""
    weight = int4_weight(64, 256, group_size=128, dtype=torch.bfloat16)
    weight.data.fill_(0xBBBBBBBB - (1 << 32))  # 11 - 8, everywhere
    weight.scales.fill_(1 + 2**-7)
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    x[:, 0] = 1
    monkeypatch.setattr(quantized_wgmma_kernel, "wgmma_tile", lambda *sizes: WgmmaTile(32 if rounded else 16, 64, 3, 1, True))
    with emulated(quantized_wgmma_kernel):
        y = launch_quantized_wgmma(x, weight, None, torch.zeros(tokens, 64), 1.0)
    exact = 3 * (1 + 2**-7)
    expected = torch.tensor(exact).bfloat16().item() if rounded else exact
    assert y.unique().tolist() == [expected]
