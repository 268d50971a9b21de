"""The kernels of the gradients of ops between products: one launch each, and a sum where a weight needs its gradient.

They compute in float32 and round once. The gradient of a weight is a sum over tokens. Each program adds the terms of its
tokens, in an order that depends only on the number of tokens, and PyTorch adds the sums of the programs, so gradients repeat in
every bit. torch_gradients.py computes the same in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate, sigmoid
from fa_serve.ops.ops_backend import Norm

GRADIENT_PROGRAMS = 512
"""The most programs of a kernel that adds the gradients of a weight: they fill a GPU, and leave few sums to PyTorch."""
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """The derivative of `activate`."""
    if KIND == 0:
        s = sigmoid(x)
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == 1:
        s = sigmoid(2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1.0 - s) * 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
    else:
        slope = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _INVERSE_SQRT_2_PI * tl.exp(-0.5 * x * x)
    return slope


@triton.jit(do_not_specialize=["blocks"])
def _gated_gradients(dy_ptr, x_ptr, dx_ptr, blocks, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK columns of one row, of a gate and of what the gate multiplies; `blocks` programs share a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    keep = cols < WIDTH
    place = row * (2 * WIDTH) + cols
    dy = tl.load(dy_ptr + row * WIDTH + cols, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + place, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + WIDTH, mask=keep, other=0.0).to(tl.float32)
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + place, (dy * up * _slope(gate, KIND)).to(dtype), mask=keep)
    tl.store(dx_ptr + place + WIDTH, (dy * activate(gate, KIND)).to(dtype), mask=keep)


def launch_act_and_mul_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """Arguments and result are those of `OpsBackend.act_and_mul_backward`. One launch."""
    dx = torch.empty_like(x)
    key = ("act_and_mul_backward", x.shape, dy.dtype, x.dtype, activation, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.shape[0] == 0:
            return dx
        width = x.shape[1] // 2
        block = min(1024, power_of_2(width))
        blocks = -(-width // block)
        launch = Launch(
            _gated_gradients,
            x.shape[0] * blocks,
            varying=(blocks,),
            fixed=(width, ACTIVATION_KINDS[activation], block),
            options=launch_options(False, 4),
        )
        run = PLANS.add(key, launch)
    run((dy, x, dx))
    return dx


@triton.jit(do_not_specialize=["total", "programs"])
def _rms_norm_gradients(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    sums_ptr,
    total,
    programs,
    eps,
    offset,
    stride_dy,
    stride_x,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p computes the rows p, p + programs, ... and writes row p of sums, (programs, WIDTH) float32, if it is given."""
    cols = tl.arange(0, BLOCK)
    keep = cols < WIDTH
    weight = tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32) + offset
    sums = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for step in tl.range(0, tl.cdiv(total - tl.program_id(0), programs)):
        row = first + step * programs
        x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=keep, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        normed = x * scale
        weighted = dy * weight
        dx = scale * (weighted - normed * (tl.sum(weighted * normed, 0) / WIDTH))
        tl.store(dx_ptr + row * WIDTH + cols, dx.to(dx_ptr.dtype.element_ty), mask=keep)
        if sums_ptr is not None:
            sums += dy * normed
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * WIDTH + cols, sums, mask=keep)


