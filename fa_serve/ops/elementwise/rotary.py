"""The kernel between the q/k/v product and attention: norms of heads, rotary embedding and the write to the KV cache.

It computes in float32 and rounds once. On Hopper and later GPUs it is launched programmatically, see
`primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.ops_backend import Norm
from fa_serve.spec import ParameterError


class CacheStrides(NamedTuple):
    """The strides of a paged cache (num_pages, page_size, num_kv_heads, head_dim), without the last one, which is 1."""

    page: int
    token: int
    head: int


@dataclass(frozen=True)
class HeadLayout:
    """Constants of the compiled kernel, passed as one constexpr.

    num_heads, num_kv_heads: heads of q; heads of k, and also of v
    query_step:  heads from one query to the next: 2 if each query is followed by its gate, which is not read here, else 1
    dim:         elements of a head, of which the first rotary_dim are rotated
    block_heads: heads of one program
    block_half:  a power of two, at least rotary_dim / 2
    block_rest:  a power of two, at least dim - rotary_dim
    pdl:         the launch is programmatic
    """

    num_heads: int
    num_kv_heads: int
    query_step: int
    dim: int
    rotary_dim: int
    block_heads: int
    block_half: int
    block_rest: int
    pdl: bool


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
    stride_qkv,
    stride_cos,
    stride_angle,
    k_strides,
    v_strides,
    LAYOUT: tl.constexpr,
):
    """A program computes `block_heads` heads of one token; `head_blocks` programs share a token.

    A head is read in three parts: x1 and x2 are the halves that are rotated against each other, x3 is the rest. Every part is
    computed as a query or key head; a value head keeps what was read.
    """
    wait_for_previous_kernel(LAYOUT.pdl)
    NUM_HEADS: tl.constexpr = LAYOUT.num_heads
    NUM_KV_HEADS: tl.constexpr = LAYOUT.num_kv_heads
    DIM: tl.constexpr = LAYOUT.dim
    ROTARY: tl.constexpr = LAYOUT.rotary_dim
    HALF: tl.constexpr = ROTARY // 2
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    # the slot is loaded here with the other loads: if it were loaded after the first stores, the program would wait twice
    slot = tl.load(slot_ptr + token)
    heads = tl.program_id(0) % head_blocks * LAYOUT.block_heads + tl.arange(0, LAYOUT.block_heads)
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_qk = (is_q | is_k)[:, None]
    is_head = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    half = tl.arange(0, LAYOUT.block_half)
    rest = ROTARY + tl.arange(0, LAYOUT.block_rest)
    in_half = is_head & (half < HALF)[None, :]
    in_rest = is_head & (rest < DIM)[None, :]
    places = heads + (LAYOUT.query_step - 1) * tl.minimum(heads, NUM_HEADS)
    x_ptrs = qkv_ptr + token * stride_qkv + (places * DIM)[:, None]
    raw1 = tl.load(x_ptrs + half[None, :], mask=in_half, other=0.0)
    raw2 = tl.load(x_ptrs + HALF + half[None, :], mask=in_half, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    raw3 = raw1
    x3 = x1
    if ROTARY < DIM:
        raw3 = tl.load(x_ptrs + rest[None, :], mask=in_rest, other=0.0)
        x3 = raw3.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if ROTARY < DIM:
            squares += tl.sum(x3 * x3, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        x1 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, half, half < HALF, offset)
        x2 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, HALF + half, half < HALF, offset)
        if ROTARY < DIM:
            x3 *= scale * _norm_weights(q_weight_ptr, k_weight_ptr, is_q, rest, rest < DIM, offset)
    cos = 1.0
    sin = 0.0
    if cos_ptr is not None:
        angle = token * stride_cos + half * stride_angle
        cos = tl.load(cos_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    y1 = tl.where(is_qk, (x1 * cos - x2 * sin).to(dtype), raw1)
    y2 = tl.where(is_qk, (x2 * cos + x1 * sin).to(dtype), raw2)
    y3 = tl.where(is_qk, x3.to(dtype), raw3)
    tl.store(x_ptrs + half[None, :], y1, mask=in_half & is_qk)
    tl.store(x_ptrs + HALF + half[None, :], y2, mask=in_half & is_qk)
    if ROTARY < DIM:
        tl.store(x_ptrs + rest[None, :], y3, mask=in_rest & is_qk)

    if k_descale_ptr is not None:
        descale = tl.load(k_descale_ptr + heads - NUM_HEADS, mask=is_k, other=1.0)
        descale = tl.where(is_v, tl.load(v_descale_ptr + heads - NUM_HEADS - NUM_KV_HEADS, mask=is_v, other=1.0), descale)
        y1 = scale_to_float8(y1, descale[:, None])
        y2 = scale_to_float8(y2, descale[:, None])
        y3 = scale_to_float8(y3, descale[:, None])
    stored: tl.constexpr = k_cache_ptr.dtype.element_ty
    y1 = y1.to(stored)
    y2 = y2.to(stored)
    y3 = y3.to(stored)
    page = slot // page_size
    position = slot % page_size
    # head indices become int64 before the product with a stride
    k_ptrs = k_cache_ptr + page * k_strides.page + position * k_strides.token
    k_ptrs = k_ptrs + ((heads - NUM_HEADS).to(tl.int64) * k_strides.head)[:, None]
    v_ptrs = v_cache_ptr + page * v_strides.page + position * v_strides.token
    v_ptrs = v_ptrs + ((heads - NUM_HEADS - NUM_KV_HEADS).to(tl.int64) * v_strides.head)[:, None]
    to_k = is_k[:, None] & (slot >= 0)
    to_v = is_v[:, None] & (slot >= 0)
    tl.store(k_ptrs + half[None, :], y1, mask=in_half & to_k)
    tl.store(v_ptrs + half[None, :], y1, mask=in_half & to_v)
    tl.store(k_ptrs + HALF + half[None, :], y2, mask=in_half & to_k)
    tl.store(v_ptrs + HALF + half[None, :], y2, mask=in_half & to_v)
    if ROTARY < DIM:
        tl.store(k_ptrs + rest[None, :], y3, mask=in_rest & to_k)
        tl.store(v_ptrs + rest[None, :], y3, mask=in_rest & to_v)


@triton.jit
def scale_to_float8(y, descale):
    """y / descale, limited to +-448, which is the largest finite float8_e4m3fn; anything above would become NaN. `descale` is
    broadcast to the shape of y."""
    y = tl.div_rn(y.to(tl.float32), tl.broadcast_to(descale, y.shape))
    return tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _norm_weights(q_weight_ptr, k_weight_ptr, is_q, cols, keep, offset):
    """[BLOCK_H, BLOCK]: for each head, the columns `cols` of the norm's weights for queries or for keys."""
    q_weight = tl.load(q_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :]) + offset


