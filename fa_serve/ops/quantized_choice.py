"""Which way a product with a quantised weight is computed.

    choose(is_packed=True, by_row=False, num_tokens=8, dtype=torch.bfloat16, arch=90)        # "kernel"
    explain(is_packed=True, by_row=False, dtype=torch.bfloat16, device="cuda", arch=90)      # for people

A few tokens take the kernel that unpacks weights in registers. Many tokens take the unpacked matrix and PyTorch's product,
because unpacking once is then cheap beside the product. Float8 weights with a scale for each row are multiplied with
activations that are rounded to float8 as well, on GPUs where `torch._scaled_mm` does that. Input in float32 is never rounded.
This module imports no Triton, so that `fa-serve info` runs anywhere. Left out: the products (quantized_product.py).
"""

from __future__ import annotations

from typing import Literal

import torch

Way = Literal["kernel", "scaled_mm", "dequantized"]

MANY_TOKENS = 512
"""Above it the matrix is unpacked first. Writing and reading 16-bit weights takes about as long as 430 tokens' product takes on
an H200: 4.5 bytes a weight at 4.2 TB/s, against 2 operations a weight and token at 800 TFLOPS. Not measured yet."""
SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""


def choose(is_packed: bool, by_row: bool, num_tokens: int, dtype: torch.dtype, arch: int) -> Way:
    """How a product of several tokens with a quantised weight is computed on a GPU.

    is_packed: the values are 4-bit integers, not float8
    by_row:    a row has one scale
    dtype:     of the input
    arch:      10 * major + minor of an NVIDIA device, else 0
    """
    if not is_packed and not converts_float8(arch):
        return "dequantized"
    # PyTorch's product with a scale for each row writes bfloat16 only
    if not is_packed and by_row and dtype == torch.bfloat16 and arch in SCALED_MM_ARCHS:
        return "scaled_mm"
    return "kernel" if num_tokens <= MANY_TOKENS else "dequantized"


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def explain(is_packed: bool, by_row: bool, dtype: torch.dtype, device: str, arch: int) -> str:
    """Who computes products with such a weight on a device, by the number of tokens. The arguments are those of `choose`."""
    dequantized = "PyTorch with dequantised weights"
    if device != "cuda" or not (is_packed or converts_float8(arch)):
        return dequantized
    if choose(is_packed, by_row, 2, dtype, arch) == "scaled_mm":
        return "triton for one token, torch._scaled_mm for more"
    return f"triton up to {MANY_TOKENS} tokens, {dequantized} above"
