"""Gradients of the short convolution in Triton's interpreter, against autograd through float64."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, of_sequence
from rounded_once import randn

from fa_serve.ops.linear_attention import convolution_backward, run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(run, "_gradients_of", None)  # PyTorch's form is not asked


@pytest.mark.parametrize("name", ["conv", "conv-plain"])
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "zeros"])
def test_packed_sequences(name: str, with_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 1, 0, 2 and 37 rows, the short ones below the reach of the convolution, and two rows behind the last one.
    Few parts, so that a program has several blocks."""
    monkeypatch.setattr(convolution_backward, "MAX_WEIGHT_PARTS", 1)
    kind = KINDS_BY_NAME[name]
    bounds = [0, 1, 1, 3, 40]
    rows = kind.rows(42, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(4, *kind.state, dtype=torch.float32, seed=9) if with_state else None
    inputs = [*rows.values(), *weights.values(), *([begin] if begin is not None else [])]
    for x in inputs:
        x.requires_grad_()
    out, final = kind.packed(rows, weights, bounds, begin)
    actual = torch.autograd.grad(out.sin().sum() + final.cos().sum(), inputs)

    loss = torch.zeros((), dtype=torch.float64)
    for i, (first, end) in enumerate(pairwise(bounds)):
        state = torch.zeros(kind.state) if begin is None else begin[i]
        if first == end:
            loss = loss + state.double().cos().sum()
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, state)
        loss = loss + expected.sin().sum() + states[-1].cos().sum()
    wanted = torch.autograd.grad(loss, inputs)
    for x, y in zip(actual, wanted, strict=True):
        assert (x - y).abs().max() <= 2e-6 * y.abs().max()


@pytest.mark.parametrize("name", ["conv", "delta"])
def test_what_hooks_take_is_freed_and_second_derivatives_are_refused(name: str) -> None:
    """As activation checkpoints do: nothing but the saved tensors keeps an input."""
    kind = KINDS_BY_NAME[name]
    leaves = [x[None].requires_grad_() for x in kind.rows(9, torch.float32).values()]
    rows = dict(zip(kind.rows(9, torch.float32), (1 * x for x in leaves), strict=True))
    weights = kind.weights(torch.float32)
    kept = [weakref.ref(x) for x in rows.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.shape, lambda shape: torch.zeros(shape)):
        out, _ = kind.dense(**rows, **weights, **kind.options)
    rows.clear()
    gc.collect()
    assert not any(x() is not None for x in kept)
    out, _ = kind.dense(**dict(zip(kind.rows(9, torch.float32), leaves, strict=True)), **weights, **kind.options)
    [first] = torch.autograd.grad(out.sin().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