def launch_rotary_store_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """Arguments are those of `fa_serve.ops.rotary_store_kv`. One launch."""
    q_weight, eps, offset = (None, 0.0, 0.0) if q_norm is None else q_norm
    k_weight = None if k_norm is None else k_norm.weight
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        cos = cos.contiguous()
        sin = sin.contiguous()
    tensors = (qkv, cos, sin, q_weight, k_weight, k_cache, v_cache, slot_mapping, k_descale, v_descale)
    key = (
        "rotary_store_kv",
        qkv.shape,
        num_heads,
        qkv.stride(0),
        None if cos is None else (cos.shape, cos.stride()),
        k_cache.shape,
        k_cache.stride(),
        v_cache.stride(),
        eps,
        offset,
        qkv.get_device(),
        *[None if x is None else x.dtype for x in tensors],
    )
    run = PLANS.get(key)
    if run is None:
        if qkv.shape[0] == 0:
            return
        run = PLANS.add(key, _plan(qkv, cos, k_cache, v_cache, num_heads, eps, offset))
    run(tensors)


def _plan(
    qkv: Tensor, cos: Tensor | None, k_cache: Tensor, v_cache: Tensor, num_heads: int, eps: float, offset: float
) -> Launch:
    _, page_size, num_kv_heads, dim = k_cache.shape
    rotary_dim = dim - dim % 2 if cos is None else 2 * cos.shape[1]
    if rotary_dim > dim:
        raise ParameterError("cos", f"have at most head_dim / 2 = {dim // 2} columns", tuple(cos.shape))
    heads = num_heads + 2 * num_kv_heads
    gates = qkv.shape[1] // dim - heads
    # Measured on one H200, us with 8, 16, 32 heads of 128 in a program: 8192 tokens of 32 heads 58.2, 53.8, 49.3; 256 tokens of
    # 32 heads 4.1, 3.8, 3.4; 8192 tokens of 48 heads 61.6, 56.5, 56.9; 64 tokens of 48 heads 2.6, 2.5, 2.9. No number of warps
    # is faster than 4 in all of these.
    block_heads = 32 if heads % 32 == 0 and dim <= 128 else 16
    head_blocks = -(-heads // block_heads)
    pdl = spec.has_programmatic_launch(spec.arch_of(qkv.device))
    layout = HeadLayout(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_step=2 if gates else 1,
        dim=dim,
        rotary_dim=rotary_dim,
        block_heads=block_heads,
        block_half=power_of_2(max(rotary_dim // 2, 1)),
        block_rest=power_of_2(max(dim - rotary_dim, 1)),
        pdl=pdl,
    )
    return Launch(
        _rotary_store_kv,
        qkv.shape[0] * head_blocks,
        varying=(page_size, head_blocks, eps, offset),
        strides=(qkv.stride(0), *((0, 1) if cos is None else cos.stride())),
        fixed=(
            CacheStrides(*k_cache.stride()[:3]),
            CacheStrides(*v_cache.stride()[:3]),
            layout,
        ),
        options=launch_options(pdl, 4),
    )
