"""Which way a product with a quantised weight is computed.

    kernel_of("int4", (4096, 4096), 128, 8, torch.bfloat16, torch.bfloat16, arch=90)         # "wgmma"
    choose(is_packed=True, by_row=False, num_tokens=8, dtype=torch.bfloat16, arch=80)        # "kernel"
    explain(is_packed=True, by_row=False, dtype=torch.bfloat16, device="cuda", arch=90)      # for people

Few tokens take a kernel that unpacks weights in registers; Hopper has kernels for itself. Many tokens take the unpacked matrix
and PyTorch's product, because unpacking once is then cheap beside the product. Float8 weights with a scale for each row are
multiplied with activations that are rounded to float8 as well, from 2 tokens on, on GPUs where `torch._scaled_mm` does that; on
Hopper a kernel takes its place for few tokens. Only input in bfloat16 is rounded. The matrices of experts have a function here
too. This module imports no Triton, so that `fa-serve info` runs anywhere. Left out: the products (product.py,
experts/kernel.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fa_serve.ops.products.quantised.weight import Values

Way = Literal["kernel", "scaled_mm", "dequantized"]
ExpertsWay = Literal["portable", "wgmma", "matrix", "dequantized"]
Kernel = Literal["portable", "gemv", "wgmma", "grouped"]
"""Which kernel unpacks weights in registers: the portable ones (unpack.py), or those for Hopper; "grouped" is that of
experts (experts/quantised.py)."""

SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""


KERNEL_TOKENS = 128
"""The most tokens that the portable kernel multiplies with packed weights, and `wgmma`. With more the matrix is unpacked first,
unless "grouped" serves.

In us on one H200, by the portable kernel and with the unpacked matrix. 4-bit weights, 128 tokens: 6144 x 4096 36.8, 48.8;
28672 x 4096 119.7, 156.4; 4096 x 14336 76.2, 83.6. Float8 weights in blocks: 42.4, 41.4; 138.9, 188.5; 80.7, 91.4.
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
"""Dtypes of inputs that the kernels for Hopper multiply; "grouped" multiplies bfloat16 only."""
SCALED_WGMMA_TOKENS = 128
"""The most tokens that the kernel for Hopper multiplies in float8 with weights in float8 that have a scale for each row. With
more, `torch._scaled_mm` does. `scaled_wgmma_kernel.scaled_tile` has times of both."""
GROUPED_TOKENS = 512
"""The most tokens that the Hopper kernel of experts multiplies with a dense weight, as if it were one expert."""
_GROUPED_ROWS = 4096  # with fewer, most multiprocessors would have no tile, and none were measured
_GEMV_COLUMNS = 32768  # the token is kept in shared memory
_MOST_WEIGHTS = {"int4": 1 << 33, "float4": 1 << 33, "float8": 1 << 31}  # words and bytes are counted in 32 bits
_MOST_VALUES = 1 << 31  # of an expert, whose offsets are counted in 32 bits
_MOST_ROWS = 1 << 31  # of all experts, which the copy engine counts in 32 bits


def kernel_of(
    values: Values, shape: tuple[int, int], group_size: int, num_tokens: int, dtype: torch.dtype, scales: torch.dtype, arch: int
) -> Kernel:
    """Which kernel multiplies quantised weights that stay packed.

    values:     the kind of the weights' values
    shape:      (n, k) of the weights
    dtype:      of the input
    scales:     dtype of the weights' scales
    arch:       90 on Hopper where Gluon compiles the kernels written in it, else anything else

    In us on one H100, by the Hopper kernel and by the portable one, in CUDA graphs with weights outside of the L2 cache, for
    28672 x 4096, 4096 x 14336, 6144 x 4096 and 4096 x 4096. 4-bit weights in groups of 128:
    one token   26.7, 35.0; 18.2, 20.1;  7.9, 10.2;  6.3,  7.1; by `wgmma` 35.6, 19.4, 11.6, 9.0
    16 tokens   26.3, 55.4; 17.5, 29.1;  8.7, 15.2;  6.6, 11.7
    64 tokens   37.8, 75.1; 22.1, 45.8; 12.9, 19.8;  8.9, 14.6
    128 tokens  78.5, 114;  37.0, 75.2; 22.5, 31.6; 13.9, 25.1; by `grouped` 66.8, 87.0, 24.8, 24.2
    256 tokens by `grouped`, with the unpacked matrix and in bfloat16: 115, 212, 103; 90.8, 114, 56.9; 31.9, 46.4, 24.3; 24.0,
    31.5, 19.6. 512 tokens: 232, 265, 161; 106, 130, 77.8; 61.0, 56.7, 36.3; 32.1, 37.3, 25.2
    Float8 weights that have a scale for each row; several tokens are rounded to float8 as well, unless the input is float16:
    one token   45.9, 55.5; 27.2, 45.3; 12.8, 15.6;  8.3, 14.4
    Float8 weights in blocks; one token by `wgmma` and the portable kernel, before `gemv` took such weights:
    one token   58.3, 57.1; 28.7, 41.4; 16.7, 14.7; 11.6, 13.6
    16 tokens   50.7, 60.2; 30.2, 35.2; 14.6, 16.5; 11.4, 12.1
    64 tokens   53.0, 75.0; 32.9, 48.8; 16.7, 25.7; 11.0, 16.9
    128 tokens  81.9, 135;  42.6, 74.5; 22.6, 40.9; 15.3, 27.0
    256 tokens by `grouped` and with the unpacked matrix: 135, 234; 97.3, 125; 37.4, 52.2; 29.2, 35.1
    """
    n, k = shape
    if arch != 90 or dtype not in HALVES or n * k >= _MOST_WEIGHTS[values]:
        return "portable"
    if num_tokens == 1 and k <= _GEMV_COLUMNS:
        if values == "float8":
            return "gemv" if k % 128 == 0 and (group_size >= k or group_size % 128 == 0) else "portable"
        # a part of a block of 256 columns has one group
        grouped = group_size >= k or group_size % 256 == 0 or group_size in (32, 64, 128)
        return "gemv" if values == "int4" and grouped else "portable"
    by_row = values == "float8" and group_size >= k
    # these are multiplied with rounded inputs, by torch._scaled_mm or in its place; it takes multiples of 16 only
    scaled_mm = by_row and dtype == torch.bfloat16 and n % 16 == 0
    # a part of 128 columns has one group, and rows are copied 16 bytes at a time
    grouped = group_size >= k or group_size % 128 == 0 or group_size in (32, 64)
    whole = k % (16 if values == "float8" else 8) == 0
    # scales of groups are rounded to the input's dtype, and float16 may not hold scales of another one
    scales_fit = dtype == torch.bfloat16 or scales == dtype or by_row
    if num_tokens < 2 or values == "float4" or scaled_mm or not (grouped and whole and scales_fit):
        return "portable"
    if num_tokens <= KERNEL_TOKENS:
        return "wgmma"
    fits = dtype == torch.bfloat16 and not by_row and num_tokens <= GROUPED_TOKENS and n * k < _MOST_VALUES
    return "grouped" if fits and n >= _GROUPED_ROWS else "portable"


