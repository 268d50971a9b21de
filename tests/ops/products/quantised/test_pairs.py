"""Pairs of 16-bit numbers of quantised weights, emulated in the kernel of experts, which multiplies all of their kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gluon_emulator import emulated
from products_by_kernel import product_of_experts
from quantized import float4_weight, int4_weight

from fa_serve.ops.moe import unpack_wgmma
from fa_serve.ops.moe.tiles import GroupedWgmmaTile
from fa_serve.ops.moe.unpack_wgmma import plan_tiles
from fa_serve.ops.products.quantised.pairs import product_tensors
from fa_serve.ops.products.quantised.weight import QuantizedWeight

COLUMNS = 256


def every_float8() -> QuantizedWeight:
    bits = torch.arange(COLUMNS).to(torch.uint8).repeat(32, 1)
    bits[(bits & 127) == 127] = 0  # NaN
    return QuantizedWeight(bits.view(torch.float8_e4m3fn), torch.full((32, 1), 0.5), COLUMNS, COLUMNS)


def subnormal_scales() -> QuantizedWeight:
    weight = float4_weight(32, COLUMNS)
    weight.scales[:4] = torch.tensor([[0], [1], [3], [127]], dtype=torch.uint8)
    return weight


def scales_of_bfloat16() -> QuantizedWeight:
    return int4_weight(32, COLUMNS, group_size=64, zeros=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [every_float8, subnormal_scales, scales_of_bfloat16], ids=lambda make: make.__name__)
def test_weights_whose_scales_are_exact_are_those_of_the_unpacked_matrix(make: Callable[[], QuantizedWeight]) -> None:
    """Products with an identity: numbers of 4 and of 8 bits, with every scale that bfloat16 holds."""
    weight = make()
    y = torch.zeros(COLUMNS, 32, dtype=torch.bfloat16)
    order = torch.arange(COLUMNS, dtype=torch.int32)
    tiles = torch.tensor([[0, 0, COLUMNS]], dtype=torch.int32)
    x = torch.eye(COLUMNS, dtype=torch.bfloat16)
    with emulated(unpack_wgmma):
        product = product_of_experts(x, weight, 1, 1, None, COLUMNS)
        launch = plan_tiles(product, GroupedWgmmaTile(COLUMNS, 64), None, 1, 0)
        launch((x, *product_tensors(weight), None, order, tiles, y))
    assert torch.equal(y.t(), weight.dequantize(torch.bfloat16))
