"""The kernels of the RMS norm and of the layer norm: one program for each row.

On Hopper and later GPUs they are launched programmatically, see `primitives.wait_for_previous_kernel`.
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
from fa_serve.launching.sizes import norm_warps
from fa_serve.ops.ops_backend import LayerNorm, Norm


@triton.jit
def norm_factor(x, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row of WIDTH numbers in float32, behind which x has zeros.

    The order of the sum depends on the shape and the layout of x, so kernels with equal bits load equal tiles (`norm_warps`).
    """
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    eps,
    offset,
    stride_x,
    stride_r,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < WIDTH
    x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32) + offset
    y = x * norm_factor(x, eps, WIDTH) * weight
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row * stride_r + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, y.to(out_ptr.dtype.element_ty), mask=keep)


def launch_rms_norm(x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.rms_norm`. One launch."""
    weight, eps, offset = norm
    if out is None:
        out = torch.empty_like(x)
    key = (
        "rms_norm",
        x.shape,
        x.stride(0),
        None if residual is None else (residual.stride(0), residual.dtype),
        out.stride(0),
        x.dtype,
        weight.dtype,
        out.dtype,
        eps,
        offset,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        if x.shape[0] == 0:
            return out
        run = PLANS.add(key, plan_rms_norm(x, residual, out, eps, offset))
    run((x, weight, residual, out))
    return out


def plan_rms_norm(x: Tensor, residual: Tensor | None, out: Tensor, eps: float, offset: float) -> Launch:
    """The launch on (x, weight, residual, out) of these shapes and strides."""
    total, width = x.shape
    block = power_of_2(width)
    stride_r = 0 if residual is None else residual.stride(0)
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    return Launch(
        _rms_norm,
        total,
        varying=(eps, offset),
        fixed=(x.stride(0), stride_r, out.stride(0), width, block, pdl),
        options=launch_options(pdl, norm_warps(block)),
    )


@triton.jit
def _layer_norm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    stride_x,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of all tensors but x are contiguous."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < WIDTH
    x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        place = residual_ptr + row * WIDTH + cols
        x += tl.load(place, mask=keep, other=0.0).to(tl.float32)
        if KEEP_SUM:
            tl.store(place, x.to(residual_ptr.dtype.element_ty), mask=keep)
    x = tl.where(keep, x - tl.sum(x, 0) / WIDTH, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y *= tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask=keep)


def launch_layer_norm(x: Tensor, norm: LayerNorm, residual: Tensor | None, keep_sum: bool) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.layer_norm`. One launch."""
    weight, bias, eps = norm
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype)
    key = ("layer_norm", x.shape, x.stride(0), dtypes, eps, keep_sum, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.shape[0] == 0:
            return out
        run = PLANS.add(key, plan_layer_norm(x, eps, keep_sum))
    run((x, weight, bias, residual, out))
    return out


def plan_layer_norm(x: Tensor, eps: float, keep_sum: bool) -> Launch:
    """The launch on (x, weight, bias, residual, out) of these shapes and strides."""
    total, width = x.shape
    block = power_of_2(width)
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    return Launch(
        _layer_norm,
        total,
        varying=(eps,),
        fixed=(x.stride(0), width, block, keep_sum, pdl),
        options=launch_options(pdl, norm_warps(block)),
    )
