"""Which way a product with a quantised weight is computed.

    choose(is_packed=True, by_row=False, num_tokens=8, shape=(4096, 4096), dtype=torch.bfloat16, arch=90)        # "kernel"
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

SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""


def kernel_tokens(is_packed: bool, n: int, k: int) -> int:
    """The most tokens of which a product with an (n, k) weight takes the kernel. With more the matrix is unpacked first.

    Measured on one H200 with a former kernel, us for the kernel and for the unpacked matrix. 4-bit weights, 64 tokens:
    6144 x 4096 60.6, 37.0; 28672 x 4096 86.6, 151.6; 4096 x 14336 170.6, 86.1. 128 tokens: 28672 x 4096 132.9, 156.4. 256
    tokens: 28672 x 4096 246.3, 181.4. Float8 weights in blocks, 64 tokens: 28672 x 4096 113.6, 183.5; 4096 x 14336 128.2,
    101.8. 128 tokens: 28672 x 4096 214.8, 188.5; 4096 x 14336 159.7, 103.0.
    """
    if n * k <= 1 << 26:
        return 32
    return 128 if is_packed else 64


def choose(is_packed: bool, by_row: bool, num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, arch: int) -> Way:
    """How a product of several tokens with a quantised weight is computed on a GPU.

    is_packed: the values are 4-bit integers, not float8
    by_row:    a row has one scale
    shape:     (n, k) of the weight
    dtype:     of the input
    arch:      10 * major + minor of an NVIDIA device, else 0
    """
    if not is_packed and not converts_float8(arch):
        return "dequantized"
    # PyTorch's product with a scale for each row writes bfloat16 only
    if not is_packed and by_row and dtype == torch.bfloat16 and arch in SCALED_MM_ARCHS:
        return "scaled_mm"
    return "kernel" if num_tokens <= kernel_tokens(is_packed, *shape) else "dequantized"


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def explain(is_packed: bool, by_row: bool, dtype: torch.dtype, device: str, arch: int) -> str:
    """Who computes products with such a weight on a device, by the number of tokens. The arguments are those of
    `choose`."""
    dequantized = "PyTorch with dequantised weights"
    if device != "cuda" or not (is_packed or converts_float8(arch)):
        return dequantized
    if choose(is_packed, by_row, 2, (1, 1), dtype, arch) == "scaled_mm":
        return "triton for one token, torch._scaled_mm for more"
    return f"triton for few tokens, {dequantized} for more"
