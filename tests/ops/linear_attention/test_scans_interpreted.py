"""The kernel of states that are vectors in Triton's interpreter, against the recurrences in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, Kind, joined, of_sequence
from rounded_once import dtype_id, randn
from state_steps import Part, StateSteps

from fa_serve.ops.linear_attention import run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)


every_kind = pytest.mark.parametrize(
    "kind", [KINDS_BY_NAME[name] for name in ("selective_scan", "rg_lru")], ids=lambda kind: kind.name
)


def bound(expected: torch.Tensor, dtype: torch.dtype) -> float:
    return float(expected.abs().max() * (1e-5 + torch.finfo(dtype).eps))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=dtype_id)
def test_steps(kind: Kind, dtype: torch.dtype) -> None:
    """A chunk with a state within it beside padding, few rows over the end of a page, rejected drafts."""
    rows = kind.rows(80, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights))
    done = 0
    for count, dropped, stores in ((40, 0, (16,)), (7, 0, ()), (5, 4, ()), (1, 0, ())):
        batch = table.begin([Part(9, 16, padding=True), Part(0, count, dropped, stores), Part(3, 0, padding=True)])
        own = of_sequence(rows, done, done + count)
        out = kind.step(joined([of_sequence(rows, 0, 16), own, of_sequence(rows, 0, 2)]), weights, table.states, batch)
        assert out.dtype == dtype
        assert (out[16 : 16 + count].double() - expected[done : done + count]).abs().max() <= bound(expected, dtype)
        assert not out[:16].any(), "padding"
        assert not out[sum(part.rows for part in table.parts) :].any(), "rows behind the last sequence"
        for position, page in table.sequences[0].kept.items():
            assert (table.states.pages[page].double() - states[position]).abs().max() <= bound(states[position], torch.float32)
        table.end()
        done += count - dropped


@every_kind
def test_packed_sequences(kind: Kind) -> None:
    bounds = [0, 1, 1, 20, 40]
    rows = kind.rows(42, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(4, *kind.state, dtype=torch.float32, seed=9)
    out, final = kind.packed(rows, weights, bounds, begin)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            assert torch.equal(final[i], begin[i])
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        assert (out[first:end].double() - expected).abs().max() <= bound(expected, torch.float32)
        assert (final[i].double() - states[-1]).abs().max() <= bound(states[-1], torch.float32)
