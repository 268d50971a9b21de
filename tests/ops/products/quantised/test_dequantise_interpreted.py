"""The matrix of a quantised weight in Triton's interpreter: the bits are those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from products_by_kernel import dequantised_by_kernel, multiply_by
from quantized import float4_weight, float8_weight, int4_weight
from rounded_once import dtype_id, randn

from fa_serve.ops.products.quantised.weight import FLOAT4_VALUES, QuantizedWeight, pack_int4

WEIGHTS = {
    "int4-G128": lambda n, k: int4_weight(n, k, group_size=128),
    "int4-G32-zeros-half": lambda n, k: int4_weight(n, k, group_size=32, zeros=True, dtype=torch.float16),
    "int4-row": lambda n, k: int4_weight(n, k, group_size=k),
    "int4-G128-act-order": lambda n, k: int4_weight(n, k, group_size=128, zeros=True, act_order=True),
    "mxfp4": lambda n, k: float4_weight(n, k),
    "float8-row": lambda n, k: float8_weight(n, k, group_size=k),
    "float8-G128": lambda n, k: float8_weight(n, k, group_size=128),
}


@pytest.fixture(params=WEIGHTS)
def make(request: pytest.FixtureRequest):
    return WEIGHTS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
def test_dequantising_has_the_bits_of_pytorch(make, dtype: torch.dtype) -> None:
    for n, k in ((40, 256), (33, 352), (3, 300)):
        weight = make(n, k)
        assert torch.equal(dequantised_by_kernel(weight, dtype), weight.dequantize(dtype))


def test_every_number_and_every_exponent_of_mxfp4() -> None:
    """Powers of two down to 2^-127, with which numbers are subnormal, and up to the largest that float32 holds."""
    bits = torch.arange(16, dtype=torch.uint8).repeat(253, 2)
    weight = QuantizedWeight(pack_int4(bits), torch.arange(253, dtype=torch.uint8)[:, None], group_size=32, width=32)
    expected = torch.tensor(FLOAT4_VALUES).repeat(2) * torch.tensor(2.0, dtype=torch.float64) ** (
        torch.arange(253)[:, None] - 127
    )
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(weight.dequantize(dtype), expected.to(dtype))
    found = dequantised_by_kernel(weight, torch.float32)
    assert torch.equal(found.view(torch.int32), weight.dequantize(torch.float32).view(torch.int32)), "zeros keep their sign"


def test_many_tokens_multiply_the_matrix(make) -> None:
    """With a bias and a residual, in float32, where both steps round like one."""
    weight = make(33, 288)
    x = randn(150, 288, dtype=torch.float32)
    bias = randn(33, dtype=torch.float32, seed=1)
    residual = randn(150, 33, dtype=torch.float32, seed=2)
    exact = residual.double() + 0.5 * (x.double() @ weight.dequantize(torch.float64).t() + bias.double())
    assert multiply_by("dequantise", x, weight, bias, residual=residual, alpha=0.5) is residual
    torch.testing.assert_close(residual.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
