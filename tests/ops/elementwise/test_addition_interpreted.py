"""The sum with the residual stream in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve.ops.elementwise.addition import launch_add, launch_add_gated
from fa_serve.ops.torch_ops import TorchOps


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add(dtype: torch.dtype) -> None:
    x = randn(5, 1100, dtype=dtype)
    y = randn(5, 1104, dtype=torch.float32, seed=1)[:, :1100]
    exact = x.double() + 0.3 * y.double()
    assert launch_add(x, y, 0.3) is x
    assert_rounded_once(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add_gated(dtype: torch.dtype) -> None:
    total = 5
    width = 1100
    x = randn(total, width, dtype=dtype)
    y = randn(total, width + 4, dtype=torch.float32, seed=1)[:, :width]
    shared = randn(total, width, dtype=dtype, seed=2)
    rows = randn(total, width + 8, dtype=dtype, seed=3)[:, :width]
    gate = 0.05 * randn(width, dtype=dtype, seed=4)
    share = (rows.double() @ gate.double()).sigmoid()[:, None]
    assert share.min() < 0.2
    assert share.max() > 0.6
    exact = x.double() + 0.3 * (y.double() + share * shared.double())
    same = TorchOps().add_gated(x.clone(), y, shared, rows, gate, 0.3)
    assert launch_add_gated(x, y, shared, rows, gate, 0.3) is x
    assert_rounded_once(x, exact)
    assert_rounded_once(same, exact)
