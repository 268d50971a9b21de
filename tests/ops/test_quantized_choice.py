"""Which way a product with a quantised weight takes."""

from __future__ import annotations

import pytest
import torch

from fa_serve.ops.quantized_choice import KERNEL_TOKENS, choose, explain


@pytest.mark.parametrize(
    ("packed", "by_row", "tokens", "dtype", "arch", "way"),
    [
        pytest.param(True, False, 2, torch.bfloat16, 90, "kernel", id="int4"),
        pytest.param(True, False, 32, torch.float16, 80, "kernel", id="int4-sm80"),
        pytest.param(True, False, 129, torch.float16, 80, "dequantized", id="int4-many"),
        pytest.param(True, False, 2, torch.bfloat16, 0, "kernel", id="int4-amd"),
        pytest.param(False, True, 2, torch.bfloat16, 90, "scaled_mm", id="float8"),
        pytest.param(False, True, 9000, torch.bfloat16, 100, "scaled_mm", id="float8-many"),
        pytest.param(False, True, 2, torch.bfloat16, 120, "kernel", id="float8-sm120"),
        pytest.param(False, True, 2, torch.float16, 90, "kernel", id="float8-half"),
        pytest.param(False, True, 2, torch.float32, 90, "kernel", id="float8-float32"),
        pytest.param(False, False, 2, torch.bfloat16, 90, "kernel", id="float8-blocks"),
        pytest.param(False, False, 9000, torch.bfloat16, 90, "dequantized", id="float8-blocks-many"),
        pytest.param(False, True, 2, torch.bfloat16, 86, "dequantized", id="float8-sm86"),
        pytest.param(False, True, 2, torch.bfloat16, 0, "dequantized", id="float8-amd"),
    ],
)
def test_the_way(packed: bool, by_row: bool, tokens: int, dtype: torch.dtype, arch: int, way: str) -> None:
    assert choose(packed, by_row, tokens, dtype, arch) == way


@pytest.mark.parametrize(
    ("packed", "by_row", "device", "arch", "text"),
    [
        (True, False, "cpu", 0, "PyTorch with dequantised weights"),
        (True, False, "cuda", 80, "triton for few tokens, PyTorch with dequantised weights for more"),
        (False, True, "cuda", 90, "triton for one token, torch._scaled_mm for more"),
        (False, False, "cuda", 90, "triton for few tokens, PyTorch with dequantised weights for more"),
        (False, True, "cuda", 80, "PyTorch with dequantised weights"),
    ],
)
def test_people_are_told(packed: bool, by_row: bool, device: str, arch: int, text: str) -> None:
    assert explain(packed, by_row, torch.bfloat16, device, arch) == text


def test_many_tokens_unpack_the_matrix_once() -> None:
    assert choose(True, False, KERNEL_TOKENS, torch.bfloat16, 90) == "kernel"
    assert choose(True, False, KERNEL_TOKENS + 1, torch.bfloat16, 90) == "dequantized"
