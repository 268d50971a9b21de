"""The kernels of norms in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.norm import launch_layer_norm, launch_rms_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width"), [(1, 64), (5, 80), (3, 1024)])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_rms_norm(total: int, width: int, dtype: torch.dtype, residual: bool) -> None:
    x = randn(total, 2 * width, dtype=dtype)[:, :width]
    weight = randn(width, dtype=dtype, seed=1)
    added = randn(total, width, dtype=dtype, seed=2) if residual else None
    out = launch_rms_norm(x, ops.Norm(weight, 1e-3, 1.0), added, None)
    norm = ops.Norm(weight.double(), 1e-3, 1.0)
    assert out.dtype == dtype
    assert_rounded_once(out, ops.rms_norm(x.double(), norm, residual=None if added is None else added.double()))


def test_the_result_may_replace_the_input() -> None:
    x = randn(4, 48, dtype=torch.float32)
    weight = randn(48, dtype=torch.float32, seed=1)
    exact = ops.rms_norm(x.double(), ops.Norm(weight.double(), 1e-6))
    assert launch_rms_norm(x, ops.Norm(weight, 1e-6), None, x) is x
    assert_rounded_once(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("form", ["plain", "residual", "kept"])
def test_layer_norm(dtype: torch.dtype, form: str) -> None:
    """Columns beyond the width count neither in the mean nor in the variance: those of a row of 80 in a block of 128."""
    x = randn(5, 96, dtype=dtype)[:, :80]
    bias = None if form == "plain" else randn(80, dtype=dtype, seed=3)
    residual = None if form == "plain" else randn(5, 80, dtype=dtype, seed=2)
    norm = ops.LayerNorm(randn(80, dtype=dtype, seed=1), bias, 1e-3)
    exact = ops.LayerNorm(norm.weight.double(), None if bias is None else bias.double(), 1e-3)
    wide = None if residual is None else residual.double()
    wanted = ops.layer_norm(x.double(), exact, residual=wide, keep_sum=form == "kept")
    out = launch_layer_norm(x, norm, residual, form == "kept")
    assert out.dtype == dtype
    assert_rounded_once(out, wanted)
    if residual is not None and wide is not None:
        assert_rounded_once(residual, wide)
