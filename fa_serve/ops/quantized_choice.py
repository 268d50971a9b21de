"""Which way a product with a quantised weight is computed.

    choose(is_packed=True, by_row=False, num_tokens=8, dtype=torch.bfloat16, arch=90)        # "kernel"
    explain(is_packed=True, by_row=False, dtype=torch.bfloat16, device="cuda", arch=90)      # for people

A few tokens take the kernel that unpacks weights in registers. Many tokens take the unpacked matrix and PyTorch's product,
because unpacking once is then cheap beside the product. Other kernels serve some numbers of few tokens on Hopper. Float8
weights with a scale for each row are multiplied with activations that are rounded to float8 as well, on GPUs where
`torch._scaled_mm` does that. Input in float32 is never rounded. This module imports no Triton, so that `fa-serve info` runs
anywhere. Left out: the products (quantized_product.py).
"""

from __future__ import annotations

from typing import Literal

import torch

from fa_serve.ops.quantized_weight import Values

Way = Literal["kernel", "scaled_mm", "dequantized"]
ExpertsWay = Literal["portable", "wgmma", "dequantized"]
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


HALVES = (torch.float16, torch.bfloat16)
"""Dtypes of inputs that the kernels for Hopper multiply."""
FEW_TOKENS = 8
"""The most tokens that the Hopper kernel for few tokens multiplies with 4-bit weights."""
WGMMA_TOKENS = range(33, 65)
"""The numbers of tokens that the Hopper kernel with `wgmma` multiplies with 4-bit weights."""
_FEW_COLUMNS = 32768  # one token is kept in shared memory
_MOST_WEIGHTS = 1 << 33  # words are counted in 32 bits
_MOST_VALUES = 1 << 31  # of an expert, whose offsets are counted in 32 bits


def kernel_of(
    values: Values, shape: tuple[int, int], group_size: int, num_tokens: int, dtype: torch.dtype, scales: torch.dtype, arch: int
) -> Kernel:
    """Which kernel multiplies quantised weights that stay packed.

    values:     the kind of the weights' values
    shape:      (n, k) of the weights
    dtype:      of the input
    scales:     dtype of the weights' scales
    arch:       90 on Hopper where Gluon compiles the kernels written in it, else anything else

    In us on one H200, by the Hopper kernel and by the portable one, with weights outside of the L2 cache, for 28672 x 4096,
    4096 x 14336, 6144 x 4096 and 4096 x 4096. 4-bit weights in groups of 128:
    one token   27.0, 40.9; 17.7, 29.4;  7.9, 10.0;  7.6,  9.1; the first with a norm and a gate 29.8, 54.8
    8 tokens    38.5, 58.7; 31.9, 31.6; 15.1, 15.6;  9.1, 12.5; the first with 16 tokens 60.0, 60.0
    48 tokens   58.7, 72.9; 32.8, 39.9; 20.1, 19.2; 13.4, 14.3
    64 tokens   55.6, 75.8; 26.0, 45.2; 20.7, 20.1; 10.6, 14.8
    Float8 weights that have a scale for each row, one token: 39.5, 56.6; 24.2, 44.1; 12.4, 16.1. Float8 weights in blocks have
    not been compared for one token, and lose with 16, in an earlier form of the kernel: 64.2, 57.4; 60.0, 34.2; 19.3, 15.3.
    """
    n, k = shape
    if arch != 90 or dtype not in HALVES or n * k >= _MOST_WEIGHTS:
        return "portable"
    if values == "float8":
        return "few" if num_tokens == 1 and group_size >= k and k % 128 == 0 and k <= _FEW_COLUMNS else "portable"
    # a part of a block of 256 columns has one group
    if values != "int4" or not (group_size >= k or group_size % 256 == 0 or group_size in (32, 64, 128)):
        return "portable"
    if 0 < num_tokens <= FEW_TOKENS:
        return "few" if k <= _FEW_COLUMNS else "portable"
    # scales are rounded to the input's dtype, and float16 may not hold scales of another one
    exact = dtype == torch.bfloat16 or scales == dtype
    return "wgmma" if num_tokens in WGMMA_TOKENS and k % 8 == 0 and exact else "portable"


DEQUANTIZED_PAIRS = {"wgmma": 512, "portable": 192}
"""The most pairs for each expert that each kernel multiplies with quantised weights. With more, some experts at a time are
dequantised and multiplied as matrices.

Microseconds of a layer of gpt-oss in mxfp4 on one H200. Straight lines between the last two columns cross at 515 and 171:

    pairs for each expert   2     8     32    128    1,024
    wgmma                   236   262   470   976    4,379
    portable                309   350   459   1,114  7,334
    dequantised             912   957   1,002 1,282  3,980
"""


def choose_experts(
    values: Values, shape: tuple[int, int], group_size: int, pairs_per_expert: float, dtype: torch.dtype, arch: int
) -> ExpertsWay:
    """How a product of many pairs with quantised experts is computed on a GPU.

    values:           the kind of the weights' values
    shape:            (n, k) of one expert
    pairs_per_expert: the average; 0 asks for the way of deterministic mode
    dtype:            of the input
    arch:             90 on Hopper where Gluon compiles the kernels written in it, else anything else

    The kernel for Hopper takes 3.3 to 5.0 instructions for a weight and tile of up to 128 pairs, and the portable one 5.0 to
    8.9 for a tile of up to 64.
    """
    if pairs_per_expert <= 0:
        return "portable"
    n, k = shape
    grouped = group_size >= k or group_size % 256 == 0 or group_size in (32, 64, 128)
    whole = k % (16 if values == "float8" else 8) == 0
    on_hopper = arch == 90 and dtype == torch.bfloat16 and grouped and whole and n * k < _MOST_VALUES
    kernel: ExpertsWay = "wgmma" if on_hopper else "portable"
    # a product in float32 is not one of tensor cores, and takes longer than unpacking
    return "dequantized" if pairs_per_expert > DEQUANTIZED_PAIRS[kernel] and dtype in HALVES else kernel


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def explain(is_packed: bool, by_row: bool, dtype: torch.dtype, device: str, arch: int) -> str:
    """Who computes products with such a weight on a device, by the number of tokens. The arguments are those of
    `choose`. Kernels for Hopper are named for the usual sizes of groups and the releases of Triton that have them."""
    dequantized = "PyTorch with dequantised weights"
    if device != "cuda" or not (is_packed or converts_float8(arch)):
        return dequantized
    if choose(is_packed, by_row, 2, dtype, arch) == "scaled_mm":
        hopper = " (kernel for Hopper)" if arch == 90 else ""
        return f"triton for one token{hopper}, torch._scaled_mm for more"
    hopper = ""
    if is_packed and arch == 90 and dtype in HALVES:
        hopper = f" (kernels for Hopper: up to {FEW_TOKENS}, and {WGMMA_TOKENS[0]} to {WGMMA_TOKENS[-1]})"
    return f"triton for few tokens{hopper}, {dequantized} for more"


def explain_experts(device: str) -> str:
    """Who computes experts with quantised weights on a device."""
    return "triton" if device == "cuda" else "PyTorch with dequantised weights"
