"""Gradients of the gated delta rule in Triton's interpreter, against autograd through the recurrence in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, of_sequence
from rounded_once import randn

from fa_serve.ops.linear_attention import run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(run, "_gradients_of", None)  # PyTorch's form is not asked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta", "delta-strong", "kda", "kda-strong"])
def test_packed_sequences(name: str) -> None:
    """Sequences of 5, 0 and 130 rows with states, and two rows behind the last one. Weak gates, so that states count."""
    kind = KINDS_BY_NAME[name]
    bounds = [0, 5, 5, 135]
    rows = kind.rows(137, torch.float32)
    if name in ("delta", "kda"):
        rows["g"] /= 20
    begin = randn(3, *kind.state, dtype=torch.float32, seed=9)
    inputs = [*rows.values(), begin]
    for x in inputs:
        x.requires_grad_()
    out, final = kind.packed(rows, {}, bounds, begin)
    actual = torch.autograd.grad(out.sin().sum() + final.cos().sum(), inputs)

    loss = torch.zeros((), dtype=torch.float64)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            loss = loss + begin[i].double().cos().sum()
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), {}, begin[i])
        loss = loss + expected.sin().sum() + states[-1].cos().sum()
    wanted = torch.autograd.grad(loss, inputs)
    for x, y in zip(actual, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()


@pytest.mark.parametrize("name", ["delta", "kda"])
def test_short_sequences_without_states(name: str) -> None:
    """The forward is that of few rows. The loss does not depend on the final states."""
    kind = KINDS_BY_NAME[name]
    rows = {name: x[None] for name, x in kind.rows(9, torch.float32).items()}
    inputs = list(rows.values())
    for x in inputs:
        x.requires_grad_()
    out, _ = kind.dense(**rows, **kind.options)
    actual = torch.autograd.grad(out.sin().sum(), inputs)
    expected, _ = kind.exact({name: x[0] for name, x in rows.items()}, {})
    wanted = torch.autograd.grad(expected.sin().sum(), inputs)
    for x, y in zip(actual, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()
