"""The public functions: what they refuse themselves, and what they return.

The checks of tensors are tested in tests/test_argument_checks.py, plans in tests/test_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_calls import DENSE, PAGED, ROWS, K, Q, V

import fa_serve
from fa_serve import dispatch
from fa_serve.launching.plans import PlanTable

# function, its right arguments, what is changed, what the error must say
BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = {
    "batch": (*DENSE, {"q": Q[:1]}, "k must have q's batch size 1, got 2"),
    "backend": (*DENSE, {"backend": "fast"}, "backend must be 'auto' or one of .*'fast'"),
    "capacity": (*PAGED, {"max_seqlen_k": 9}, "max_seqlen_k must be at most .* = 8, got 9"),
    "splits": (*PAGED, {"num_splits": -2}, "num_splits must be 0 .*got -2"),
}


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> PlanTable:
    """A table of plans for this test alone, so that no earlier test has already had a call checked."""
    table = PlanTable()
    monkeypatch.setattr(dispatch, "PLANS", table)
    return table


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    function, arguments, change, text = BAD[name]
    function(**arguments)
    with pytest.raises(ValueError, match=text):
        function(**(arguments | change))


def test_out_and_lse() -> None:
    out = torch.full((2, 5, 4, 16), float("nan"))
    returned, lse = fa_serve.attention(Q, K, V, causal=True, out=out, return_lse=True)
    assert returned is out
    assert lse.shape == (2, 4, 5)
    torch.testing.assert_close(out, fa_serve.attention(Q, K, V, causal=True, backend="reference"), rtol=1e-5, atol=1e-5)


def test_store_kv_skips_and_writes() -> None:
    caches = [torch.zeros(3, 4, 2, 16) for _ in range(2)]
    fa_serve.store_kv(**ROWS, **dict(zip(("k_cache", "v_cache"), caches, strict=True)), slot_mapping=torch.tensor([0, -1, 9]))
    for cache, rows in zip(caches, ROWS.values(), strict=True):
        assert torch.equal(cache[0, 0], rows[0])
        assert torch.equal(cache[2, 1], rows[2])
        assert int((cache.abs().sum((2, 3)) > 0).sum()) == 2
