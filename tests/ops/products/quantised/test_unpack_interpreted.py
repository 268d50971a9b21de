"""The kernels of products with quantised weights in Triton's interpreter, against float64.

The interpreter of Triton 3.6 cuts numbers off where they become bfloat16 and rounds carries wrongly where they become float8.
So weights that become 16-bit numbers are tested in float16, and float8 numbers are such that need no rounding. The GPU suite
tests the others.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from products_by_kernel import multiply_by
from quantized import float4_weight, float8_weight, int4_weight
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.products.quantised.primitives import wide_float8
from fa_serve.ops.products.quantised.tiles import UnpackTile
from fa_serve.ops.products.quantised.weight import QuantizedWeight

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


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("n", "k", "norm", "activation", "residual", "bias"),
    [
        pytest.param(40, 256, False, None, False, False, id="plain"),
        pytest.param(33, 352, True, None, False, True, id="norm-bias-odd"),
        pytest.param(9, 544, True, "silu", False, True, id="norm-gated-bias"),
        pytest.param(21, 300, False, None, True, True, id="residual-bias"),
    ],
)
def test_one_token(make, n: int, k: int, norm: bool, activation: str | None, residual: bool, bias: bool, dtype) -> None:
    weight = make(n * (2 if activation else 1), k)
    x = randn(1, k, dtype=dtype)
    b = randn(weight.shape[0], dtype=dtype, seed=2) if bias else None
    r = randn(1, n, dtype=dtype, seed=3) if residual else None
    given = ops.Norm(randn(k, dtype=dtype, seed=4), 1e-3, 1.0) if norm else None
    exact = ops.linear(
        x.double(),
        weight,
        None if b is None else b.double(),
        activation=activation,
        alpha=0.5,
        norm=None if given is None else ops.Norm(given.weight.double(), 1e-3, 1.0),
        residual=None if r is None else r.double(),
    )
    out = multiply_by("unpack_row", x, weight, b, given, activation, r, 0.5)
    assert out.dtype == dtype
    assert r is None or out is r
    assert_rounded_once(out, exact)


def assert_like_the_matrix(actual: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, exact: torch.Tensor) -> None:
    """At most twice the error of PyTorch's product with the dequantised matrix, and a rounding."""
    eager = x @ weight.dequantize(x.dtype).t()
    band = torch.finfo(x.dtype).eps * exact.abs().max()
    assert (actual.double() - exact).abs().max() <= 2 * ((eager.double() - exact).abs().max() + band)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 40, 256), (17, 33, 352), (70, 130, 300)])
def test_several_tokens(make, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight = make(n, k)
    x = randn(m, k, dtype=dtype)
    exact = x.double() @ weight.dequantize(torch.float64).t()
    assert_like_the_matrix(multiply_by("unpack", x, weight), x, weight, exact)


def test_several_tokens_with_a_bias_and_a_residual(make) -> None:
    weight = make(33, 288)
    x = randn(5, 288, dtype=torch.float32)
    bias = randn(33, dtype=torch.float32, seed=1)
    residual = randn(5, 33, dtype=torch.float32, seed=2)
    exact = residual.double() + 0.5 * (x.double() @ weight.dequantize(torch.float64).t() + bias.double())
    out = multiply_by("unpack", x, weight, bias, residual=residual, alpha=0.5)
    assert out is residual
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("splits", [2, 4])
def test_split_sums(make, splits: int) -> None:
    """Of 3 blocks of columns, so that a range of 4 is empty, with and without what comes after the sum."""
    tile = UnpackTile(16, 32, 4, 2, splits)
    weight = make(33, 700)
    x = randn(5, 700, dtype=torch.float32)
    bias = randn(33, dtype=torch.float32, seed=1)
    residual = randn(5, 33, dtype=torch.float32, seed=2)
    product = x.double() @ weight.dequantize(torch.float64).t()
    assert_like_the_matrix(multiply_by("unpack", x, weight, tile=tile), x, weight, product)
    exact = residual.double() + 0.5 * (product + bias.double())
    assert multiply_by("unpack", x, weight, bias, residual=residual, alpha=0.5, tile=tile) is residual
    assert_rounded_once(residual, exact)


def test_a_row_does_not_depend_on_the_others_and_none_is_none(make) -> None:
    weight = make(40, 256)
    x = randn(9, 256, dtype=torch.float32)
    poisoned = x.clone()
    poisoned[1:] = float("nan")
    assert torch.equal(multiply_by("unpack", poisoned, weight)[0], multiply_by("unpack", x, weight)[0])
    assert multiply_by("unpack", x[:0], weight, tile=()).shape == (0, 40)


@triton.jit
def _widen_bytes(bytes_ptr, out_ptr):
    lanes = tl.arange(0, 256)
    tl.store(out_ptr + lanes, wide_float8(tl.load(bytes_ptr + lanes)))


def test_every_byte_is_a_float8_number() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256)
    _widen_bytes[(1,)](numbers, out)
    torch.testing.assert_close(out, numbers.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
