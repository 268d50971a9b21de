"""The kernel of grouped inputs of a delta net in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.delta_inputs import launch_ungroup_delta_inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("total", "heads"),
    [
        pytest.param(1, ops.DeltaHeads(2, 16, 4, 32), id="two-of-a-group"),
        pytest.param(3, ops.DeltaHeads(3, 24, 9, 16), id="three-of-a-group"),
        pytest.param(2, ops.DeltaHeads(2, 16, 2, 16), id="one-of-a-group"),
    ],
)
def test_columns_reach_their_places(total: int, heads: ops.DeltaHeads, dtype: torch.dtype) -> None:
    """Rows may be longer than the columns that are read."""
    x = 3 * randn(total, heads.columns + 2 * heads.values + 5, dtype=dtype)[:, :-5]
    a_log, dt_bias = (randn(heads.values, dtype=torch.float32, seed=seed) for seed in (2, 3))
    qkv, z, g, beta = launch_ungroup_delta_inputs(x, heads, a_log, dt_bias)
    exact = ops.ungroup_delta_inputs(x.double(), heads, a_log.double(), dt_bias.double())
    assert torch.equal(qkv.double(), exact[0])
    assert torch.equal(z.double(), exact[1])
    torch.testing.assert_close(g.double(), exact[2], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(beta.double(), exact[3], rtol=1e-6, atol=1e-9)
