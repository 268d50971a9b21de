"""The kernel that chooses experts in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve.ops import Router
from fa_serve.ops.moe.routing import launch_route
from fa_serve.ops.torch_ops import TorchOps

ROUTERS = {
    "softmax": Router(3),
    "softmax-renormalised": Router(4, renormalise=True),
    "every-expert": Router(8, renormalise=True),
    "one": Router(1, scale=2.5),
    "sigmoid": Router(2, sigmoid=True, renormalise=True, scale=1.5),
    "groups": Router(2, sigmoid=True, num_groups=4, top_groups=2),
    "one-group": Router(2, num_groups=2, top_groups=1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_route(router: Router, bias: bool, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(9)])[:, :8] / 4
    logits = logits.to(dtype)  # without ties, which are broken in another way
    added = randn(8, dtype=torch.float32, seed=1) / 8 if bias else None
    wide = None if added is None else added.double()
    exact, chosen = TorchOps().route(logits.double(), wide, router, torch.float64)
    weights, index = launch_route(logits, added, router, dtype)
    assert torch.equal(index, chosen)
    assert weights.dtype == dtype
    assert_rounded_once(weights, exact)


@pytest.mark.parametrize("num_experts", [1, 5, 60])
def test_any_number_of_experts(num_experts: int) -> None:
    logits = randn(4, num_experts + 3, dtype=torch.float32)[:, :num_experts]
    exact, chosen = TorchOps().route(logits.double(), None, Router(1), torch.float64)
    weights, index = launch_route(logits, None, Router(1), torch.float32)
    assert torch.equal(index, chosen)
    assert_rounded_once(weights, exact)


def test_of_equal_scores_the_first_is_taken() -> None:
    _, index = launch_route(torch.zeros(2, 6), None, Router(3), torch.float32)
    assert index.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_a_row_of_nan_has_weights_of_nan_and_experts_that_exist() -> None:
    logits = torch.zeros(2, 5)
    logits[1] = float("nan")
    weights, index = launch_route(logits, None, Router(2), torch.float32)
    assert torch.isnan(weights[1]).all()
    assert torch.isfinite(weights[0]).all()
    assert bool(((index >= 0) & (index < 5)).all())


def test_no_tokens() -> None:
    weights, index = launch_route(torch.zeros(0, 5), None, Router(2), torch.float32)
    assert weights.shape == index.shape == (0, 2)
