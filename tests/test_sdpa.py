"""The sdpa backend on a CPU against the float64 oracle, by the 2x rule, over the whole matrix; and its gradients."""

from __future__ import annotations

import pytest
import torch
from cases import DENSE, PAGED, VARLEN, Case, check, params

import fa_serve
from fa_serve.testing import make_qkv


@pytest.mark.parametrize("case", params(DENSE))
def test_dense(case: Case) -> None:
    check(case, "sdpa", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", params(DENSE[::7]))
def test_dense_dtypes(case: Case, dtype: torch.dtype) -> None:
    check(case, "sdpa", dtype)


@pytest.mark.parametrize("case", params(VARLEN))
def test_varlen(case: Case) -> None:
    check(case, "sdpa", torch.float32, layout="varlen")


@pytest.mark.parametrize("case", params(PAGED))
def test_paged(case: Case) -> None:
    check(case, "sdpa", torch.float32, layout="paged")


def test_many_queries_are_cut_in_chunks() -> None:
    """Longer than a chunk: the masks of later chunks start where the window does."""
    check(Case((1100,), (1300,), heads=2, kv_heads=1, causal=True, window=(300, -1)), "sdpa", torch.float32)
    check(Case((1100,), (1100,), heads=2, kv_heads=1, causal=True, softcap=20.0), "sdpa", torch.float32)


def test_gradients_match_the_reference() -> None:
    q, k, v = make_qkv(2, 20, 33, 4, 2, 16, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 33) > 0.3
    mask[1] = False  # a whole sequence that sees nothing must not give NaN gradients
    grads = []
    for backend in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out = fa_serve.attention(*leaves[:3], sinks=leaves[3], mask=mask, window_size=(9, 3), backend=backend)
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