def takes_scaled_wgmma(shape: Sequence[int], num_tokens: int, arch: int) -> bool:
    """Whether the kernel for Hopper multiplies tokens in float8 with float8 weights that have a scale for each row.

    shape: (n, k) of the weights, k a multiple of 16
    arch:  90 on Hopper where Gluon compiles the kernels written in it, else anything else
    """
    n, k = shape
    return arch == 90 and 2 <= num_tokens <= SCALED_WGMMA_TOKENS and n * k < _MOST_WEIGHTS["float8"]


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


MATRIX_PAIRS = 64
"""The fewest pairs for each expert, on average, that the kernel of Hopper for matrices of experts multiplies.

A layer on one H200 takes, in us by the portable kernel and by this one, 396 and 344 with 64 pairs for each of 128 experts, and
456 and 323 with 96 for each of 64. Fewer are not measured. Its tiles have 128 pairs.
"""


def choose_matrices(
    shape: Sequence[int], strides: Sequence[int], pairs_per_expert: float, dtype: torch.dtype, arch: int
) -> ExpertsWay:
    """How a product of many pairs with the matrices of experts is computed on a GPU.

    shape, strides:   of all matrices, (num_experts, n, k)
    pairs_per_expert: the average; 0 asks for the way of deterministic mode
    dtype:            of the input and of the matrices
    arch:             90 on Hopper where Gluon compiles the kernels written in it, else anything else

    The kernel for Hopper copies 64 columns at a time, and 8 numbers of rows or columns that are contiguous in all matrices.
    """
    if arch != 90 or dtype != torch.bfloat16 or pairs_per_expert < MATRIX_PAIRS:
        return "portable"
    experts, n, k = shape
    contiguous = tuple(strides) in ((n * k, k, 1), (n * k, 1, n))
    whole = k % 64 == 0 and n % 16 == 0
    return "matrix" if contiguous and whole and experts * max(n, k) < _MOST_ROWS else "portable"


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def explain(is_packed: bool, by_row: bool, dtype: torch.dtype, device: str, arch: int) -> str:
    """Who computes products with such a weight on a device, by the number of tokens. The arguments are those of
    `choose`. Kernels for Hopper are named for the usual sizes of groups and the releases of Triton that have them."""
    dequantized = "PyTorch with dequantised weights"
    if device != "cuda" or not (is_packed or converts_float8(arch)):
        return dequantized
    # float16 may not hold the float32 scales of float8 weights in blocks
    has_kernels = dtype == torch.bfloat16 or (dtype == torch.float16 and (is_packed or by_row))
    hopper = " (kernels for Hopper)" if arch == 90 and has_kernels else ""
    if choose(is_packed, by_row, KERNEL_TOKENS, dtype, arch) == "scaled_mm":
        few = f"up to {SCALED_WGMMA_TOKENS} tokens" if arch == 90 else "one token"
        return f"triton for {few}{hopper}, torch._scaled_mm for more"
    most = GROUPED_TOKENS if arch == 90 and dtype == torch.bfloat16 else KERNEL_TOKENS
    return f"triton for up to {most} tokens{hopper}, {dequantized} for more"


def explain_experts(device: str) -> str:
    """Who computes experts with quantised weights on a device."""
    return "triton" if device == "cuda" else "PyTorch with dequantised weights"
