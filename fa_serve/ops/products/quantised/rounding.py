"""Rows of activations rounded to float8, after their norm or gate, for products with float8 weights.

    round_rows = plan_rounding(product, details)
    rounded = round_rows(x, norm_weight, None)
    rounded = plan_rounding(product, activation="silu")(gate_up, None, None)

The product is then computed by `torch._scaled_mm` (pytorch.py), or by the Hopper kernel that replaces it (float8_wgmma.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import RoundedRows
from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.quantised.weight import FLOAT8

MAX_GATED = 16384
"""The widest rows that are gated and rounded in one launch, which holds a row in registers."""
_PLAIN = Details()


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
    """A program rounds a row to float8 with the given scale, or with the scale that makes its largest number 448.

    With a norm, the row is normalised first. With a KIND, the row is activate(x[:WIDTH]) * x[WIDTH:], rounded to x's dtype.
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


RoundRows = Callable[[Tensor, Tensor | None, Tensor | None], RoundedRows]
"""Rounds (x, the weight of the norm, a scale for all rows): x is (rows, width), or (rows, 2 * width) with an activation.

The norm's weight is None if there is no norm. The scale is (1,) float32; None measures each row.
"""


def plan_rounding(product: Product, details: Details = _PLAIN, activation: str | None = None) -> RoundRows:
    """Rounds the input of a product to float8, after an RMS norm if there is one. One launch.

    activation: one of `fa_serve.ops.ACTIVATIONS`: what is rounded is activation(x[:, :k]) * x[:, k:]
    """
    rows = product.tokens
    width = product.k
    dtype = product.dtype
    pdl = product.is_programmatic
    block = power_of_2(width)
    launch = Launch(
        _quantize_rows,
        rows,
        varying=(details.eps, details.offset),
        fixed=(width, None if activation is None else ACTIVATION_KINDS[activation], block, pdl),
        options=launch_options(pdl, min(16, max(1, block // 512))),
    )

    def round_rows(x: Tensor, norm_weight: Tensor | None, input_scale: Tensor | None) -> RoundedRows:
        out = torch.empty(rows, width, dtype=FLOAT8, device=x.device)
        scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        launch((x, norm_weight, input_scale, out, scales))
        return RoundedRows(out, scales, dtype)

    return round_rows
