"""Rows behind the last sequence of a packed call in Triton's interpreter: out is 0, lse is -inf, gradients are 0."""

from __future__ import annotations

import pytest
import torch
from sampled_cases import each_nth
from tail_cases import PAGED, VARLEN, TailCase, attend, check_tail, check_tail_gradients, params


@pytest.mark.parametrize("case", params(each_nth(3, [*VARLEN, *PAGED])))
def test_rows_behind_the_last_sequence(case: TailCase) -> None:
    check_tail(case, attend(case, "triton"), torch.float32)


def test_float16() -> None:
    case = TailCase((40, 1), (64, 70), layout="paged")
    check_tail(case, attend(case, "triton"), torch.float16)


def test_gradients() -> None:
    check_tail_gradients("triton", torch.float32)
