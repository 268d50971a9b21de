"""The kernels of gates around linear attention. One normalises heads and multiplies them by a gate, and one computes the gates
of the delta rule.

They compute in float32 and round once. On Hopper and later GPUs they are launched programmatically, see
`primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.activation import sigmoid
from fa_serve.ops.linear_attention.primitives import time_step
from fa_serve.ops.ops_backend import GateActivation, Norm

BLOCK_HEADS = 8
"""Heads of a program of `_gate_heads`."""
BLOCK_GATES = 256
"""Gates of a program of `_delta_gates`."""


@triton.jit(do_not_specialize=["total", "blocks"])
def _gate_heads(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    total,
    blocks,
    eps,
    offset,
    stride_gate,
    stride_gate_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_HEADS heads of one token; `blocks` programs share a token. x and out are contiguous."""
    wait_for_previous_kernel(PDL)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    heads = tl.program_id(0) % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    cols = tl.arange(0, BLOCK)
    keep = (heads < HEADS)[:, None] & (cols < DIM)[None, :]
    place = token * (HEADS * DIM) + heads[:, None] * DIM + cols[None, :]
    x = tl.load(x_ptr + place, mask=keep, other=0.0).to(tl.float32)
    gate_place = token * stride_gate + heads[:, None] * stride_gate_head + cols[None, :]
    gate = tl.load(gate_ptr + gate_place, mask=keep, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < DIM, other=0.0).to(tl.float32) + offset
        x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * weight[None, :]
    y = x * sigmoid(gate)
    if SILU:
        y *= gate
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def launch_gate_heads(x: Tensor, gate: Tensor, activation: GateActivation, norm: Norm | None) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.gate_heads`. One launch."""
    weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    x = x.contiguous()
    gate = with_unit_stride(gate)
    out = torch.empty_like(x)
    key = (
        "gate_heads",
        x.shape,
        gate.stride(),
        (x.dtype, gate.dtype, None if weight is None else weight.dtype),
        (activation, eps, offset),
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        if len(x) == 0:
            return out
        run = PLANS.add(key, plan_gate_heads(x, gate, activation, eps, offset))
    run((x, gate, weight, out))
    return out


def plan_gate_heads(x: Tensor, gate: Tensor, activation: GateActivation, eps: float, offset: float) -> Launch:
    """The launch on (x, gate, weight, out) of these shapes and strides."""
    total, heads, dim = x.shape
    blocks = -(-heads // BLOCK_HEADS)
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    return Launch(
        _gate_heads,
        total * blocks,
        varying=(total, blocks, eps, offset),
        strides=(gate.stride(0), gate.stride(1)),
        fixed=(heads, dim, activation == "silu", BLOCK_HEADS, power_of_2(dim), pdl),
        options=launch_options(pdl, 4),
    )


@triton.jit
def delta_rule_gates(a_ptr, b_ptr, a_log_ptr, bias_ptr, head, keep):
    """(g, beta) of heads `head`, float32. a_ptr, b_ptr: pointers to the numbers of these heads"""
    a = tl.load(a_ptr, mask=keep, other=0.0)
    b = tl.load(b_ptr, mask=keep, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=keep, other=0.0).to(tl.float32))
    bias = tl.load(bias_ptr + head, mask=keep, other=0.0).to(tl.float32)
    return -rate * time_step(a, bias, 0.0, float("inf"), True), sigmoid(b)


@triton.jit(do_not_specialize=["total"])
def _delta_gates(
    a_ptr,
    b_ptr,
    a_log_ptr,
    bias_ptr,
    out_ptr,
    total,
    stride_a,
    stride_b,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out is (2, total, HEADS) float32: the log gates, then beta."""
    wait_for_previous_kernel(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = total.to(tl.int64) * HEADS
    keep = place < count
    row = place // HEADS
    head = place % HEADS
    a_ptrs = a_ptr + row * stride_a + head
    g, beta = delta_rule_gates(a_ptrs, b_ptr + row * stride_b + head, a_log_ptr, bias_ptr, head, keep)
    tl.store(out_ptr + place, g, mask=keep)
    tl.store(out_ptr + count + place, beta, mask=keep)


def launch_delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and result are those of `fa_serve.ops.delta_gates`. One launch."""
    a = with_unit_stride(a)
    b = with_unit_stride(b)
    total, heads = a.shape
    out = torch.empty(2, total, heads, dtype=torch.float32, device=a.device)
    tensors = (a, b, a_log, dt_bias, out)
    key = ("delta_gates", a.shape, a.stride(0), b.stride(0), *[x.dtype for x in tensors], a.get_device())
    run = PLANS.get(key)
    if run is None:
        if total == 0:
            return out[0], out[1]
        pdl = spec.has_programmatic_launch(spec.arch_of(a.device))
        launch = Launch(
            _delta_gates,
            -(-total * heads // BLOCK_GATES),
            varying=(total,),
            strides=(a.stride(0), b.stride(0)),
            fixed=(heads, BLOCK_GATES, pdl),
            options=launch_options(pdl, 4),
        )
        run = PLANS.add(key, launch)
    run(tensors)
    return out[0], out[1]
