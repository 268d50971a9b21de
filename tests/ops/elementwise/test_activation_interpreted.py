"""The kernel of gated activations in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.activation import launch_act_and_mul


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    x = 4 * randn(5, 2 * 1100, dtype=dtype)
    out = launch_act_and_mul(x, activation)
    assert out.dtype == dtype
    assert_rounded_once(out, ops.act_and_mul(x.double(), activation))
