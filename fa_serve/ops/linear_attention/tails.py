"""What the kernel of few rows reads before a row: rows of the tail, and rows of the step, in tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.linear_attention.primitives import load_old_or_new, time_step


@triton.jit
def gates_and_weights(
    old,
    new,
    place,
    j,
    a,
    bias,
    g_ptr,
    weight_ptr,
    tail_g_ptr,
    stride_g,
    stride_w,
    limit_low,
    limit_high,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
):
    """Log gates by head, and the weights of values, of rows of the tail (old) at `place` and of rows j of the step (new).

    The pointers are those of the head's first row.
    """
    if g_ptr is not None:
        if NEW:
            gates = tl.load(g_ptr + j * stride_g, mask=new, other=0.0).to(tl.float32)
            if OLD and tail_g_ptr is not None:
                gates += tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        else:
            gates = tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        weights = gates
    elif weight_ptr is None:
        gates = tl.where(old | new, a, 0.0)
        weights = tl.where(old | new, 1.0, 0.0)
    else:
        if NEW:
            given = tl.load(weight_ptr + j * stride_w, mask=new, other=0.0)
            weights = tl.where(new, time_step(given, bias, limit_low, limit_high, SOFTPLUS), 0.0)
            if OLD and tail_g_ptr is not None:
                weights += tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        else:
            weights = tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        gates = a * weights
    return gates, weights


@triton.jit
def read_tile(
    low,
    r,
    tail,
    start,
    c,
    x,
    in_c,
    in_x,
    a,
    bias,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    tail_k_ptr,
    tail_u_ptr,
    tail_g_ptr,
    stride_k,
    stride_v,
    stride_g,
    stride_w,
    limit_low,
    limit_high,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RING: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(keys, u, log gates, weights of u) of the rows from `low` on that come before row r; 0 for others.

    With ONE_ROW these are rows of the tail. Weights are 1 for the delta rule.
    """
    t = low + tl.arange(0, BLOCK_T)
    seen = t < r
    old = t < tail
    place = (start + t) % RING
    j = t - tail
    new_cells = k_ptr + j[:, None] * stride_k + c[None, :]
    keep = seen[:, None] & in_c[None, :]
    if tail_k_ptr is None:
        keys = tl.load(new_cells, mask=keep, other=0.0)
    else:
        cells = tail_k_ptr + place[:, None] * (KEY_HEADS * DIM) + c[None, :]
        keys = tl.load(cells, mask=keep, other=0.0) if ONE_ROW else load_old_or_new(cells, new_cells, old[:, None], keep)
    keys = keys.to(tl.float32)  # [BLOCK_T, BLOCK_K]
    new_cells = v_ptr + j[:, None] * stride_v + x[None, :]
    keep = seen[:, None] & in_x[None, :]
    if tail_u_ptr is None:
        u = tl.load(new_cells, mask=keep, other=0.0)
    else:
        cells = tail_u_ptr + place[:, None] * (HEADS * DIM_V) + x[None, :]
        if ONE_ROW or g_ptr is not None:
            u = tl.load(cells, mask=keep, other=0.0)
        else:
            u = load_old_or_new(cells, new_cells, old[:, None], keep)
    u = u.to(tl.float32)  # [BLOCK_T, BLOCK_V]
    if BY_CHANNEL:
        gates = tl.zeros([BLOCK_T, c.shape[0]], tl.float32)
        if not ONE_ROW:
            at = g_ptr + j[:, None] * stride_g + c[None, :]
            gates += tl.load(at, mask=(seen & (t >= tail))[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        if tail_g_ptr is not None:
            at = tail_g_ptr + place[:, None] * (HEADS * DIM) + c[None, :]
            gates += tl.load(at, mask=(seen & old)[:, None] & in_c[None, :], other=0.0)
    else:
        gates, weights = gates_and_weights(
            old & seen,
            seen & (t >= tail),
            place,
            j,
            a,
            bias,
            g_ptr,
            weight_ptr,
            tail_g_ptr,
            stride_g,
            stride_w,
            limit_low,
            limit_high,
            HEADS,
            SOFTPLUS,
            True,
            not ONE_ROW,
        )
    if g_ptr is not None:
        weights = tl.full([BLOCK_T], 1.0, tl.float32)
    return keys, u, gates, weights