def launch_rms_norm_backward(dy: Tensor, x: Tensor, norm: Norm, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
    """Arguments and results are those of `OpsBackend.rms_norm_backward`. One launch, and a sum for the weight."""
    weight, eps, offset = norm
    total, width = x.shape
    dx = torch.empty(total, width, dtype=x.dtype, device=x.device)
    if total == 0:
        return dx, torch.zeros_like(weight) if needs_weight else None
    programs = min(total, GRADIENT_PROGRAMS)
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device) if needs_weight else None
    strides = (dy.stride(0), x.stride(0))
    key = ("rms_norm_backward", x.shape, strides, dy.dtype, x.dtype, weight.dtype, needs_weight, eps, offset, x.get_device())
    run = PLANS.get(key)
    if run is None:
        block = power_of_2(width)
        launch = Launch(
            _rms_norm_gradients,
            programs,
            varying=(total, programs, eps, offset),
            strides=strides,
            fixed=(width, block),
            options=launch_options(False, min(8, max(1, block // 256))),
        )
        run = PLANS.add(key, launch)
    run((dy, x, weight, dx, sums))
    return dx, None if sums is None else sums.sum(0).to(weight.dtype)


@dataclass(frozen=True)
class RotaryGradientLayout:
    """Constants of the compiled kernel, passed as one constexpr. They are as in `rotary.HeadLayout`, and row: elements of a
    token."""

    num_heads: int
    num_kv_heads: int
    query_step: int
    dim: int
    row: int
    rotary_dim: int
    block_heads: int
    block_half: int
    block_rest: int


@triton.jit
def _norm_weights(q_weight_ptr, k_weight_ptr, is_q, cols, keep, offset):
    """[BLOCK_H, BLOCK]: for each head, the columns `cols` of the norm's weights for queries or for keys."""
    q_weight = tl.load(q_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight[None, :], k_weight[None, :]) + offset


@triton.jit
def _add_sums(sums_ptr, q_sums, k_sums, cols, keep, DIM: tl.constexpr):
    """Store the sums of queries and of keys of a program, DIM numbers each."""
    tl.store(sums_ptr + cols, q_sums, mask=keep)
    tl.store(sums_ptr + DIM + cols, k_sums, mask=keep)


@triton.jit(do_not_specialize=["total", "head_blocks", "programs"])
def _rotary_gradients(
    d_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    sums_ptr,
    total,
    head_blocks,
    programs,
    eps,
    offset,
    stride_cos,
    stride_angle,
    LAYOUT: tl.constexpr,
):
    """A program computes `block_heads` heads of the tokens p, p + programs, ..., in place; `head_blocks` programs share these
    tokens.

    sums: (programs * head_blocks, 2, dim) float32, for the weights of both norms; None if these are not asked for
    """
    NUM_HEADS: tl.constexpr = LAYOUT.num_heads
    DIM: tl.constexpr = LAYOUT.dim
    HALF: tl.constexpr = LAYOUT.rotary_dim // 2
    BLOCK_HALF: tl.constexpr = LAYOUT.block_half
    BLOCK_REST: tl.constexpr = LAYOUT.block_rest
    heads = tl.program_id(0) % head_blocks * LAYOUT.block_heads + tl.arange(0, LAYOUT.block_heads)
    is_q = (heads < NUM_HEADS)[:, None]
    is_head = (heads < NUM_HEADS + LAYOUT.num_kv_heads)[:, None]
    places = (heads + (LAYOUT.query_step - 1) * tl.minimum(heads, NUM_HEADS)) * DIM
    half = tl.arange(0, BLOCK_HALF)
    rest = LAYOUT.rotary_dim + tl.arange(0, BLOCK_REST)
    in_half = is_head & (half < HALF)[None, :]
    in_rest = is_head & (rest < DIM)[None, :]
    q_sums1 = tl.zeros([BLOCK_HALF], tl.float32)
    k_sums1 = q_sums1
    q_sums2 = q_sums1
    k_sums2 = q_sums1
    q_sums3 = tl.zeros([BLOCK_REST], tl.float32)
    k_sums3 = q_sums3
    dtype: tl.constexpr = d_ptr.dtype.element_ty
    first = tl.program_id(0) // head_blocks
    for step in tl.range(0, tl.cdiv(total - first, programs)):
        token = first.to(tl.int64) + step * programs
        offsets = token * LAYOUT.row + places[:, None]
        d1 = tl.load(d_ptr + offsets + half[None, :], mask=in_half, other=0.0).to(tl.float32)
        d2 = tl.load(d_ptr + offsets + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
        d3 = tl.load(d_ptr + offsets + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
        if cos_ptr is not None:
            angle = token * stride_cos + half * stride_angle
            cos = tl.load(cos_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(sin_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            turned = d1 * cos + d2 * sin
            d2 = d2 * cos - d1 * sin
            d1 = turned
        if q_weight_ptr is not None:
            x1 = tl.load(x_ptr + offsets + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + offsets + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
            x3 = tl.load(x_ptr + offsets + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
            squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
            scale = tl.rsqrt(squares / DIM + eps)[:, None]
            x1 *= scale
            x2 *= scale
            x3 *= scale
            if sums_ptr is not None:
                q_sums1 += tl.sum(tl.where(is_q, d1 * x1, 0.0), 0)
                k_sums1 += tl.sum(tl.where(is_q, 0.0, d1 * x1), 0)
                q_sums2 += tl.sum(tl.where(is_q, d2 * x2, 0.0), 0)
                k_sums2 += tl.sum(tl.where(is_q, 0.0, d2 * x2), 0)
                q_sums3 += tl.sum(tl.where(is_q, d3 * x3, 0.0), 0)
                k_sums3 += tl.sum(tl.where(is_q, 0.0, d3 * x3), 0)
            d1 *= _norm_weights(q_weight_ptr, k_weight_ptr, is_q, half, half < HALF, offset)
            d2 *= _norm_weights(q_weight_ptr, k_weight_ptr, is_q, HALF + half, half < HALF, offset)
            d3 *= _norm_weights(q_weight_ptr, k_weight_ptr, is_q, rest, rest < DIM, offset)
            mean = ((tl.sum(d1 * x1, 1) + tl.sum(d2 * x2, 1) + tl.sum(d3 * x3, 1)) / DIM)[:, None]
            d1 = scale * (d1 - x1 * mean)
            d2 = scale * (d2 - x2 * mean)
            d3 = scale * (d3 - x3 * mean)
        tl.store(d_ptr + offsets + half[None, :], d1.to(dtype), mask=in_half)
        tl.store(d_ptr + offsets + HALF + half[None, :], d2.to(dtype), mask=in_half)
        tl.store(d_ptr + offsets + rest[None, :], d3.to(dtype), mask=in_rest)
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * (2 * DIM)
        _add_sums(sums_ptr, q_sums1, k_sums1, half, half < HALF, DIM)
        _add_sums(sums_ptr, q_sums2, k_sums2, HALF + half, half < HALF, DIM)
        _add_sums(sums_ptr, q_sums3, k_sums3, rest, rest < DIM, DIM)


def launch_rotary_backward(
    dqkv: Tensor,
    qkv: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    needs_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Arguments and results are those of `OpsBackend.rotary_backward`. One launch, and a sum for the weights."""
    total, row = dqkv.shape
    if cos is None and q_norm is None:
        return None, None
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        cos = cos.contiguous()
        sin = sin.contiguous()
    q_weight, eps, offset = (None, 0.0, 0.0) if q_norm is None else q_norm
    k_weight = None if k_norm is None else k_norm.weight
    needs_weights = needs_weights and q_norm is not None
    if total == 0:
        found = [torch.zeros_like(weight) if needs_weights else None for weight in (q_weight, k_weight)]
        return found[0], found[1]
    block_heads = 16
    head_blocks = -(-(num_heads + num_kv_heads) // block_heads)
    programs = min(total, max(1, GRADIENT_PROGRAMS // head_blocks))
    sums = None
    if needs_weights:
        sums = torch.empty(programs * head_blocks, 2, dim, dtype=torch.float32, device=dqkv.device)
    tensors = (dqkv, qkv if q_norm is not None else None, cos, sin, q_weight, k_weight, sums)
    key = (
        "rotary_backward",
        dqkv.shape,
        (num_heads, num_kv_heads, dim),
        None if cos is None else (cos.shape, cos.stride()),
        eps,
        offset,
        dqkv.get_device(),
        *[None if x is None else x.dtype for x in tensors],
    )
    run = PLANS.get(key)
    if run is None:
        rotary_dim = dim - dim % 2 if cos is None else 2 * cos.shape[1]
        layout = RotaryGradientLayout(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            query_step=(row // dim - 2 * num_kv_heads) // num_heads,
            dim=dim,
            row=row,
            rotary_dim=rotary_dim,
            block_heads=block_heads,
            block_half=power_of_2(max(rotary_dim // 2, 1)),
            block_rest=power_of_2(max(dim - rotary_dim, 1)),
        )
        launch = Launch(
            _rotary_gradients,
            programs * head_blocks,
            varying=(total, head_blocks, programs, eps, offset),
            strides=(0, 1) if cos is None else cos.stride(),
            fixed=(layout,),
            options=launch_options(False, 4 if dim <= 128 else 8),
        )
        run = PLANS.add(key, launch)
    run(tensors)
    if sums is None:
        return None, None
    dweights = sums.sum(0)
    assert q_weight is not None
    return dweights[0].to(q_weight.dtype), dweights[1].to(q_weight.dtype)
