"""Adapters in PyTorch, against float64 token by token."""

from __future__ import annotations

import pytest
import torch
from lora_cases import LoraCase, exact_result, make_case
from rounded_once import DTYPES, assert_rounded_once, dtype_id

from fa_serve import ops

CASES = [
    pytest.param(LoraCase((0, 1, -1, 2, 1, 0, 0)), id="mixed"),
    pytest.param(LoraCase((2,)), id="one token"),
    pytest.param(LoraCase((1, 0), norm=True), id="norm"),
    pytest.param(LoraCase((-1, 0, 2), bias=True), id="bias"),
    pytest.param(LoraCase((-1, 0, 2, 2), dora=True), id="dora"),
    pytest.param(LoraCase((0, 1), dora=True, bias=True, norm=True), id="everything"),
    pytest.param(LoraCase((1,) * 35 + (0,) * 3, widths=(40,)), id="several tiles"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_added_to_their_tokens(case: LoraCase, dtype: torch.dtype) -> None:
    y, x, weights, batch, norm, bias = make_case(case, dtype)
    exact = exact_result(case, y, x, weights, batch, norm, bias)
    before = y.clone()
    assert ops.add_lora(y, x, weights, batch, norm=norm, bias=bias) is y
    assert_rounded_once(y, exact)
    untouched = [slot < 0 for slot in case.slots]
    assert torch.equal(y[untouched], before[untouched])
