"""The kernels of the backward pass: dK and dV over key blocks, and dQ over query blocks.

The module `plan` describes the algorithm and launches the kernels. This module leaves out what a call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fa_serve.backends.triton.primitives import LOG2E, softcap_scores, window_keep
from fa_serve.backends.triton.row_statistics import load_rows, row_range, stats_at


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """What the backward kernels are compiled for.

    groups:     query heads per KV head
    dim, dim_v: head_dim and head_dim_v; block_d, block_dv: the same, padded to tiles
    mask:       "none", "bool" or "float"; mask_block: side of the blocks of the mask whose spans are read
    mask_grad:  the gradient of the mask is computed
    tma:        the walk reads through tensor descriptors: q, dO and the row statistics, or k and v
    precision:  `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32
    wide_mask:  columns of the mask need 64-bit offsets, see `key_pages.has_wide_mask`; its gradient is contiguous and does not
    ptx:        inline PTX is available, so that the softcap is computed as in the forward pass
    """

    num_heads: int
    groups: int
    dim: int
    dim_v: int
    block_d: int
    block_dv: int
    block_m: int
    block_n: int
    varlen: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    mask: str
    mask_block: int
    mask_grad: bool
    wide_mask: bool
    tma: bool
    precision: str
    ptx: bool


@triton.jit
def _store_rows(ptr, x, rows, length, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    keep = (rows < length)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (cols < DIM)[None, :]
    tl.store(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], x.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def _probabilities(s, lse, rows, cols, edge, lengths, scaling, window, mask_tensor, var: tl.constexpr):
    """-> P, and the slope of the softcap, from the products of queries and keys.

    rows, cols and lse broadcast to the shape of s, which is [BLOCK_M, BLOCK_N] or transposed.
    """
    q_len, kv_len = lengths
    scale, softcap = scaling
    window_left, window_right = window
    mask_ptr, stride_mq, stride_mk = mask_tensor
    if var.wide_mask:
        stride_mk = tl.cast(stride_mk, tl.int64)
    factor = scale * LOG2E
    slope = 1.0
    if var.has_softcap:
        s = softcap_scores(s, scale, softcap, var.precision == "ieee", var.ptx)
        tanh = s * (1.0 / (softcap * LOG2E))
        slope = 1.0 - tanh * tanh
        factor = 1.0
    if var.mask != "none":
        given = tl.load(
            mask_ptr + rows.to(tl.int64) * stride_mq + cols * stride_mk,
            mask=(rows < q_len) & (cols < kv_len),
            other=0,
        )
        if var.mask == "bool":
            s = tl.where(given != 0, s, float("-inf"))
        else:
            s = s * factor + given.to(tl.float32) * LOG2E
            factor = 1.0
    p = tl.exp2(s * factor - lse)
    if edge:
        rows_at = rows + (kv_len - q_len)
        keep = window_keep(rows_at, cols, kv_len, window_left, window_right, var.has_left, var.has_right)
        p = tl.where(keep, p, 0.0)
    return p, slope


@triton.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "num_n", "seen_batch", "seen_head"])
def attn_bwd_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    seen_ptr,
    dk_ptr,
    dv_ptr,
    dmask_ptr,
    q_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
    seqlen_k,
    num_n,
    seen_batch,
    seen_head,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    stride_db,
    stride_dh,
    stride_dq,
    stride_dk,
    var: tl.constexpr,
):
    """One program: dK and dV of block_n keys of one KV head of one sequence, and their part of the mask's gradient.

    Products are transposed, [BLOCK_N, BLOCK_M], so that P^T and dS^T are operands in registers. The walk over the heads of the
    group and over the blocks of rows is one loop with one software pipeline. dk and dv are contiguous.
    """
    BLOCK_M: tl.constexpr = var.block_m
    BLOCK_N: tl.constexpr = var.block_n
    BLOCK_D: tl.constexpr = var.block_d
    BLOCK_DV: tl.constexpr = var.block_dv
    KV_HEADS: tl.constexpr = var.num_heads // var.groups
    pid = tl.program_id(0)
    head_kv = pid // num_n % KV_HEADS
    batch = pid // num_n // KV_HEADS
    q_row0, q_len = row_range(cu_q_ptr, batch, seqlen_q, var.varlen)
    k_row0, kv_len = row_range(cu_k_ptr, batch, seqlen_k, var.varlen)
    n0 = pid % num_n * BLOCK_N
    if n0 >= kv_len:
        return

    # int64 before any product with a stride: a long batch has more than 2^31 elements
    batch64 = 0 if var.varlen else batch.to(tl.int64)
    q_row64 = q_row0.to(tl.int64) if var.varlen else 0
    k_row64 = k_row0.to(tl.int64) if var.varlen else 0
    kv64 = head_kv.to(tl.int64)
    q_ptr += batch64 * stride_qb + q_row64 * stride_qt
    dout_ptr += batch64 * stride_gb + q_row64 * stride_gt
    if var.mask != "none":
        mask_ptr += batch.to(tl.int64) * stride_mb
    if var.mask_grad:
        dmask_ptr += batch.to(tl.int64) * stride_db
    k_ptr += batch64 * stride_kb + k_row64 * stride_kt + kv64 * stride_kh
    v_ptr += batch64 * stride_vb + k_row64 * stride_vt + kv64 * stride_vh
    cols = n0 + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, cols, kv_len, stride_kt, var.dim, var.block_d)
    v = load_rows(v_ptr, cols, kv_len, stride_vt, var.dim_v, var.block_dv)

    # the rows that see a key of this block, and the part of them where every row sees every key
    offset = kv_len - q_len
    last_col = tl.minimum(n0 + BLOCK_N, kv_len) - 1
    lo = 0
    inner_lo = 0
    hi = q_len
    inner_hi = q_len + BLOCK_M
    if var.has_right:
        lo = tl.maximum(n0 - offset - window_right, 0) // BLOCK_M * BLOCK_M
        inner_lo = tl.maximum(last_col - offset - window_right, 0)
    if var.has_left:
        hi = tl.minimum(q_len, last_col + window_left - offset + 1)
        inner_hi = n0 + window_left - offset + 1
    if n0 + BLOCK_N > kv_len:
        inner_hi = 0
    if seen_ptr is not None:
        heads = tl.arange(0, triton.next_power_of_2(var.groups))
        first_ptr = seen_ptr + batch * seen_batch + (head_kv * var.groups + heads) * seen_head + n0 // var.mask_block * 2
        real = heads < var.groups
        lo = tl.maximum(lo, tl.min(tl.load(first_ptr, mask=real, other=1 << 20), 0) * var.mask_block)
        hi = tl.minimum(hi, tl.max(tl.load(first_ptr + 1, mask=real, other=-1) + 1, 0) * var.mask_block)
    span = tl.maximum((hi - lo + BLOCK_M - 1) // BLOCK_M, 0) * BLOCK_M

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for i in tl.range(0, span * var.groups, BLOCK_M):
        head = head_kv * var.groups
        m = lo + i
        if var.groups > 1:
            head += i // span
            m = lo + i % span
        m = tl.multiple_of(m, BLOCK_M)
        head64 = head.to(tl.int64)
        rows = m + tl.arange(0, BLOCK_M)
        if var.tma:
            q = q_desc.load([batch, head, m, 0]).reshape(BLOCK_M, BLOCK_D)
            lse = lse_desc.load([batch * var.num_heads + head, m]).reshape(BLOCK_M)
        else:
            q = load_rows(q_ptr + head64 * stride_qh, rows, q_len, stride_qt, var.dim, BLOCK_D)
            stats = stats_at(batch, head, q_row0, stride_lb, stride_lh, var.varlen)
            lse = tl.load(lse_ptr + stats + rows)
        s = tl.dot(k, q.T, input_precision=var.precision)  # [BLOCK_N, BLOCK_M]
        p, slope = _probabilities(
            s,
            lse[None, :],
            rows[None, :],
            cols[:, None],
            (m < inner_lo) | (m + BLOCK_M > inner_hi),
            (q_len, kv_len),
            (scale, softcap),
            (window_left, window_right),
            (mask_ptr + head64 * stride_mh if var.mask != "none" else mask_ptr, stride_mq, stride_mk),
            var,
        )
        if var.tma:
            dout = dout_desc.load([batch, head, m, 0]).reshape(BLOCK_M, BLOCK_DV)
        else:
            dout = load_rows(dout_ptr + head64 * stride_gh, rows, q_len, stride_gt, var.dim_v, BLOCK_DV)
        dp = tl.dot(v, dout.T, input_precision=var.precision)
        if var.tma:
            delta = delta_desc.load([batch * var.num_heads + head, m]).reshape(BLOCK_M)
        else:
            delta = tl.load(delta_ptr + stats + rows)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=var.precision)
        ds = p * (dp - delta[None, :])
        if var.mask_grad:
            tl.atomic_add(
                dmask_ptr + head64 * stride_dh + rows[None, :].to(tl.int64) * stride_dq + cols[:, None] * stride_dk,
                ds,
                mask=(rows < q_len)[None, :] & (cols < kv_len)[:, None],
                sem="relaxed",
            )
        ds = (ds * slope).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=var.precision)

    k_row = (batch64 * seqlen_k + k_row64) * KV_HEADS + kv64
    _store_rows(dk_ptr + k_row * var.dim, dk * scale, cols, kv_len, KV_HEADS * var.dim, var.dim, var.block_d)
    _store_rows(dv_ptr + k_row * var.dim_v, dv, cols, kv_len, KV_HEADS * var.dim_v, var.dim_v, var.block_dv)


@triton.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "num_m", "seen_batch", "seen_head"])
def attn_bwd_q(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    seen_ptr,
    dq_ptr,
    k_desc,
    v_desc,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
    seqlen_k,
    num_m,
    seen_batch,
    seen_head,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    var: tl.constexpr,
):
    """One program: dQ of block_m rows of one head of one sequence. dq is contiguous."""
    BLOCK_M: tl.constexpr = var.block_m
    BLOCK_N: tl.constexpr = var.block_n
    BLOCK_D: tl.constexpr = var.block_d
    pid = tl.program_id(0)
    head = pid // num_m % var.num_heads
    batch = pid // num_m // var.num_heads
    block = num_m - 1 - pid % num_m if var.has_right else pid % num_m
    q_row0, q_len = row_range(cu_q_ptr, batch, seqlen_q, var.varlen)
    k_row0, kv_len = row_range(cu_k_ptr, batch, seqlen_k, var.varlen)
    m0 = block * BLOCK_M
    if m0 >= q_len:
        return

    batch64 = 0 if var.varlen else batch.to(tl.int64)
    q_row64 = q_row0.to(tl.int64) if var.varlen else 0
    k_row64 = k_row0.to(tl.int64) if var.varlen else 0
    head64 = head.to(tl.int64)
    kv64 = (head // var.groups).to(tl.int64)
    stats = stats_at(batch, head, q_row0, stride_lb, stride_lh, var.varlen)
    q_ptr += batch64 * stride_qb + q_row64 * stride_qt + head64 * stride_qh
    dout_ptr += batch64 * stride_gb + q_row64 * stride_gt + head64 * stride_gh
    k_ptr += batch64 * stride_kb + k_row64 * stride_kt + kv64 * stride_kh
    v_ptr += batch64 * stride_vb + k_row64 * stride_vt + kv64 * stride_vh
    if var.mask != "none":
        mask_ptr += batch.to(tl.int64) * stride_mb + head64 * stride_mh
    rows = m0 + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, rows, q_len, stride_qt, var.dim, var.block_d)
    dout = load_rows(dout_ptr, rows, q_len, stride_gt, var.dim_v, var.block_dv)
    lse = tl.load(lse_ptr + stats + rows)
    delta = tl.load(delta_ptr + stats + rows)

    offset = kv_len - q_len
    last_row = tl.minimum(m0 + BLOCK_M, q_len) - 1
    lo = 0
    inner_lo = 0
    hi = kv_len
    inner_hi = kv_len
    if var.has_left:
        lo = tl.maximum(m0 + offset - window_left, 0) // BLOCK_N * BLOCK_N
        inner_lo = tl.maximum(last_row + offset - window_left, 0)
    if var.has_right:
        hi = tl.maximum(tl.minimum(kv_len, last_row + offset + window_right + 1), 0)
        inner_hi = tl.maximum(tl.minimum(kv_len, m0 + offset + window_right + 1), 0)
    if seen_ptr is not None:
        first_ptr = seen_ptr + batch * seen_batch + head * seen_head + m0 // var.mask_block * 2
        lo = tl.maximum(lo, tl.load(first_ptr) * var.mask_block)
        hi = tl.minimum(hi, (tl.load(first_ptr + 1) + 1) * var.mask_block)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in tl.range(lo, hi, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        cols = n + tl.arange(0, BLOCK_N)
        if var.tma:
            k = k_desc.load([batch, head // var.groups, n, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            k = load_rows(k_ptr, cols, kv_len, stride_kt, var.dim, var.block_d)
        s = tl.dot(q, k.T, input_precision=var.precision)
        p, slope = _probabilities(
            s,
            lse[:, None],
            rows[:, None],
            cols[None, :],
            (n < inner_lo) | (n + BLOCK_N > inner_hi),
            (q_len, kv_len),
            (scale, softcap),
            (window_left, window_right),
            (mask_ptr, stride_mq, stride_mk),
            var,
        )
        if var.tma:
            v = v_desc.load([batch, head // var.groups, n, 0]).reshape(BLOCK_N, var.block_dv)
        else:
            v = load_rows(v_ptr, cols, kv_len, stride_vt, var.dim_v, var.block_dv)
        dp = tl.dot(dout, v.T, input_precision=var.precision)
        ds = (p * (dp - delta[:, None]) * slope).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=var.precision)
    q_row = (batch64 * seqlen_q + q_row64) * var.num_heads + head64
    _store_rows(dq_ptr + q_row * var.dim, dq * scale, rows, q_len, var.num_heads * var.dim, var.dim, var.block_d)
