"""Write new keys and values into the paged cache, and quantise them on the way where the cache is float8_e4m3fn.

One program for each token and each block of heads writes K and V together, so it looks the slot up once; slot -1 skips the
token. All strides are supported as long as the last dimension of the caches is contiguous. This module leaves out reading the
cache (`decode`, `prefill`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve import spec
from fa_serve.backends.calls import StoreTensors
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.backends.triton.tiles import padded_dim
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import Run

_TILE = 2048  # elements of K and of V per program, so that each thread has 16 bytes of both in flight


@triton.jit
def _copy_heads(x_ptr, cache_ptr, descale_ptr, heads, num_heads, strides, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """cache[heads, :] = x[heads, :] / descale[heads]. strides: of x by head and dim, of the cache by head.

    A quotient saturates at 448, the largest float8_e4m3fn number, because the cast of anything above it is NaN.
    """
    stride_xh, stride_xd, stride_ch = strides
    offs_d = tl.arange(0, BLOCK_D)
    keep = (heads < num_heads)[:, None] & (offs_d < DIM)[None, :]
    x = tl.load(x_ptr + heads[:, None] * stride_xh + offs_d[None, :].to(tl.int64) * stride_xd, mask=keep)
    if descale_ptr is not None:
        descale = tl.load(descale_ptr + heads, mask=heads < num_heads, other=1.0)
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(descale[:, None], x.shape))
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache_ptr + heads[:, None] * stride_ch + offs_d[None, :], x.to(cache_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["page_size", "num_heads", "head_blocks"])
def _store_kv(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_descale_ptr,
    v_descale_ptr,
    page_size,
    num_heads,
    head_blocks,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_kcp,
    stride_kct,
    stride_kch,
    stride_vcp,
    stride_vct,
    stride_vch,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    heads = (tl.program_id(0) % head_blocks).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    page = slot // page_size
    position = slot % page_size
    k_cache_ptr += page * stride_kcp + position * stride_kct
    v_cache_ptr += page * stride_vcp + position * stride_vct
    k_ptr += token * stride_kt
    v_ptr += token * stride_vt
    _copy_heads(k_ptr, k_cache_ptr, k_descale_ptr, heads, num_heads, (stride_kh, stride_kd, stride_kch), DIM, BLOCK_D)
    _copy_heads(v_ptr, v_cache_ptr, v_descale_ptr, heads, num_heads, (stride_vh, stride_vd, stride_vch), DIM_V, BLOCK_DV)


def plan_store_kv(tensors: StoreTensors) -> Run:
    """Plan calls of `fa_serve.store_kv` that look like this one. A run takes StoreTensors and is one launch."""
    k = tensors.k
    v = tensors.v
    k_cache = tensors.k_cache
    v_cache = tensors.v_cache
    total, num_heads, dim = k.shape
    if total == 0:
        return lambda tensors: None
    dim_v = v.shape[2]
    block_d = padded_dim(dim)
    block_dv = padded_dim(dim_v)
    block_h = max(1, min(power_of_2(num_heads), _TILE // max(block_d, block_dv)))
    head_blocks = -(-num_heads // block_h)
    pdl = spec.has_programmatic_launch(spec.arch_of(k.device))
    return Launch(
        _store_kv,
        total * head_blocks,
        varying=(k_cache.shape[1], num_heads, head_blocks),
        strides=(*k.stride(), *v.stride(), *k_cache.stride()[:3], *v_cache.stride()[:3]),
        fixed=(dim, dim_v, block_d, block_dv, block_h, pdl),
        options=launch_options(pdl, 4),
    )
