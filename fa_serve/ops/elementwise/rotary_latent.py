"""The kernel between the projections of latent attention and the attention: rotary embedding, norm and the write to the cache.

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
from fa_serve.ops.elementwise.rotary import scale_to_float8
from fa_serve.ops.ops_backend import Norm, Pairing


class HeadStrides(NamedTuple):
    """The strides of rotated parts of queries (total, num_heads, rope), without the last one, which is 1."""

    token: int
    head: int


class PageStrides(NamedTuple):
    """The strides of a cache (num_pages, page_size, 1, rank + rope) by page and token; the last one is 1."""

    page: int
    token: int


@dataclass(frozen=True)
class LatentLayout:
    """Constants of the compiled kernel, passed as one constexpr.

    num_heads:   heads of the queries
    rank, rope:  elements of a latent vector and of a rotated part
    first, step: pair i consists of the elements first * i and first * i + step of a rotated part
    block_heads: heads of one program
    block_rank, block_half: powers of two, at least rank and rope / 2
    pdl:         the launch is programmatic
    """

    num_heads: int
    rank: int
    rope: int
    first: int
    step: int
    block_heads: int
    block_rank: int
    block_half: int
    pdl: bool


@triton.jit(do_not_specialize=["page_size", "head_blocks"])
def _rotary_store_latent(
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    cache_ptr,
    slot_ptr,
    descale_ptr,
    out_ptr,
    keys_ptr,
    page_size,
    head_blocks,
    eps,
    offset,
    stride_latent,
    stride_keys,
    stride_cos,
    stride_angle,
    q_strides,
    out_strides,
    cache_strides,
    LAYOUT: tl.constexpr,
):
    """A token has `head_blocks` + 1 programs: the last computes its key, each of the others `block_heads` query heads."""
    wait_for_previous_kernel(LAYOUT.pdl)
    RANK: tl.constexpr = LAYOUT.rank
    HALF: tl.constexpr = LAYOUT.rope // 2
    token = (tl.program_id(0) // (head_blocks + 1)).to(tl.int64)
    part = tl.program_id(0) % (head_blocks + 1)
    pair = tl.arange(0, LAYOUT.block_half)
    in_half = pair < HALF
    first = pair * LAYOUT.first
    second = first + LAYOUT.step
    angle = token * stride_cos + pair * stride_angle
    cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0).to(tl.float32)
    if part < head_blocks:
        heads = part * LAYOUT.block_heads + tl.arange(0, LAYOUT.block_heads)
        keep = (heads < LAYOUT.num_heads)[:, None] & in_half[None, :]
        q_ptrs = q_ptr + token * q_strides.token + (heads.to(tl.int64) * q_strides.head)[:, None]
        x1 = tl.load(q_ptrs + first[None, :], mask=keep, other=0.0).to(tl.float32)
        x2 = tl.load(q_ptrs + second[None, :], mask=keep, other=0.0).to(tl.float32)
        y1 = x1 * cos[None, :] - x2 * sin[None, :]
        y2 = x2 * cos[None, :] + x1 * sin[None, :]
        out_ptrs = out_ptr + token * out_strides.token + (heads.to(tl.int64) * out_strides.head)[:, None]
        tl.store(out_ptrs + first[None, :], y1.to(out_ptr.dtype.element_ty), mask=keep)
        tl.store(out_ptrs + second[None, :], y2.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        slot = tl.load(slot_ptr + token)
        cols = tl.arange(0, LAYOUT.block_rank)
        in_rank = cols < RANK
        latent_ptrs = latent_ptr + token * stride_latent
        c = tl.load(latent_ptrs + cols, mask=in_rank, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=in_rank, other=0.0).to(tl.float32) + offset
        c = c * tl.rsqrt(tl.sum(c * c, 0) / RANK + eps) * weight
        r1 = tl.load(latent_ptrs + RANK + first, mask=in_half, other=0.0).to(tl.float32)
        r2 = tl.load(latent_ptrs + RANK + second, mask=in_half, other=0.0).to(tl.float32)
        dtype: tl.constexpr = keys_ptr.dtype.element_ty
        c = c.to(dtype)
        k1 = (r1 * cos - r2 * sin).to(dtype)
        k2 = (r2 * cos + r1 * sin).to(dtype)
        key_ptrs = keys_ptr + token * stride_keys
        tl.store(key_ptrs + cols, c, mask=in_rank)
        tl.store(key_ptrs + RANK + first, k1, mask=in_half)
        tl.store(key_ptrs + RANK + second, k2, mask=in_half)
        if descale_ptr is not None:
            descale = tl.load(descale_ptr)
            c = scale_to_float8(c, descale)
            k1 = scale_to_float8(k1, descale)
            k2 = scale_to_float8(k2, descale)
        stored: tl.constexpr = cache_ptr.dtype.element_ty
        cache_ptrs = cache_ptr + slot // page_size * cache_strides.page + slot % page_size * cache_strides.token
        tl.store(cache_ptrs + cols, c.to(stored), mask=in_rank & (slot >= 0))
        tl.store(cache_ptrs + RANK + first, k1.to(stored), mask=in_half & (slot >= 0))
        tl.store(cache_ptrs + RANK + second, k2.to(stored), mask=in_half & (slot >= 0))


def launch_rotary_store_latent(
    q: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm: Norm,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    descale: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.rotary_store_latent`. One launch."""
    if cos.stride() != sin.stride():
        cos = cos.contiguous()
        sin = sin.contiguous()
    keys = latent.new_empty(latent.shape)
    tensors = (q, latent, cos, sin, norm.weight, kv_cache, slot_mapping, descale, out, keys)
    key = (
        "rotary_store_latent",
        q.shape,
        q.stride(),
        latent.shape,
        latent.stride(0),
        cos.stride(),
        kv_cache.shape,
        kv_cache.stride(),
        out.stride(),
        norm.eps,
        norm.offset,
        pairing,
        q.get_device(),
        *[None if x is None else x.dtype for x in tensors],
    )
    run = PLANS.get(key)
    if run is None:
        if q.shape[0] == 0:
            return keys
        run = PLANS.add(key, _plan(q, latent, kv_cache, norm, cos, pairing, out))
    run(tensors)
    return keys


def _plan(q: Tensor, latent: Tensor, kv_cache: Tensor, norm: Norm, cos: Tensor, pairing: Pairing, out: Tensor) -> Launch:
    total, num_heads, rope = q.shape
    rank = latent.shape[1] - rope
    block_heads = min(power_of_2(num_heads), 32)
    head_blocks = -(-num_heads // block_heads)
    pdl = spec.has_programmatic_launch(spec.arch_of(q.device))
    layout = LatentLayout(
        num_heads=num_heads,
        rank=rank,
        rope=rope,
        first=1 if pairing == "halves" else 2,
        step=rope // 2 if pairing == "halves" else 1,
        block_heads=block_heads,
        block_rank=power_of_2(rank),
        block_half=power_of_2(rope // 2),
        pdl=pdl,
    )
    return Launch(
        _rotary_store_latent,
        total * (head_blocks + 1),
        varying=(kv_cache.shape[1], head_blocks, norm.eps, norm.offset),
        strides=(latent.stride(0), latent.shape[1], *cos.stride()),
        fixed=(
            HeadStrides(*q.stride()[:2]),
            HeadStrides(*out.stride()[:2]),
            PageStrides(*kv_cache.stride()[:2]),
            layout,
        ),
        options=launch_options(pdl, 4),
    )
