"""Rows rounded to float8 in Triton's interpreter, whose numbers need no rounding: it rounds carries wrongly in Triton 3.6."""

from __future__ import annotations

import pytest
import torch
from products_by_kernel import rounded_by_kernel

from fa_serve import ops
from fa_serve.ops.elementwise.activation import launch_act_and_mul


def test_rows_are_divided_by_what_makes_their_largest_448() -> None:
    values = torch.tensor([[448.0, -1.5, 0.0, 112.0], [-26.0, 448.0, 3.25, 2.0**-9], [0.0, 0.0, 0.0, 0.0]])
    scales = torch.tensor([[0.25], [8.0], [0.0]])
    rounded, found, _ = rounded_by_kernel(values * scales, None, None)
    assert torch.equal(rounded.float(), values)
    assert torch.equal(found[:2], scales[:2])
    assert 0 < float(found[2]) < 1e-30, "a row of zeros is not divided by zero"


def test_rows_are_normalised_first() -> None:
    x = torch.tensor([[3.0, -3.0, 3.0, 3.0]])  # whose mean square is 9
    norm = ops.Norm(torch.tensor([448.0, 232.0, 0.6, 0.0]), 0.0)
    rounded, scales, _ = rounded_by_kernel(x, norm, None)
    assert torch.allclose(scales, torch.ones(1, 1), rtol=1e-6)
    assert torch.allclose(rounded.float(), torch.tensor([[448.0, -232.0, 0.6, 0.0]]), rtol=0.07)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_rows_are_gated_first(activation: str) -> None:
    """With the bits of the gate and the rounding in two launches."""
    gate_up = torch.randn(5, 2 * 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded, scales, _ = rounded_by_kernel(gate_up, None, None, activation)
    expected, expected_scales, _ = rounded_by_kernel(launch_act_and_mul(gate_up, activation), None, None)
    assert rounded.shape == (5, 40)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rounded.float(), expected.float())


def test_rows_are_rounded_with_a_given_scale_and_saturate() -> None:
    x = torch.tensor([[1.0, -1000.0, 0.25, 448.0]])
    rounded, scales, _ = rounded_by_kernel(x, None, torch.tensor([0.5]))
    assert scales.tolist() == [[0.5]]
    assert rounded.float().tolist() == [[2.0, -448.0, 0.5, 448.0]]
