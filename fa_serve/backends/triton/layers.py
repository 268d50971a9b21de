"""What stands between the matrix products of a decoder layer: RMS norm, rotary embedding with the KV write, gated activations.

One launch each, for packed tokens. All of it is computed in float32 and rounded once, where the models' own code rounds after
every operation. On Hopper and later the kernels are launched programmatically: whoever follows may start, and
waits for our end. Left out: the products themselves, but for few tokens (linear.py), and attention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import launch
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.backends.triton.tiles import launch_options, power_of_2

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """silu, gelu by its tanh approximation, or gelu by erf (Hendrycks, Gimpel 2016, arXiv:1606.08415)."""
    if KIND == 0:
        y = x * _sigmoid(x)
    elif KIND == 1:
        # (1 + tanh(u)) / 2 = sigmoid(2u)
        y = x * _sigmoid(2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    return y


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
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row * stride_r + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, y.to(out_ptr.dtype.element_ty), mask=keep)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None, out: Tensor) -> None:
    """out = x / rms(x) * (weight + offset) (+ residual), by rows; x, residual, out (total, width), rows contiguous."""
    width = x.shape[1]
    block = power_of_2(width)
    stride_r = 0 if residual is None else residual.stride(0)
    if x.shape[0]:
        pdl = spec.arch_of(x.device) >= 90
        launch(
            _rms_norm,
            x.shape[0],
            (x, weight, residual, out),
            (eps, offset),
            (x.stride(0), stride_r, out.stride(0), width, block, pdl),
            launch_options(pdl, min(8, max(1, block // 256))),
        )


@triton.jit(do_not_specialize=["page_size", "head_blocks"])
def _rotary_store_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_descale_ptr,
    v_descale_ptr,
    page_size,
    head_blocks,
    eps,
    offset,
    stride_t,
    stride_ct,
    stride_kcp,
    stride_kct,
    stride_kch,
    stride_vcp,
    stride_vct,
    stride_vch,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """A head lies as [first half, second half] of what is rotated, then what passes as it is."""
    wait_for_previous_kernel(PDL)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    slot = tl.load(slot_ptr + token)  # here, with the other loads: behind the first stores it would wait once more for memory
    heads = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    turns = (is_q | is_k)[:, None]
    live = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    HALF: tl.constexpr = ROTARY // 2
    r = tl.arange(0, BLOCK_R)
    p = ROTARY + tl.arange(0, BLOCK_P)
    in_r = live & (r < HALF)[None, :]
    in_p = live & (p < DIM)[None, :]
    row = qkv_ptr + token * stride_t
    x_ptrs = row + (heads * DIM)[:, None]
    # the rounded sources: a value head is copied, bit by bit
    raw1 = tl.load(x_ptrs + r[None, :], mask=in_r, other=0.0)
    raw2 = tl.load(x_ptrs + HALF + r[None, :], mask=in_r, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    raw3 = raw1
    x3 = x1
    if ROTARY < DIM:
        raw3 = tl.load(x_ptrs + p[None, :], mask=in_p, other=0.0)
        x3 = raw3.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if ROTARY < DIM:
            squares += tl.sum(x3 * x3, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        x1 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, r, r < HALF, offset)
        x2 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, HALF + r, r < HALF, offset)
        if ROTARY < DIM:
            x3 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, p, p < DIM, offset)
    cos = 1.0
    sin = 0.0
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * stride_ct + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * stride_ct + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    y1 = tl.where(turns, (x1 * cos - x2 * sin).to(dtype), raw1)
    y2 = tl.where(turns, (x2 * cos + x1 * sin).to(dtype), raw2)
    y3 = tl.where(turns, x3.to(dtype), raw3)
    tl.store(x_ptrs + r[None, :], y1, mask=in_r & turns)
    tl.store(x_ptrs + HALF + r[None, :], y2, mask=in_r & turns)
    if ROTARY < DIM:
        tl.store(x_ptrs + p[None, :], y3, mask=in_p & turns)

    if k_descale_ptr is not None:
        descale = tl.load(k_descale_ptr + heads - NUM_HEADS, mask=is_k, other=1.0)
        descale = tl.where(is_v, tl.load(v_descale_ptr + heads - NUM_HEADS - NUM_KV_HEADS, mask=is_v, other=1.0), descale)
        y1 = _saturated(y1, descale)
        y2 = _saturated(y2, descale)
        y3 = _saturated(y3, descale)
    stored: tl.constexpr = k_cache_ptr.dtype.element_ty
    y1 = y1.to(stored)
    y2 = y2.to(stored)
    y3 = y3.to(stored)
    page = slot // page_size
    position = slot % page_size
    # int64 before any product with a stride
    k_ptrs = k_cache_ptr + page * stride_kcp + position * stride_kct + ((heads - NUM_HEADS).to(tl.int64) * stride_kch)[:, None]
    v_ptrs = v_cache_ptr + page * stride_vcp + position * stride_vct
    v_ptrs = v_ptrs + ((heads - NUM_HEADS - NUM_KV_HEADS).to(tl.int64) * stride_vch)[:, None]
    to_k = is_k[:, None] & (slot >= 0)
    to_v = is_v[:, None] & (slot >= 0)
    tl.store(k_ptrs + r[None, :], y1, mask=in_r & to_k)
    tl.store(v_ptrs + r[None, :], y1, mask=in_r & to_v)
    tl.store(k_ptrs + HALF + r[None, :], y2, mask=in_r & to_k)
    tl.store(v_ptrs + HALF + r[None, :], y2, mask=in_r & to_v)
    if ROTARY < DIM:
        tl.store(k_ptrs + p[None, :], y3, mask=in_p & to_k)
        tl.store(v_ptrs + p[None, :], y3, mask=in_p & to_v)


@triton.jit
def _saturated(y, descale):
    """As float8_e4m3fn takes it: 448 is its largest number, and the next is NaN."""
    y = tl.div_rn(y.to(tl.float32), tl.broadcast_to(descale[:, None], y.shape))
    return tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _norm_weights(q_weight_ptr, k_weight_ptr, is_q, cols, keep, offset):
    """[BLOCK_H, BLOCK]: each head's weights of the norm, by its kind."""
    q_weight = tl.load(q_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :]) + offset


