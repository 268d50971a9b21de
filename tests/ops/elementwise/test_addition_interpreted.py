"""The sum with the residual stream in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve.ops.elementwise.addition import launch_add


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add(dtype: torch.dtype) -> None:
    x = randn(5, 1100, dtype=dtype)
    y = randn(5, 1104, dtype=torch.float32, seed=1)[:, :1100]
    exact = x.double() + 0.3 * y.double()
    assert launch_add(x, y, 0.3) is x
    assert_rounded_once(x, exact)
