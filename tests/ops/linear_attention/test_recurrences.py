"""Sums of log gates, and the recurrence by doubling."""

from __future__ import annotations

import pytest
import torch
from rounded_once import randn

from fa_serve.ops.linear_attention.problem import TimeSteps
from fa_serve.ops.linear_attention.recurrences import expand_heads, matrix_pieces, scan_rows, time_steps


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
def test_doubling_finds_every_state(rows: int) -> None:
    a = randn(2, rows, 3, dtype=torch.float64, seed=1).sigmoid()
    b = randn(2, rows, 3, dtype=torch.float64, seed=2)
    state = randn(2, 3, dtype=torch.float64, seed=3)
    found = scan_rows(a, b, state)
    for i in range(rows):
        state = a[:, i] * state + b[:, i]
        torch.testing.assert_close(found[:, i], state)


@pytest.mark.parametrize("channels", [False, True])
def test_weak_gates_among_strong_ones_are_exact(channels: bool) -> None:
    """The last gates of a piece are weak, and the sum before them is -60000: its rounding alone is 0.004 in float32."""
    shape = (1, 1, 16, 4) if channels else (1, 1, 16)
    g = torch.full(shape, -5000.0)
    g[:, :, 12:] = -0.25
    q = torch.ones(1, 1, 16, 4)
    k = torch.ones(1, 1, 16, 4)
    v = torch.zeros(1, 1, 16, 2)
    v[:, :, 11] = 1
    out, _, _ = matrix_pieces(q, k, v, g, None, torch.zeros(1, 1, 4, 2))
    expected = 4 * torch.exp(-0.25 * torch.arange(5))
    torch.testing.assert_close(out[0, 0, 11:, 0], expected, rtol=1e-6, atol=0)


def test_heads_that_share_a_key() -> None:
    """Heads 0 and 1 take key head 0. A key of zeros stays one when it is normalised."""
    x = torch.zeros(1, 3, 2, 4)
    x[:, 1:] = randn(1, 2, 2, 4, dtype=torch.float32)
    heads = expand_heads(x, 4, True)
    assert heads.shape == (1, 4, 3, 4)
    assert torch.equal(heads[0, 0], heads[0, 1])
    assert torch.equal(heads[0, :, 0], torch.zeros(4, 4))
    torch.testing.assert_close(heads[0, 3, 2].norm(), torch.tensor(1.0))


def test_time_steps() -> None:
    dt = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16)
    assert time_steps(dt, TimeSteps()).dtype == torch.float32
    bias = torch.tensor([1.0, -1.0])
    assert time_steps(dt, TimeSteps(bias)).tolist() == [[1, 2]]
    expected = torch.tensor([[1.3132617, 2.0]])
    torch.testing.assert_close(time_steps(dt, TimeSteps(bias, True, (0.5, 2.0))), expected)
