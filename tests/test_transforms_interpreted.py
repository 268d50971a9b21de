"""Transforms of `torch.func` around the portable kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from transform_cases import Attend, check_other_calls, check_refusals, check_transform, params

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of PyTorch's operator, whose samples are expected
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # PyTorch compiles its forward mode with it
]


@pytest.mark.parametrize("case", params())
def test_results_are_those_of_pytorch(case: Attend) -> None:
    check_transform(case, "triton", torch.float32)


def test_calls_without_gradients() -> None:
    check_other_calls("triton")


def test_refusals() -> None:
    check_refusals("triton")
