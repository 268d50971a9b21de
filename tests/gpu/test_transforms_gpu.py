"""Transforms of `torch.func` around the kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from transform_cases import Attend, check_other_calls, check_refusals, check_transform, params

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of PyTorch's operator, whose samples are expected
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # PyTorch compiles its forward mode with it
]
BACKENDS = ["auto", "triton"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", params())
def test_results_are_those_of_pytorch(case: Attend, backend: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and case.__name__ == "_jacrev":
        pytest.skip("a derivative of single numbers is compared in float32")
    check_transform(case, backend, dtype, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_without_gradients(backend: str) -> None:
    check_other_calls(backend, "cuda", torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals(backend: str) -> None:
    check_refusals(backend, "cuda", torch.bfloat16)
