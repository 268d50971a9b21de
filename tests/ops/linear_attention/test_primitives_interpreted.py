"""Time steps and normalised rows in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from rounded_once import randn

from fa_serve.ops.linear_attention.primitives import normalised_row, normalised_rows, silu, time_step


@triton.jit
def _steps(x_ptr, out_ptr, gate_ptr, low, high, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, time_step(x, 0.5, low, high, SOFTPLUS))
    tl.store(gate_ptr + i, silu(x))


@triton.jit
def _norms(x_ptr, rows_ptr, row_ptr):
    i = tl.arange(0, 4)
    j = tl.arange(0, 8)
    place = i[:, None] * 8 + j[None, :]
    tl.store(rows_ptr + place, normalised_rows(tl.load(x_ptr + place), True))
    tl.store(row_ptr + j, normalised_row(tl.load(x_ptr + j), True))


def test_time_steps_keep_their_digits() -> None:
    """softplus(-16) is 1.1e-7, of which log(1 + exp(x)) in float32 keeps nothing."""
    x = torch.linspace(-16.5, 30, 64)
    out = torch.empty(64)
    gate = torch.empty(64)
    _steps[(1,)](x, out, gate, 0.0, float("inf"), True, 64)
    torch.testing.assert_close(out.double(), torch.log1p((x.double() + 0.5).exp()), rtol=1e-5, atol=0)
    torch.testing.assert_close(gate, torch.nn.functional.silu(x))
    _steps[(1,)](x, out, gate, 0.25, 2.0, False, 64)
    assert torch.equal(out, (x + 0.5).clamp(0.25, 2.0))


def test_rows_have_length_1_and_zeros_stay() -> None:
    x = randn(4, 8, dtype=torch.float32)
    x[2] = 0
    rows = torch.empty(4, 8)
    row = torch.empty(8)
    _norms[(1,)](x, rows, row)
    expected = x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(row, expected[0])
