"""`hopper.float8_probabilities`: P keeps its values on its way through integers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hopper_emulator import kernel_definitions


def test_values_in_the_order_of_the_product() -> None:
    var = SimpleNamespace(tiles=SimpleNamespace(block_n=64), probability_layout=None)
    p = torch.rand(64, 64) * 300
    kernel = kernel_definitions({})
    packed = kernel["pack_probabilities"](p, var)
    assert packed.shape == (64, 16)
    assert packed.dtype == torch.int32
    place = torch.arange(64)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    found = kernel["unpack_probabilities"](packed, var)
    assert torch.equal(found.float(), p[:, key].to(torch.float8_e4m3fn).float())
