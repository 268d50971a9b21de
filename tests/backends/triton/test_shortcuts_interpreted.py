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
