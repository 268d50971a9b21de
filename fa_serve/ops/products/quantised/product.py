"""The product with a quantised weight on a GPU, in the way and by the kernel that choice.py chooses.

    y = quantized_linear(x, weight, bias, norm, activation, residual, alpha)       # fa_serve.ops.linear
    matrix = dequantize(weight, torch.bfloat16)

Left out: the kernels (unpack.py, and for Hopper gemv.py, wgmma.py and
scaled_wgmma.py).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.hopper import RELEASES
from fa_serve.ops.elementwise.activation import launch_act_and_mul
from fa_serve.ops.elementwise.addition import launch_add
from fa_serve.ops.elementwise.norm import launch_rms_norm
from fa_serve.ops.ops_backend import Norm, RoundedRows, Weight
from fa_serve.ops.products.quantised.choice import Kernel, Way, choose, converts_float8, kernel_of, takes_scaled_wgmma
from fa_serve.ops.products.quantised.rounding import launch_quantize_rows
from fa_serve.ops.products.quantised.unpack import launch_dequantize, launch_quantized_linear, launch_quantized_row
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.torch_ops import product

MAX_GATED = 16384
"""The widest rows that are gated and rounded in one kernel, which holds a row in registers."""
_COMPILES_GLUON = triton.__version__.startswith(RELEASES) and not triton.knobs.runtime.interpret
"""Whether the installed release of Triton has the Gluon that the kernels for Hopper are written in."""


def quantized_linear(
    x: Tensor | RoundedRows,
    weight: QuantizedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    next_weight: Weight | None,
) -> Tensor | RoundedRows:
    """Arguments and result are those of `fa_serve.ops.linear`. One launch for one token, with weights that Triton reads."""
    if isinstance(x, RoundedRows):
        y = _scaled_mm(x, weight, bias, residual, alpha)
        return y if activation is None else gated(y, activation, next_weight)
    x = x.contiguous()
    kernel = _kernel(x, weight)
    if x.shape[0] == 1 and _has_kernels(weight):
        if kernel == "portable":
            return launch_quantized_row(x, weight, bias, norm, activation, residual, alpha)
        # Gluon's names change with each release of Triton, so modules that use them are imported where the release is known
        from fa_serve.ops.products.quantised.gemv import launch_quantized_gemv

        return launch_quantized_gemv(x, weight, bias, norm, activation, residual, alpha)
    way = _way(x, weight, kernel)
    if way == "scaled_mm":
        rounded = RoundedRows(*launch_quantize_rows(x, norm, weight.input_scale), x.dtype)
        y = _scaled_mm(rounded, weight, bias, residual, alpha)
    else:
        if norm is not None:
            x = launch_rms_norm(x, norm, None, None)
        if way == "kernel":
            y = _packed_product(kernel, x, weight, bias, residual, alpha)
        else:
            y = product(x, dequantize(weight, x.dtype), bias, residual, alpha)
    return y if activation is None else gated(y, activation, next_weight)


def gated(gate_up: Tensor, activation: str, next_weight: Weight | None) -> Tensor | RoundedRows:
    """activation(gate) * up, (m, k), rounded to float8 where the product with `next_weight` rounds its input. One launch.

    gate_up: (m, 2 * k), contiguous
    """
    m, width = gate_up.shape
    if m > 1 and isinstance(next_weight, QuantizedWeight) and width <= 2 * MAX_GATED:
        taken = gate_up[:, : width // 2]  # only its sizes count
        if _way(taken, next_weight, _kernel(taken, next_weight)) == "scaled_mm":
            return RoundedRows(*launch_quantize_rows(gate_up, None, next_weight.input_scale, activation), gate_up.dtype)
    return launch_act_and_mul(gate_up, activation)


def _way(x: Tensor, weight: QuantizedWeight, kernel: Kernel) -> Way:
    """How the product of several tokens with a quantised weight is computed."""
    if kernel != "portable":
        return "kernel"
    n, k = weight.shape
    # torch._scaled_mm takes sizes that are multiples of 16 only
    by_row = weight.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0
    return choose(weight.is_packed, by_row, x.shape[0], x.dtype, spec.arch_of(x.device))


def _packed_product(
    kernel: Kernel, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float
) -> Tensor:
    """x @ weight.T + bias, (m, n), of several tokens, by a kernel that unpacks weights in registers."""
    if kernel == "wgmma":
        from fa_serve.ops.products.quantised.wgmma import launch_quantized_wgmma

        return launch_quantized_wgmma(x, weight, bias, residual, alpha)
    if kernel == "grouped":
        from fa_serve.ops.experts.quantised import launch_as_one_expert

        return launch_as_one_expert(x, weight, bias, residual, alpha)
    return launch_quantized_linear(x, weight, bias, residual, alpha)


def _kernel(x: Tensor, weight: QuantizedWeight) -> Kernel:
    """Which kernel multiplies x with a weight that it unpacks in registers."""
    n, k = weight.shape
    arch = hopper_arch(x, weight)
    return kernel_of(weight.values, (n, k), weight.group_size, x.shape[0], x.dtype, weight.scales.dtype, arch)


def hopper_arch(x: Tensor, weight: Weight) -> int:
    """The architecture of x's device if kernels in Gluon can read the weight, else 0: they copy 16 bytes at a time."""
    return spec.arch_of(x.device) if _COMPILES_GLUON and not weight.data.data_ptr() % 16 else 0


def _has_kernels(weight: QuantizedWeight) -> bool:
    """Whether Triton reads this weight on its device."""
    return weight.is_packed or converts_float8(spec.arch_of(weight.device))


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix of a weight on a GPU, (n, k): by a kernel, or by PyTorch where Triton cannot read float8."""
    return launch_dequantize(weight, dtype) if _has_kernels(weight) else weight.dequantize(dtype)


def _scaled_mm(x: RoundedRows, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor | None, alpha: float) -> Tensor:
    """The product of float8 numbers, (m, n) in x's dtype. On Hopper few tokens take one launch, or two."""
    if takes_scaled_wgmma(weight.shape, x.data.shape[0], hopper_arch(x.data, weight)):
        from fa_serve.ops.products.quantised.scaled_wgmma import launch_scaled_wgmma

        return launch_scaled_wgmma(x, weight, bias, residual, alpha)
    # without fast accumulation: tensor cores add float8 products in about 14 bits, and promoted sums keep float32's
    y = torch._scaled_mm(
        x.data, weight.data.t(), x.scales, weight.scales.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=False
    )
    return y if residual is None else launch_add(residual, y, alpha)