def launch_rotary_store_kv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: tuple[Tensor, float, float] | None,
    k_norm: tuple[Tensor, float, float] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """Arguments as in `fa_serve.ops.rotary_store_kv`. One launch."""
    q_weight, eps, offset = (None, 0.0, 0.0) if q_norm is None else q_norm
    k_weight = None if k_norm is None else k_norm[0]
    num_kv_heads, dim = k_cache.shape[2:]
    rotary = dim - dim % 2 if cos is None else cos.shape[1]
    heads = num_heads + 2 * num_kv_heads
    # us on one H200 with 8, 16, 32 heads of 128 in a program: 8192 tokens of 32 heads 58.2, 53.8, 49.3, 256 of them 4.1, 3.8,
    # 3.4; 8192 tokens of 48 heads 61.6, 56.5, 56.9, 64 of them 2.6, 2.5, 2.9. No number of warps beats 4 for all of these
    block_h = 32 if heads % 32 == 0 and dim <= 128 else 16
    head_blocks = -(-heads // block_h)
    if qkv.shape[0]:
        pdl = spec.arch_of(qkv.device) >= 90
        launch(
            _rotary_store_kv,
            qkv.shape[0] * head_blocks,
            (qkv, cos, sin, q_weight, k_weight, k_cache, v_cache, slot_mapping, k_descale, v_descale),
            (k_cache.shape[1], head_blocks, eps, offset),
            (
                qkv.stride(0),
                0 if cos is None else cos.stride(0),
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
                num_heads,
                num_kv_heads,
                dim,
                rotary,
                block_h,
                power_of_2(max(rotary // 2, 1)),
                power_of_2(max(dim - rotary, 1)),
                pdl,
            ),
            launch_options(pdl, 4),
        )


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
    wait_for_previous_kernel(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    keep = cols < WIDTH
    gate = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + WIDTH + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, (activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=keep)


def launch_act_and_mul(x: Tensor, activation: str, out: Tensor) -> None:
    """out = activation(x[:, :width]) * x[:, width:]; x (total, 2 * width), out (total, width), rows contiguous."""
    total, width = out.shape
    block = min(1024, power_of_2(width))
    blocks = -(-width // block)
    if total:
        pdl = spec.arch_of(x.device) >= 90
        launch(
            _act_and_mul,
            total * blocks,
            (x, out),
            (blocks,),
            (x.stride(0), out.stride(0), width, ACTIVATIONS[activation], block, pdl),
            launch_options(pdl, 4),
        )
