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

from fa_serve.ops.quantized_weight import Values

Way = Literal["kernel", "scaled_mm", "dequantized"]
Kernel = Literal["portable", "few", "wgmma"]
"""Which kernel unpacks weights in registers: the portable ones (quantized_kernel.py), or those for Hopper."""

SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""


KERNEL_TOKENS = 128
"""The most tokens of which a product takes the kernel. With more the matrix is unpacked first.

In us on one H200, by the kernel and with the unpacked matrix. 4-bit weights, 128 tokens: 6144 x 4096 36.8, 48.8; 28672 x 4096
119.7, 156.4; 4096 x 14336 76.2, 83.6. Float8 weights in blocks: 42.4, 41.4; 138.9, 188.5; 80.7, 91.4.
"""


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
    return "kernel" if num_tokens <= KERNEL_TOKENS else "dequantized"


FEW_TOKENS = 16
"""The most tokens that the Hopper kernel for few tokens multiplies with 4-bit weights."""
_FEW_COLUMNS = 32768  # one token is kept in shared memory
_MOST_WORDS = 1 << 31  # words are counted in 32 bits


def kernel_of(
    values: Values, shape: tuple[int, int], group_size: int, num_tokens: int, dtype: torch.dtype, scales: torch.dtype, arch: int
) -> Kernel:
    """Which kernel multiplies quantised weights that stay packed.

    values:     the kind of the weights' values
    shape:      (n, k) of the weights
    dtype:      of the input
    scales:     dtype of the weights' scales
    arch:       90 on Hopper where Gluon compiles the kernels written in it, else anything else

    Float8 weights take the Hopper kernel for one token only: for 16 tokens, in blocks, it took 64.2, 60.0 and 19.3 us for
    28672 x 4096, 4096 x 14336 and 6144 x 4096 on one H200, and the portable kernel 57.4, 34.2 and 15.3.
    """
    n, k = shape
    if arch != 90 or dtype not in (torch.float16, torch.bfloat16) or values == "float4" or n * k >= 4 * _MOST_WORDS:
        return "portable"
    # a part of a block of columns has one group
    whole = 256 if values == "int4" else 128
    if not (group_size >= k or group_size % whole == 0 or (values == "int4" and group_size in (32, 64, 128))):
        return "portable"
    if values == "float8":
        return "few" if num_tokens == 1 and k % 128 == 0 and k <= _FEW_COLUMNS else "portable"
    if num_tokens <= FEW_TOKENS:
        return "few" if k <= _FEW_COLUMNS else "portable"
    # a scale is rounded to the input's dtype, which only float16 may not represent
    return "wgmma" if k % 8 == 0 and (dtype == torch.bfloat16 or scales == dtype) else "portable"


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def explain(is_packed: bool, by_row: bool, dtype: torch.dtype, device: str, arch: int) -> str:
    """Who computes products with such a weight on a device, by the number of tokens. The arguments are those of
    `choose`."""
    dequantized = "PyTorch with dequantised weights"
    if device != "cuda" or not (is_packed or converts_float8(arch)):
        return dequantized
    if choose(is_packed, by_row, 2, dtype, arch) == "scaled_mm":
        return "triton for one token, torch._scaled_mm for more"
    return f"triton for few tokens, {dequantized} for more"


def explain_experts(device: str) -> str:
    """Who computes experts with quantised weights on a device."""
    return "triton" if device == "cuda" else "PyTorch with dequantised weights"
