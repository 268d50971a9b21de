"""The kernels of activations, gated and plain, and the formulas that they share with `products/row.py`.

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

ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""The constant KIND of the kernels for each of `fa_serve.ops.ACTIVATIONS`."""
PLAIN_BLOCK = 2048
"""Numbers that a program without a gate computes: two loads of 16 bytes for each thread."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_TANH_GELU_1 = tl.constexpr(2.302208198188438)
"""2 * sqrt(2 / pi) * log2(e)"""
_TANH_GELU_3 = tl.constexpr(0.10294323957400101)
"""0.044715 times the same."""


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """SiLU, GELU in its tanh approximation, or GELU by erf (Hendrycks, Gimpel 2016, arXiv:1606.08415).

    A number takes about 12 instructions of a GPU. More would take longer than reading and writing it: with PyTorch's formula
    for erf, which takes 37, gated rows of ModernBERT were computed at 2.7 TB/s by an H200 that copies at 4.4.
    """
    if KIND == 0:
        y = _times_sigmoid(x, _LOG2_E * x)
    elif KIND == 1:
        # (1 + tanh(u)) / 2 = sigmoid(2u)
        y = _times_sigmoid(x, x * (_TANH_GELU_1 + _TANH_GELU_3 * (x * x)))
    else:
        y = _gelu(x)
    return y


@triton.jit
def _times_sigmoid(x, z):
    """x * sigmoid(z / log2(e)). The power is limited to what float32 can hold, so that nothing overflows."""
    return x / (1.0 + tl.exp2(tl.minimum(-z, 126.0)))


@triton.jit
def _gelu(x):
    """x * P(X <= x) of a normal variable X, which is max(x, 0) - |x| * P(X > |x|).

    The polynomial is log2(P(X > a)) for a from 0 to 6, fitted so that the largest error of a * P is least: 9e-8. Its leading
    coefficient is negative, so P goes on to fall beyond 6. At 16 it is 0, and infinity times 0 is avoided.
    """
    a = tl.minimum(tl.abs(x), 16.0)
    p = -4.5689634744994047e-07 * a + 7.4501119645521035e-06
    p = p * a - 1.349660542613859e-05
    p = p * a - 0.0006208069576077006
    p = p * a + 0.00781445717243108
    p = p * a - 0.053134676440266225
    p = p * a - 0.4589340394217108
    p = p * a - 1.1511542146433997
    p = p * a - 0.9999977429999902
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * tl.exp2(p)


@triton.jit(do_not_specialize=["blocks"])
def _act_and_mul(
    x_ptr,
    out_ptr,
    blocks,
    stride_x,
    stride_out,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK columns of one row; `blocks` programs share a row."""
    wait_for_previous_kernel(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    keep = cols < WIDTH
    gate = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + WIDTH + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, (activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _act(x_ptr, out_ptr, total, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program computes BLOCK of the `total` numbers, which lie end to end."""
    wait_for_previous_kernel(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = index < total
    x = tl.load(x_ptr + index, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, activate(x, KIND).to(out_ptr.dtype.element_ty), mask=keep)


def launch_act(x: Tensor, activation: str) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.act`. One launch."""
    x = x.contiguous()
    out = torch.empty_like(x)
    key = ("act", x.shape, x.dtype, activation, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.numel() == 0:
            return out
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        launch = Launch(
            _act,
            -(-x.numel() // PLAIN_BLOCK),
            varying=(x.numel(),),
            fixed=(ACTIVATION_KINDS[activation], PLAIN_BLOCK, pdl),
            options=launch_options(pdl, 4),
        )
        run = PLANS.add(key, launch)
    run((x, out))
    return out


def launch_act_and_mul(x: Tensor, activation: str) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.act_and_mul`. One launch."""
    total, width = x.shape
    out = x.new_empty(total, width // 2)
    key = ("act_and_mul", x.shape, x.stride(0), x.dtype, activation, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if total == 0:
            return out
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        run = PLANS.add(key, plan_act_and_mul(total, width // 2, x.stride(0), activation, pdl))
    run((x, out))
    return out


def plan_act_and_mul(total: int, width: int, stride: int, activation: str, pdl: bool) -> Launch:
    """The launch on (x, out), which are (total, 2 * width) and (total, width). stride: of x's rows"""
    block = min(1024, power_of_2(width))
    blocks = -(-width // block)
    return Launch(
        _act_and_mul,
        total * blocks,
        varying=(blocks,),
        fixed=(stride, width, width, ACTIVATION_KINDS[activation], block, pdl),
        options=launch_options(pdl, 4),
    )
