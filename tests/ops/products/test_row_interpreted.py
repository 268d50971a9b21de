"""The kernel for the product of one token in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.triton_ops import TritonOps


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("n", "k", "norm", "activation", "residual", "bias"),
    [
        pytest.param(40, 64, False, None, False, False, id="plain"),
        pytest.param(33, 1100, True, None, False, True, id="norm-bias-odd"),
        pytest.param(9, 2304, True, "silu", False, True, id="norm-gated-bias"),
        pytest.param(21, 96, False, "gelu", False, False, id="gated"),
        pytest.param(37, 1500, False, None, True, True, id="residual-bias"),
    ],
)
def test_linear_row(n: int, k: int, norm: bool, activation: str | None, residual: bool, bias: bool, dtype: torch.dtype) -> None:
    x = randn(1, k, dtype=dtype)
    weight = randn(n * (2 if activation else 1), k, dtype=dtype, seed=1) / 16
    b = randn(weight.shape[0], dtype=dtype, seed=2) if bias else None
    r = randn(1, n, dtype=dtype, seed=3) if residual else None
    given = ops.Norm(randn(k, dtype=dtype, seed=4), 1e-3, 1.0) if norm else None
    exact = ops.linear(
        x.double(),
        weight.double(),
        None if b is None else b.double(),
        activation=activation,
        alpha=0.5,
        norm=None if given is None else ops.Norm(given.weight.double(), 1e-3, 1.0),
        residual=None if r is None else r.double(),
    )
    out = TritonOps().linear(x, weight, b, given, activation, r, 0.5, None)
    assert out.dtype == dtype
    assert r is None or out is r
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_several_tokens_take_the_kernels_and_a_product(activation: str | None) -> None:
    """In float32, where the three steps round like one."""
    x = randn(3, 64, dtype=torch.float32)
    weight = randn(40, 64, dtype=torch.float32, seed=1) / 16
    norm = ops.Norm(randn(64, dtype=torch.float32, seed=2), 1e-3, 1.0)
    exact = ops.linear(x.double(), weight.double(), norm=ops.Norm(norm.weight.double(), 1e-3, 1.0), activation=activation)
    assert_rounded_once(TritonOps().linear(x, weight, None, norm, activation, None, 1.0, None), exact)
