"""The row-invariant kernels in Triton's interpreter: right, and a row does not depend on how many rows follow it.

The interpreter multiplies tiles by NumPy, whose rows depend on their place in a tile; the GPU suite tests every place.
"""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant import launch_invariant_sum, plan_invariant
from fa_serve.ops.products.run import multiply_invariant
from fa_serve.ops.products.tiles import InvariantTile


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_is_right_and_its_rows_are_independent(dtype: torch.dtype, bias: bool) -> None:
    x = randn(70, 150, dtype=dtype)
    weight = randn(150, 37, dtype=dtype, seed=1).t()  # any strides
    b = randn(37, dtype=dtype, seed=2) if bias else None
    out = multiply_invariant(x, weight, b)
    exact = x.double() @ weight.double().t()
    assert_rounded_once(out, exact if b is None else exact + b.double())
    for rows in (1, 40):
        assert torch.equal(multiply_invariant(x[:rows], weight, b), out[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("width", [1, 1024, 2500])
def test_sum_is_right_and_its_rows_are_independent(dtype: torch.dtype, width: int) -> None:
    x = randn(5, width + 3, dtype=dtype)[:, :width]
    out = launch_invariant_sum(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double().sum(-1), rtol=0, atol=1e-6 * float(x.double().abs().sum(-1).max()))
    assert torch.equal(launch_invariant_sum(x[2:3]), out[2:3])


@pytest.mark.parametrize("k", [150, 512], ids=lambda k: f"k{k}")
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-residual"])
def test_segments_apart_are_added_like_those_of_one_program(k: int, extras: bool) -> None:
    """Segments have the same bits in either form, and are no other product; the last one may be short or empty."""
    x = randn(70, k, dtype=torch.float32)
    weight = randn(37, k, dtype=torch.float32, seed=1)
    bias = randn(37, dtype=torch.float32, seed=2) if extras else None
    product = Product(values="float", n=37, k=k, tokens=70, dtype=x.dtype, invariant=True)
    details = Details(strides=(*x.stride(), *weight.stride()), alpha=0.5)
    results = []
    for apart in (False, True):
        residual = randn(70, 37, dtype=torch.float32, seed=3) if extras else None
        tile = InvariantTile(32, 32, 32, 2, segments=3, apart=apart)
        results.append(plan_invariant(product, tile, details)(x, weight, bias, None, residual))
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact = randn(70, 37, dtype=torch.float32, seed=3).double() + 0.5 * (exact + bias.double())
    assert_rounded_once(results[0], exact)
    assert torch.equal(*results)
