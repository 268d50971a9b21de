"""The product with a quantised weight on a GPU, in the way and by the kernel that quantized_choice.py chooses.

    y = quantized_row(x, weight, bias, norm, activation, residual, alpha)          # one token
    y = quantized_product(x, weight, bias, norm, residual, alpha)                  # several tokens

Left out: the kernels (quantized_kernel.py, and for Hopper quantized_few_kernel.py and quantized_wgmma_kernel.py).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.hopper import RELEASES
from fa_serve.backends.launch import multiprocessors
from fa_serve.ops.norm_kernel import launch_rms_norm
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.quantized_choice import Kernel, choose, converts_float8, kernel_of
from fa_serve.ops.quantized_kernel import launch_dequantize, launch_quantized_linear, launch_quantized_row
from fa_serve.ops.quantized_weight import QuantizedWeight
from fa_serve.ops.rounding_kernel import launch_quantize_rows
from fa_serve.ops.torch_ops import product

_COMPILES_GLUON = triton.__version__.startswith(RELEASES) and not triton.knobs.runtime.interpret
"""Whether the installed release of Triton has the Gluon that the kernels for Hopper are written in."""


def has_kernels(weight: QuantizedWeight) -> bool:
    """Whether Triton reads this weight on its device."""
    return weight.is_packed or converts_float8(spec.arch_of(weight.device))


def quantized_product(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Norm | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """The product of `fa_serve.ops.linear` without an activation, for several tokens on a GPU.

    x, residual: contiguous
    """
    n, k = weight.shape
    # torch._scaled_mm takes sizes that are multiples of 16 only
    by_row = weight.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0
    way = choose(weight.is_packed, by_row, x.shape[0], x.dtype, spec.arch_of(x.device))
    if way == "scaled_mm":
        return _scaled_mm(x, weight, bias, norm, residual, alpha)
    if norm is not None:
        x = launch_rms_norm(x, norm, None, None)
    if way == "kernel":
        return _packed_product(x, weight, bias, residual, alpha)
    return product(x, dequantize(weight, x.dtype), bias, residual, alpha)


def quantized_row(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """The product of `fa_serve.ops.linear` for one token on a GPU, with weights for which `has_kernels` is true. One launch."""
    launch = launch_quantized_row if _kernel(x, weight) == "portable" else _launch_few
    return launch(x, weight, bias, norm, activation, residual, alpha)


def _packed_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float) -> Tensor:
    """x @ weight.T + bias, (m, n), with weights that are unpacked in registers."""
    kernel = _kernel(x, weight)
    if kernel == "few":
        return _launch_few(x, weight, bias, None, None, residual, alpha)
    if kernel == "wgmma":
        from fa_serve.ops.quantized_wgmma_kernel import launch_quantized_wgmma, wgmma_tile

        return launch_quantized_wgmma(x, weight, bias, residual, alpha, wgmma_tile(multiprocessors(x.device, 1), *weight.shape))
    return launch_quantized_linear(x, weight, bias, residual, alpha)


def _launch_few(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    # Gluon's names change with each release of Triton, so these modules are imported where the release is known
    from fa_serve.ops.quantized_few_kernel import few_tile, launch_quantized_few

    tile = few_tile(multiprocessors(x.device, 1), x.shape[0], weight.shape[0], weight.values)
    return launch_quantized_few(x, weight, bias, norm, activation, residual, alpha, tile)


def _kernel(x: Tensor, weight: QuantizedWeight) -> Kernel:
    """Which kernel multiplies x with a weight that stays packed."""
    # the kernels for Hopper copy 16 bytes of a weight at a time
    arch = spec.arch_of(x.device) if _COMPILES_GLUON and not weight.data.data_ptr() % 16 else 0
    n, k = weight.shape
    return kernel_of(weight.values, (n, k), weight.group_size, x.shape[0], x.dtype, weight.scales.dtype, arch)


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
