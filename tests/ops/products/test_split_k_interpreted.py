"""Split sums in Triton's interpreter: added in their order, then the bias and the residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from product_cases import dense
from rounded_once import assert_rounded_once, randn
from torch import Tensor

from fa_serve.ops.products.split_k import plan_sums


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_sums(bias: bool, residual: bool, splits: int) -> None:
    """What a kernel is given, and what is made of its sums. 5 x 300 numbers are not a whole number of blocks."""
    m = 5
    n = 300
    parts = randn(splits, m, n, dtype=torch.float32, seed=1)
    b = randn(n, dtype=torch.float16, seed=2) if bias else None
    r = randn(m, n, dtype=torch.float16, seed=3) if residual else None
    given = None if r is None else r.clone()

    def kernel(tensors: tuple[Any, ...]) -> None:
        x, of_bias, of_residual, out = tensors
        assert x is first
        if splits > 1:
            assert of_bias is of_residual is None
            out.copy_(parts)
            return
        y = parts[0].double() + (0 if of_bias is None else of_bias)
        out.copy_(y if of_residual is None else of_residual + 0.5 * y)

    first: Tensor = randn(m, 64, dtype=torch.float16)
    product = dense("int4", n, 64, tokens=m, dtype=torch.float16, arch=80)
    y = plan_sums(kernel, product, splits, 0.5)((first,), b, r)
    exact = parts.double().sum(0) + (0 if b is None else b.double())
    if given is not None:
        assert y is r
        exact = given.double() + 0.5 * exact
    assert_rounded_once(y, exact)
