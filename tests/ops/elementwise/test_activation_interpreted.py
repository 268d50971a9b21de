"""The kernels of activations in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.activation import launch_act, launch_act_and_mul


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    x = 4 * randn(5, 2 * 1100, dtype=dtype)
    out = launch_act_and_mul(x, activation)
    assert out.dtype == dtype
    assert_rounded_once(out, ops.act_and_mul(x.double(), activation))


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_act(activation: str, dtype: torch.dtype) -> None:
    """With a last program that is not full, and rows that do not lie end to end."""
    x = 4 * randn(5, 1100, dtype=dtype)[:, :1000]
    out = launch_act(x, activation)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    assert_rounded_once(out, ops.act(x.double(), activation))


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_activations_over_the_whole_range(activation: str) -> None:
    """Far from 0, a result is 0 or the number itself. NaN stays NaN, because an engine finds broken weights by it."""
    x = torch.cat([torch.linspace(-20, 20, 40_001), torch.tensor([-1e4, 1e4])])
    out = launch_act(x, activation)
    exact = ops.act(x.double(), activation)
    assert float(((out - exact).abs() / exact.abs().clamp(min=1)).max()) < 1.5e-7
    assert launch_act(torch.tensor([torch.inf]), activation).item() == torch.inf
    assert bool(launch_act(torch.tensor([torch.nan]), activation).isnan().all())


def test_small_results_of_gelu_are_exact_to_16_bits() -> None:
    """The tail of negative numbers is far smaller than the largest result, with which other tests compare."""
    x = torch.linspace(-4, 0, 10_001)[:-1]
    exact = ops.act(x.double(), "gelu")
    assert float(((launch_act(x, "gelu") - exact) / exact).abs().max()) < 2.0**-14
