"""Which way a product with a quantised weight is computed on a GPU, and that way.

    y = quantized_product(x, weight, bias, norm, residual, alpha)      # several tokens
    choose(weight.is_packed, ...)                                       # the choice alone, which `fa-serve info` shows

One token takes the kernel of one token, which the caller launches. Several tokens take the kernel that unpacks weights in
registers; many tokens take the unpacked matrix and PyTorch's product, because unpacking once is then cheap beside the product.
Float8 weights with a scale for each row are multiplied with activations that are rounded to float8 as well, on GPUs where
`torch._scaled_mm` does that. Input in float32 is never rounded. Left out: the kernels (quantized_kernel.py).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.ops.norm_kernel import launch_rms_norm
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.quantized_kernel import launch_dequantize, launch_quantize_rows, launch_quantized_linear
from fa_serve.ops.quantized_weight import QuantizedWeight
from fa_serve.ops.torch_ops import product

Way = Literal["kernel", "scaled_mm", "dequantized"]

MANY_TOKENS = 512
"""Above it the matrix is unpacked first. Writing and reading 16-bit weights takes about as long as 430 tokens' product takes on
an H200: 4.5 bytes a weight at 4.2 TB/s, against 2 operations a weight and token at 800 TFLOPS. Not measured yet."""
SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""


def choose(is_packed: bool, num_groups: int, num_tokens: int, dtype: torch.dtype, arch: int) -> Way:
    """How a product of several tokens with a quantised weight is computed on a GPU.

    num_groups: scales of each row
    dtype:      of the input
    arch:       10 * major + minor of an NVIDIA device, else 0
    """
    if not is_packed and not converts_float8(arch):
        return "dequantized"
    # PyTorch's product with a scale for each row writes bfloat16 only
    if not is_packed and num_groups == 1 and dtype == torch.bfloat16 and arch in SCALED_MM_ARCHS:
        return "scaled_mm"
    return "kernel" if num_tokens <= MANY_TOKENS else "dequantized"


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does."""
    return arch >= 89


def has_kernels(weight: QuantizedWeight) -> bool:
    """Whether Triton reads this weight on its device."""
    return weight.is_packed or converts_float8(spec.arch_of(weight.device))


def quantized_product(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """The product of `fa_serve.ops.linear` without an activation, for several tokens on a GPU.

    x, residual: contiguous
    """
    way = choose(weight.is_packed, weight.scales.shape[1], x.shape[0], x.dtype, spec.arch_of(x.device))
    if way == "scaled_mm":
        return _scaled_mm(x, weight, bias, norm, residual, alpha)
    if norm is not None:
        x = launch_rms_norm(x, norm, None, None)
    if way == "kernel":
        return launch_quantized_linear(x, weight, bias, residual, alpha)
    return product(x, dequantize(weight, x.dtype), bias, residual, alpha)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix of a weight on a GPU, (n, k): by a kernel, or by PyTorch where Triton cannot read float8."""
    return launch_dequantize(weight, dtype) if has_kernels(weight) else weight.dequantize(dtype)


def _scaled_mm(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """Round the input to float8, in one kernel with its norm, and multiply float8 numbers."""
    rounded, scales = launch_quantize_rows(x, norm, weight.input_scale)
    # without fast accumulation: tensor cores add float8 products in about 14 bits, and promoted sums keep float32's
    y = torch._scaled_mm(
        rounded, weight.data.t(), scales, weight.scales.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=False
    )
    return y if residual is None else residual.add_(y, alpha=alpha)
