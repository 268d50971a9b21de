"""Gradients of heads of 136 to 256 by the Hopper kernel for wide heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, check_gradients, params

import fa_serve
from fa_serve.backends.hopper.backward import tiles
from fa_serve.launching.plans import PLANS
from fa_serve.testing import make_qkv

LENGTHS = (300, 1, 64, 129)
CASES = [
    *[
        Case(LENGTHS, LENGTHS, heads=4, kv_heads=2, head_dim=d, head_dim_v=dv, causal=True)
        for d, dv in ((136, 0), (192, 0), (192, 128), (256, 0), (64, 192))
    ],
    Case((1000,), (1000,), heads=2, kv_heads=1, head_dim=256),
    Case((1000, 40), (1000, 700), heads=4, kv_heads=1, head_dim=256, causal=True, softcap=20.0, sinks=True),
    Case((333,), (700,), heads=4, kv_heads=2, head_dim=192, window=(100, 0), softcap=20.0),
    Case((333,), (700,), heads=2, kv_heads=2, head_dim=256, window=(60, 30)),
    Case((300,), (100,), heads=2, kv_heads=2, head_dim=256, causal=True),
    Case((1, 64), (900, 64), heads=16, kv_heads=2, head_dim=192, head_dim_v=128, causal=True),
]


@pytest.fixture(autouse=True)
def any_order() -> Any:
    """Gradients may be added in any order."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper only")
    PLANS.clear()
    torch.use_deterministic_algorithms(False)
    yield
    PLANS.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", params(CASES))
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    """Packed; sequences of one length as a batch too."""
    is_even = len({*zip(case.lengths_q, case.lengths_k, strict=True)}) == 1
    for layout in ("dense", "varlen") if is_even else ("varlen",):
        check_gradients(case, "hopper", dtype, "cuda", layout)


@pytest.mark.parametrize("shares_dq", [False, True])
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)], ids=str)
def test_gradients_of_long_calls(dims: tuple[int, int], shares_dq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is near the portable kernels' gradients, whatever the order of the additions. A race would show in some."""
    chosen = tiles.BackwardTileConfig(64, 2, shares_dq=shares_dq)
    monkeypatch.setattr("fa_serve.backends.hopper.backward.plan.hopper_backward_tiles", lambda width: chosen)
    made = make_qkv(1, 4000, 4000, 8, 2, *dims, dtype=torch.bfloat16, device="cuda")
    given = [x.requires_grad_() for x in made]
    out: Any = fa_serve.attention(*given, causal=True)
    dout = torch.randn_like(out)
    torch.use_deterministic_algorithms(True)
    expected = torch.autograd.grad(out, given, dout, retain_graph=True)
    torch.use_deterministic_algorithms(False)
    for _ in range(20):
        actual = torch.autograd.grad(out, given, dout, retain_graph=True)
        for mine, portable in zip(actual, expected, strict=True):
            worst = (mine.float() - portable.float()).abs().max().item()
            assert worst <= 2e-2 * portable.float().abs().max().item()
