"""The checker that every interpreted test runs under, `interpreter_bounds`, sees one element too many and nothing else."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _copy(x_ptr, y_ptr, first, count, STORE: tl.constexpr):
    index = first + tl.arange(0, 4)
    x = tl.load(x_ptr + index, mask=index < count)
    if STORE == "store":
        tl.store(y_ptr + index, x, mask=index < count)
    elif STORE == "add":
        tl.atomic_add(y_ptr + index, x, mask=index < count)
    elif STORE == "swap":
        tl.atomic_cas(y_ptr + first, tl.load(y_ptr), tl.load(x_ptr + first))


@pytest.mark.every_case
@pytest.mark.parametrize("store", ["none", "store", "add"])
@pytest.mark.parametrize(
    ("first", "count", "inside"), [(0, 3, True), (1, 4, True), (0, 4, True), (1, 5, False), (-1, 4, False)]
)
def test_an_element_beyond_the_tensors_raises(first: int, count: int, inside: bool, store: str) -> None:
    exact = torch.arange(4.0)
    roomy = torch.zeros(64)[16:32]  # what is stored lies inside, what is loaded may not
    x, y = (exact, roomy) if store == "none" else (roomy, exact)
    if inside:
        _copy[(1,)](x, y, first, count, store)
    else:
        with pytest.raises(InterpreterError, match=r"1 of 4 elements of the (masked load|masked store|atomic rmw) lie"):
            _copy[(1,)](x, y, first, count, store)


def test_a_swap_beyond_the_tensors_raises() -> None:
    _copy[(1,)](torch.zeros(8), torch.zeros(4), 3, 4, "swap")
    with pytest.raises(InterpreterError, match="1 of 1 elements of the atomic cas lie"):
        _copy[(1,)](torch.zeros(8), torch.zeros(4), 4, 4, "swap")
