"""Operands of the Hopper kernel for one token, emulated in it: each column of an identity gives a column of the matrix."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from products_by_kernel import multiply_by
from quantized import int4_weight

from fa_serve.ops.products.quantised import gemv
from fa_serve.ops.products.quantised.tiles import GemvTile
from fa_serve.ops.products.quantised.weight import QuantizedWeight

ROWS = 16


def every_float8() -> QuantizedWeight:
    """All numbers, in columns that a wrong order of positions would not multiply with their input."""
    bits = torch.arange(256).to(torch.uint8).repeat(ROWS, 1)
    bits[(bits & 127) == 127] = 0  # NaN
    return QuantizedWeight(bits.view(torch.float8_e4m3fn), torch.full((ROWS, 2), 0.5), 128, 256)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", ["int4", "float8"])
def test_columns_are_multiplied_with_their_inputs(values: str, dtype: torch.dtype) -> None:
    weight = every_float8() if values == "float8" else int4_weight(ROWS, 512, group_size=32, zeros=True, dtype=torch.bfloat16)
    tile = GemvTile(ROWS, 1, 2, 1)
    columns = torch.eye(weight.width, dtype=dtype)[::7]
    with emulated(gemv):
        found = [multiply_by("gemv", x[None], weight, tile=tile)[0] for x in columns]
    assert torch.equal(torch.stack(found, 1), weight.dequantize(torch.float32)[:, ::7].to(dtype))
