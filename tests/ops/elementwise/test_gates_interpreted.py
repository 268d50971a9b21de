"""The kernels of gates in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.gates import BLOCK_GATES, launch_delta_gates, launch_gate_heads


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("total", "heads", "dim", "activation", "norm"),
    [
        pytest.param(1, 4, 64, "silu", True, id="norm-silu"),
        pytest.param(3, 9, 48, "silu", True, id="norm-silu-D48-H9"),
        pytest.param(2, 17, 128, "sigmoid", False, id="sigmoid-H17"),
    ],
)
def test_gate_heads(total: int, heads: int, dim: int, activation: ops.GateActivation, norm: bool, dtype: torch.dtype) -> None:
    """Gates may stand between other heads, as in the projection of gated attention."""
    x = randn(total, heads, dim, dtype=dtype)
    gate = randn(total, 2 * heads + 3, dim, dtype=dtype, seed=1)[:, 1 : 2 * heads : 2]
    weights = ops.Norm(randn(dim, dtype=dtype, seed=2), 1e-3, 1.0) if norm else None
    wide = None if weights is None else ops.Norm(weights.weight.double(), 1e-3, 1.0)
    exact = ops.gate_heads(x.double(), gate.double(), activation, norm=wide)
    assert_rounded_once(launch_gate_heads(x, gate, activation, weights), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("total", [1, BLOCK_GATES // 7 + 1])
def test_delta_gates(total: int, dtype: torch.dtype) -> None:
    """Small and large steps: softplus is exact on both sides of its branches."""
    rows = randn(total, 20, dtype=dtype)
    a = rows[:, :7] * 12
    b = rows[:, 9:16]
    a_log, dt_bias = (randn(7, dtype=torch.float32, seed=seed) for seed in (2, 3))
    g, beta = launch_delta_gates(a, b, a_log, dt_bias)
    exact_g, exact_beta = ops.delta_gates(a.double(), b.double(), a_log.double(), dt_bias.double())
    torch.testing.assert_close(g.double(), exact_g, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(beta.double(), exact_beta, rtol=1e-6, atol=1e-9)
