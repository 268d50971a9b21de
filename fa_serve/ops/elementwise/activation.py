"""The kernel of gated activations, and the activations that it shares with `products/row.py`.

On Hopper and later GPUs it is launched programmatically, see `primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS

ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""The constant KIND of the kernels for each of `fa_serve.ops.ACTIVATIONS`."""
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """SiLU, GELU in its tanh approximation, or GELU by erf (Hendrycks, Gimpel 2016, arXiv:1606.08415)."""
    if KIND == 0:
        y = x * sigmoid(x)
    elif KIND == 1:
        # (1 + tanh(u)) / 2 = sigmoid(2u)
        y = x * sigmoid(2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    return y


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
