"""Linear attention in PyTorch, dense and packed, against the recurrences in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS, KINDS_BY_NAME, Kind, of_sequence
from rounded_once import dtype_id, randn

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_one_sequence(kind: Kind, tokens: int) -> None:
    rows = kind.rows(tokens, torch.float64)
    weights = kind.weights(torch.float64)
    expected, states = kind.exact(rows, weights)
    out, final = kind.dense(**{name: x[None] for name, x in rows.items()}, **weights, output_final_state=True, **kind.options)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(final[0], states[-1])
    _, final = kind.dense(**{name: x[None] for name, x in rows.items()}, **weights, **kind.options)
    assert final is None


@every_kind
def test_a_batch_with_initial_states(kind: Kind) -> None:
    rows = kind.rows(60, torch.float64)
    weights = kind.weights(torch.float64)
    begin = randn(3, *kind.state, dtype=torch.float64, seed=9)
    dense = {name: x.view(3, 20, *x.shape[1:]) for name, x in rows.items()}
    out, final = kind.dense(**dense, **weights, initial_state=begin, output_final_state=True, **kind.options)
    for i in range(3):
        expected, states = kind.exact({name: x[i] for name, x in dense.items()}, weights, begin[i])
        torch.testing.assert_close(out[i], expected)
        torch.testing.assert_close(final[i], states[-1])


@every_kind
def test_packed_sequences_do_not_see_each_other(kind: Kind) -> None:
    """Among them one of no rows, which keeps its state, and rows behind the last sequence."""
    bounds = [0, 5, 5, 70, 71, 88]
    rows = kind.rows(100, torch.float64)
    weights = kind.weights(torch.float64)
    begin = randn(5, *kind.state, dtype=torch.float64, seed=9)
    out, final = kind.packed(rows, weights, bounds, begin)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            torch.testing.assert_close(final[i], begin[i], rtol=0, atol=0)
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        torch.testing.assert_close(out[first:end], expected)
        torch.testing.assert_close(final[i], states[-1])
    assert out.shape[0] == 100
    assert not out[88:].any()


@every_kind
def test_a_sequence_may_be_cut_anywhere(kind: Kind) -> None:
    rows = kind.rows(70, torch.float64)
    weights = kind.weights(torch.float64)
    expected, states = kind.exact(rows, weights)
    for cut in (1, 2, 16, 40, 64, 69):
        first, middle = kind.packed(of_sequence(rows, 0, cut), weights, [0, cut])
        torch.testing.assert_close(middle[0], states[cut])
        second, final = kind.packed(of_sequence(rows, cut, 70), weights, [0, 70 - cut], middle)
        torch.testing.assert_close(torch.cat((first, second)), expected)
        torch.testing.assert_close(final[0], states[-1])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_results_are_rounded_once(kind: Kind, dtype: torch.dtype) -> None:
    """States are float32; those of a convolution are inputs, which are exact."""
    rows = kind.rows(90, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    out, final = kind.packed(rows, weights, [0, 90])
    assert (out.dtype, final.dtype) == (dtype, dtype if kind.name.startswith("conv") else torch.float32)
    error = 1e-5 * expected.abs().max()
    assert ((out.double() - expected).abs() <= error + torch.finfo(dtype).eps / 2 * expected.abs()).all()
    assert (final.double() - states[-1]).abs().max() <= 1e-5 * states[-1].abs().max()


def test_strong_gates_underflow() -> None:
    """Sums of log gates of -3000 a piece: exp of their negation would be infinite, and 0 times it NaN."""
    kind = KINDS_BY_NAME["kda-strong"]
    rows = kind.rows(64, torch.float32)
    weights = kind.weights(torch.float32)
    assert rows["g"].sum(0).max() < -1000
    out, final = kind.packed(rows, weights, [0, 64])
    assert out.isfinite().all()
    assert final.isfinite().all()


@every_kind
def test_gradients(kind: Kind) -> None:
    """PyTorch differentiates the functional form, packed as well."""
    rows = kind.rows(20, torch.float64)
    weights = kind.weights(torch.float64)
    begin = randn(2, *kind.state, dtype=torch.float64, seed=9)
    inputs = [*rows.values(), *weights.values(), begin]
    for x in inputs:
        x.requires_grad_()
    out, final = kind.packed(rows, weights, [0, 3, 20], begin)
    actual = torch.autograd.grad(out.sin().sum() + final.cos().sum(), inputs)
    total = torch.zeros((), dtype=torch.float64)
    for i, (first, end) in enumerate(((0, 3), (3, 20))):
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        total = total + expected.sin().sum() + states[-1].cos().sum()
    for x, y in zip(actual, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(x, y)
