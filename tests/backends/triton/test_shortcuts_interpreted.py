"""The shortcuts that every interpreted test takes, `interpreter_shortcuts`, leave the language as it was."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _double(x):
    return x.to(tl.int32) * 2


@triton.jit
def _twice(x_ptr, y_ptr, room: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(y_ptr + at, _double(_double(tl.load(x_ptr + at))), mask=at < room)


@pytest.mark.parametrize("room", [4, 8])
def test_the_language_is_that_of_the_compiler_again_after_a_launch(room: int) -> None:
    """After a launch that fails, too. A launch after it replaces the functions anew."""
    functions = (tl.arange, tl.load, tl.tensor.to, tl.core.arange, False)
    x = torch.arange(4, dtype=torch.int16)
    y = torch.zeros(4, dtype=torch.int32)
    _twice[(1,)](x, y, room)
    assert y.tolist() == [0, 4, 8, 12]
    with pytest.raises(InterpreterError):
        _twice[(1,)](x, torch.zeros(2, dtype=torch.int32), room)
    assert (tl.arange, tl.load, tl.tensor.to, tl.core.arange, hasattr(tl.tensor, "__bool__")) == functions
    _twice[(1,)](x, y.zero_(), room)
    assert y.tolist() == [0, 4, 8, 12]


@triton.jit
def _then(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _combine(x_ptr, reduced_ptr, scanned_ptr, some_ptr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at)
    factor, added = tl.reduce((x, x + 1), AXIS, _then)
    out = tl.arange(0, ROWS if AXIS == 1 else COLUMNS)
    tl.store(reduced_ptr + out, factor * 1000 + added)
    factor, added = tl.associative_scan((x, x + 1), AXIS, _then)
    tl.store(scanned_ptr + at, factor * 1000 + added)
    kept = tl.reduce(x, AXIS, _or, keep_dims=True)
    tl.store(some_ptr, tl.reduce(x, None, _or) + 100 * kept.shape[AXIS])


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_are_combined_in_the_order_of_their_elements(axis: int) -> None:
    """The function is associative, and not commutative."""
    x = torch.arange(32, dtype=torch.int64).view(8, 4) % 3
    reduced = torch.zeros(4 if axis == 0 else 8, dtype=torch.int64)
    scanned = torch.zeros_like(x)
    some = torch.zeros(1, dtype=torch.int64)
    _combine[(1,)](x, reduced, scanned, some, axis, 8, 4)
    expected = torch.zeros_like(x)
    for row, values in enumerate(x.movedim(axis, 0).unbind(1)):
        factor = 1
        added = 0
        for i, value in enumerate(values.tolist()):
            factor *= value
            added = added * value + value + 1
            expected.movedim(axis, 0)[i, row] = factor * 1000 + added
    assert torch.equal(scanned, expected)
    assert torch.equal(reduced, expected.movedim(axis, 0)[-1])
    assert some.item() == 103
