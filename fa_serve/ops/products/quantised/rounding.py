"""Rows of activations rounded to float8, after their norm or gate, for products with float8 weights.

    rounded, scales = launch_quantize_rows(x, norm, None)
    rounded, scales = launch_quantize_rows(gate_up, None, None, "silu")

What multiplies both is `torch._scaled_mm` (product.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.quantised.weight import FLOAT8


@triton.jit
def _quantize_rows(
    x_ptr,
    norm_ptr,
    scale_ptr,
    out_ptr,
    scales_ptr,
    eps,
    offset,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program rounds a row to float8 with the given scale, or with the one that makes its largest number 448.

    The row is normalised before, or with a KIND it is activate(x[:WIDTH]) * x[WIDTH:], rounded to x's dtype.
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < WIDTH
    stride: tl.constexpr = WIDTH if KIND is None else 2 * WIDTH
    x = tl.load(x_ptr + row * stride + cols, mask=keep, other=0.0).to(tl.float32)
    if KIND is not None:
        up = tl.load(x_ptr + row * stride + WIDTH + cols, mask=keep, other=0.0).to(tl.float32)
        x = (activate(x, KIND) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    if norm_ptr is not None:
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * (tl.load(norm_ptr + cols, mask=keep, other=0.0).to(tl.float32) + offset)
    # the least normal number keeps a row of zeros from dividing by zero
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1.1754943508222875e-38)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    y = tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(scales_ptr + row, scale)


def launch_quantize_rows(
    x: Tensor, norm: Norm | None, input_scale: Tensor | None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Round rows to float8, after an RMS norm if there is one. One launch.

    x:           (m, width), contiguous; (m, 2 * width) with `activation`
    input_scale: (1,) float32, the scale of every row; None measures each row
    activation:  one of `fa_serve.ops.ACTIVATIONS`: what is rounded is activation(x[:, :width]) * x[:, width:]

    Returns float8_e4m3fn (m, width) and scales (m, 1) float32.
    """
    weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    m, width = x.shape
    width = width if activation is None else width // 2
    out = torch.empty(m, width, dtype=FLOAT8, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    dtype = None if weight is None else weight.dtype
    key = ("quantize_rows", x.shape, x.dtype, x.get_device(), dtype, eps, offset, input_scale is None, activation)
    run = PLANS.get(key)
    if run is None:
        if m == 0:
            return out, scales
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        block = power_of_2(width)
        options = launch_options(pdl, min(16, max(1, block // 512)))
        kind = None if activation is None else ACTIVATION_KINDS[activation]
        launch = Launch(_quantize_rows, m, varying=(eps, offset), fixed=(width, kind, block, pdl), options=options)
        run = PLANS.add(key, launch)
    run((x, weight, input_scale, out, scales))
    return out, scales
