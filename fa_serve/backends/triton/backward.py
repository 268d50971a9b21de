"""The FlashAttention-2 backward pass in portable Triton: dense and packed.

    delta = rowsum(dO * O) - dlse
    P = exp(S - lse)                dV = P^T dO
    dP = dO V^T                     dS = P * (dP - delta)
    dQ = softmax_scale * dS K       dK = softmax_scale * dS^T Q

The scores are computed again from q, k and lse (FlashAttention-2, Dao 2023, section 3.1.2), so memory stays linear in the
sequence length. One program of `_attn_bwd_kv` owns `block_n` keys of one KV head and walks over the queries that see them, for
all query heads of the group, so dK and dV are summed in registers. Each tile's part of dQ is added atomically in float32. The
order of these additions changes between runs: where results have to repeat, `_attn_bwd_q` computes dQ with a program for each
block of queries. Only tiles that cross the edge of the band are masked.

A sink takes part in lse only, so its gradient is -rowsum(exp(sink - lse) * delta). A mask that is added to the scores has the
gradient dS, summed over the dimensions that it broadcasts. A row that sees no key has lse -inf and gets no gradients. A row
whose lse is below -1e30, because a mask hides all of its keys with a large negative number, counts as such a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_serve import spec
from fa_serve.backends.launch import Launch, on_device_of
from fa_serve.backends.plan import AttentionOptions, BackwardTensors, Gradients, Run
from fa_serve.backends.triton.primitives import LOG2E, softcap_scores, window_keep
from fa_serve.backends.triton.triton_tiles import BackwardTiles, TileConfig, backward_tiles, padded_dim

_DELTA_ROWS = 32  # query rows of one program of `_attn_bwd_delta`
_STATS_ROWS = tl.constexpr(128)  # row statistics of a sequence start at a multiple of this and are padded to one


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """What the backward kernels are compiled for.

    groups:     query heads per KV head
    dim, dim_v: head_dim and head_dim_v; block_d, block_dv: the same, padded to tiles
    mask:       "none", "bool" or "float"
    mask_grad:  the gradient of the mask is computed
    adds_dq:    the kernel over key blocks adds its part of dQ
    tma:        q, dO and the row statistics are read through tensor descriptors; tma_dq: dQ is added through one
    precision:  input precision of the products
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
    mask_grad: bool
    adds_dq: bool
    tma: bool
    tma_dq: bool
    precision: str


@triton.jit
def _row_range(cu_ptr, batch, seqlen, VARLEN: tl.constexpr):
    """-> the first row of a sequence and its length."""
    if VARLEN:
        first = tl.load(cu_ptr + batch)
        return first, tl.load(cu_ptr + batch + 1) - first
    return 0, seqlen


@triton.jit
def _load_rows(ptr, rows, length, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D]; rows past the end of the sequence belong to another one and read as 0."""
    cols = tl.arange(0, BLOCK_D)
    keep = (rows < length)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (cols < DIM)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=keep, other=0.0)


@triton.jit
def _store_rows(ptr, x, rows, length, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    keep = (rows < length)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (cols < DIM)[None, :]
    tl.store(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], x.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def _stats_at(batch, head, q_row0, stride_lb, stride_lh, VARLEN: tl.constexpr):
    """Where the row statistics of a head of a sequence begin. They are padded, so that whole tiles are read."""
    if VARLEN:
        return head.to(tl.int64) * stride_lh + (q_row0 + batch * _STATS_ROWS) // _STATS_ROWS * _STATS_ROWS
    return batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh


@triton.jit
def _probabilities(s, lse, rows, cols, edge, lengths, scaling, window, mask_tensor, var: tl.constexpr):
    """-> P, and the slope of the softcap, from the products of queries and keys.

    rows, cols and lse broadcast to the shape of s, which is [BLOCK_M, BLOCK_N] or transposed.
    """
    q_len, kv_len = lengths
    scale, softcap = scaling
    window_left, window_right = window
    mask_ptr, stride_mq, stride_mk = mask_tensor
    factor = scale * LOG2E
    slope = 1.0
    if var.has_softcap:
        s = softcap_scores(s, scale, softcap, var.precision == "ieee")
        tanh = s * (1.0 / (softcap * LOG2E))
        slope = 1.0 - tanh * tanh
        factor = 1.0
    if var.mask != "none":
        given = tl.load(
            mask_ptr + rows.to(tl.int64) * stride_mq + cols * stride_mk, mask=(rows < q_len) & (cols < kv_len), other=0
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


@triton.jit(do_not_specialize=["seqlen_q", "num_m"])
def _attn_bwd_delta(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    sinks_ptr,
    lse2_ptr,
    delta_ptr,
    dsinks_ptr,
    cu_q_ptr,
    seqlen_q,
    num_m,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_lb,
    stride_lh,
    stride_sb,
    stride_sh,
    BLOCK_M: tl.constexpr,
    var: tl.constexpr,
):
    """The row statistics of BLOCK_M rows of one head of one sequence, and their part of the sink's gradient.

    lse2_ptr:   lse in base 2. Rows that see no key and rows of the padding have +inf, so that their P is 0
    dsinks_ptr: (num_heads, batch * num_m), one sum for each program, so that adding them up has a fixed order
    """
    pid = tl.program_id(0)
    head = pid % var.num_heads
    block = pid // var.num_heads
    batch = block // num_m
    q_row0, q_len = _row_range(cu_q_ptr, batch, seqlen_q, var.varlen)
    m0 = block % num_m * BLOCK_M
    if m0 >= (q_len + _STATS_ROWS - 1) // _STATS_ROWS * _STATS_ROWS:
        return
    rows = m0 + tl.arange(0, BLOCK_M)
    head64 = head.to(tl.int64)
    batch64 = 0 if var.varlen else batch.to(tl.int64)
    row64 = q_row0.to(tl.int64) if var.varlen else 0
    out_ptr += batch64 * stride_ob + row64 * stride_ot + head64 * stride_oh
    dout_ptr += batch64 * stride_gb + row64 * stride_gt + head64 * stride_gh
    given = batch64 * stride_lb + head64 * stride_lh + row64
    out = _load_rows(out_ptr, rows, q_len, stride_ot, var.dim_v, var.block_dv).to(tl.float32)
    dout = _load_rows(dout_ptr, rows, q_len, stride_gt, var.dim_v, var.block_dv).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + given + rows, mask=rows < q_len, other=0.0)
    lse = tl.load(lse_ptr + given + rows, mask=rows < q_len, other=float("-inf"))
    lse2 = tl.where(lse < -1e30, float("inf"), lse * LOG2E)
    stats = _stats_at(batch, head, q_row0, stride_sb, stride_sh, var.varlen)
    tl.store(lse2_ptr + stats + rows, lse2)
    tl.store(delta_ptr + stats + rows, delta)
    if dsinks_ptr is not None:
        weight = tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E - lse2)
        tl.store(dsinks_ptr + head64 * (tl.num_programs(0) // var.num_heads) + block, -tl.sum(weight * delta, 0))


@triton.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "num_n"])
def _attn_bwd_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dmask_ptr,
    q_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
    seqlen_k,
    num_n,
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
    """One program: dK and dV of block_n keys of one KV head of one sequence, and their part of dQ and of the mask's gradient.

    Products are transposed, [BLOCK_N, BLOCK_M], so that P^T and dS^T are operands in registers. The walk over the heads of the
    group and over the blocks of rows is one loop with one software pipeline. dq, dk and dv are contiguous.
    """
    BLOCK_M: tl.constexpr = var.block_m
    BLOCK_N: tl.constexpr = var.block_n
    BLOCK_D: tl.constexpr = var.block_d
    BLOCK_DV: tl.constexpr = var.block_dv
    KV_HEADS: tl.constexpr = var.num_heads // var.groups
    pid = tl.program_id(0)
    head_kv = pid // num_n % KV_HEADS
    batch = pid // num_n // KV_HEADS
    q_row0, q_len = _row_range(cu_q_ptr, batch, seqlen_q, var.varlen)
    k_row0, kv_len = _row_range(cu_k_ptr, batch, seqlen_k, var.varlen)
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
    q_heads: tl.constexpr = var.num_heads * var.dim
    if var.adds_dq:
        dq_ptr += (batch64 * seqlen_q + q_row64) * q_heads
    k_ptr += batch64 * stride_kb + k_row64 * stride_kt + kv64 * stride_kh
    v_ptr += batch64 * stride_vb + k_row64 * stride_vt + kv64 * stride_vh
    cols = n0 + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr, cols, kv_len, stride_kt, var.dim, var.block_d)
    v = _load_rows(v_ptr, cols, kv_len, stride_vt, var.dim_v, var.block_dv)

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
        else:
            q = _load_rows(q_ptr + head64 * stride_qh, rows, q_len, stride_qt, var.dim, BLOCK_D)
            stats = _stats_at(batch, head, q_row0, stride_lb, stride_lh, var.varlen)
        if var.tma:
            lse = lse_desc.load([batch * var.num_heads + head, m]).reshape(BLOCK_M)
        else:
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
            dout = _load_rows(dout_ptr + head64 * stride_gh, rows, q_len, stride_gt, var.dim_v, BLOCK_DV)
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
        if var.adds_dq:
            dq = tl.dot(ds.T, k, input_precision=var.precision) * scale
        if var.adds_dq and var.tma_dq:
            dq_desc.atomic_add([batch, head, m, 0], dq.reshape(1, 1, BLOCK_M, BLOCK_D))
        elif var.adds_dq:
            offs_d = tl.arange(0, BLOCK_D)
            keep = (rows < q_len)[:, None]
            if var.dim < BLOCK_D:
                keep = keep & (offs_d < var.dim)[None, :]
            dq_ptrs = dq_ptr + rows[:, None].to(tl.int64) * q_heads + (head * var.dim + offs_d)[None, :]
            tl.atomic_add(dq_ptrs, dq, mask=keep, sem="relaxed")

    k_row = (batch64 * seqlen_k + k_row64) * KV_HEADS + kv64
    _store_rows(dk_ptr + k_row * var.dim, dk * scale, cols, kv_len, KV_HEADS * var.dim, var.dim, var.block_d)
    _store_rows(dv_ptr + k_row * var.dim_v, dv, cols, kv_len, KV_HEADS * var.dim_v, var.dim_v, var.block_dv)


@triton.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "num_m"])
def _attn_bwd_q(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    dq_ptr,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
    seqlen_k,
    num_m,
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
    q_row0, q_len = _row_range(cu_q_ptr, batch, seqlen_q, var.varlen)
    k_row0, kv_len = _row_range(cu_k_ptr, batch, seqlen_k, var.varlen)
    m0 = block * BLOCK_M
    if m0 >= q_len:
        return

    batch64 = 0 if var.varlen else batch.to(tl.int64)
    q_row64 = q_row0.to(tl.int64) if var.varlen else 0
    k_row64 = k_row0.to(tl.int64) if var.varlen else 0
    head64 = head.to(tl.int64)
    kv64 = (head // var.groups).to(tl.int64)
    stats = _stats_at(batch, head, q_row0, stride_lb, stride_lh, var.varlen)
    q_ptr += batch64 * stride_qb + q_row64 * stride_qt + head64 * stride_qh
    dout_ptr += batch64 * stride_gb + q_row64 * stride_gt + head64 * stride_gh
    k_ptr += batch64 * stride_kb + k_row64 * stride_kt + kv64 * stride_kh
    v_ptr += batch64 * stride_vb + k_row64 * stride_vt + kv64 * stride_vh
    if var.mask != "none":
        mask_ptr += batch.to(tl.int64) * stride_mb + head64 * stride_mh
    rows = m0 + tl.arange(0, BLOCK_M)
    q = _load_rows(q_ptr, rows, q_len, stride_qt, var.dim, var.block_d)
    dout = _load_rows(dout_ptr, rows, q_len, stride_gt, var.dim_v, var.block_dv)
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

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in tl.range(lo, hi, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        cols = n + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, cols, kv_len, stride_kt, var.dim, var.block_d)
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
        v = _load_rows(v_ptr, cols, kv_len, stride_vt, var.dim_v, var.block_dv)
        dp = tl.dot(dout, v.T, input_precision=var.precision)
        ds = (p * (dp - delta[:, None]) * slope).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=var.precision)
    q_row = (batch64 * seqlen_q + q_row64) * var.num_heads + head64
    _store_rows(dq_ptr + q_row * var.dim, dq * scale, rows, q_len, var.num_heads * var.dim, var.dim, var.block_d)


def plan_backward(tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTiles | None = None) -> Run:
    """Plan calls that look like this one, dense or packed: a run maps `BackwardTensors` to `Gradients`.

    options.deterministic chooses the kernels whose results repeat. `tiles` overrides the choice, for tuning.
    """
    return _BackwardPlan(tensors, options, tiles)


class _BackwardPlan:
    """The launches of one kind of call."""

    __slots__ = (
        "_options",
        "_tiles",
        "_variant",
        "_uses_tma",
        "_adds_dq",
        "_blocks",
        "_delta",
        "_expand_mask",
        "_kv",
        "_layout",
        "_q",
        "_stats_shape",
    )

    def __init__(self, tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTiles | None) -> None:
        tensors = _laid_out(tensors)
        q, k, v = tensors[:3]
        mask = tensors.mask
        varlen = tensors.cu_seqlens_q is not None
        if tiles is None:
            arch = spec.arch_of(q.device)
            tiles = backward_tiles(arch, q.element_size(), q.shape[-1], v.shape[-1], masked=mask is not None)
        self._options = options
        self._tiles = tiles
        self._uses_tma = tiles.keys.tma and not varlen and _tma_strides(q) and _tma_strides(tensors.dout)
        self._adds_dq = tiles.atomic_dq and not options.deterministic
        self._expand_mask = options.deterministic
        variant = BackwardVariant(
            num_heads=q.shape[-2],
            groups=q.shape[-2] // k.shape[-2],
            dim=q.shape[-1],
            dim_v=v.shape[-1],
            block_d=padded_dim(q.shape[-1]),
            block_dv=padded_dim(v.shape[-1]),
            block_m=tiles.keys.block_m,
            block_n=tiles.keys.block_n,
            varlen=varlen,
            has_left=options.window_size[0] >= 0,
            has_right=options.window_size[1] >= 0,
            has_softcap=options.softcap != 0.0,
            mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
            mask_grad=tensors.needs_dmask,
            adds_dq=self._adds_dq,
            tma=self._uses_tma,
            tma_dq=self._uses_tma and tiles.tma_dq and not triton.knobs.runtime.interpret,
            precision="ieee" if q.dtype == torch.float32 else "tf32",
        )
        self._variant = variant
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        padded = _padded_rows(options.max_seqlen_q)
        self._blocks = batch * (padded // _DELTA_ROWS)
        heads = q.shape[-2]
        self._stats_shape = (heads, _padded_rows(q.shape[0]) + _STATS_ROWS.value * batch) if varlen else (batch, heads, padded)
        self._delta = self._plan_delta(tensors, options, variant)
        self._kv = self._plan_kv(tensors, options, variant, tiles.keys, batch)
        self._q = None if self._adds_dq else self._plan_q(tensors, options, variant, tiles.queries, batch)

    def __call__(self, tensors: BackwardTensors) -> Gradients:
        tensors = _laid_out(tensors)
        q, k, v, sinks, mask = tensors[:5]
        if self._uses_tma and (q.data_ptr() | tensors.dout.data_ptr()) & 15:
            keys = replace(self._tiles.keys, tma=False)
            return _BackwardPlan(tensors, self._options, replace(self._tiles, keys=keys))(tensors)
        # Rows of a packed tensor that belong to no sequence have no gradient, and no program writes them.
        allocate = torch.zeros_like if tensors.cu_seqlens_q is not None else torch.empty_like
        layout = torch.contiguous_format
        dk = allocate(k, memory_format=layout)
        dv = allocate(v, memory_format=layout)
        if self._adds_dq:
            dq = torch.zeros_like(q, dtype=torch.float32, memory_format=layout)
        else:
            dq = allocate(q, memory_format=layout)
        dmask = self._allocate_dmask(tensors)
        lse2 = q.new_empty(self._stats_shape, dtype=torch.float32)
        delta = torch.empty_like(lse2)
        dsinks = None
        if sinks is not None and tensors.needs_dsinks:
            dsinks = delta.new_zeros(q.shape[-2], self._blocks)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        ends = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        if self._delta is not None:
            self._delta((tensors.out, tensors.dout, tensors.lse, tensors.dlse, sinks, lse2, delta, dsinks, ends[0]))
        given = (q, k, v, tensors.dout, lse2, delta, mask)
        if self._kv is not None:
            descriptors: tuple[Any, ...] = (None,) * 5
            if self._uses_tma:
                rows = self._variant.block_m
                descriptors = (
                    _descriptor(q, rows, self._variant.block_d),
                    _descriptor(tensors.dout, rows, self._variant.block_dv),
                    TensorDescriptor.from_tensor(lse2.flatten(0, 1), [1, rows]),
                    TensorDescriptor.from_tensor(delta.flatten(0, 1), [1, rows]),
                    _descriptor(dq, rows, self._variant.block_d) if self._variant.tma_dq else None,
                )
            self._kv((*given, dq if self._adds_dq else None, dk, dv, dmask, *descriptors, *ends))
        if self._q is not None:
            self._q((*given, dq, *ends))
        return Gradients(
            dq.to(q.dtype),
            dk,
            dv,
            None if dsinks is None or sinks is None else dsinks.sum(1).to(sinks.dtype),
            None if dmask is None or mask is None else dmask.sum_to_size(mask.shape).to(mask.dtype),
        )

    def _allocate_dmask(self, tensors: BackwardTensors) -> Tensor | None:
        """Zeros that the kernel adds to. A deterministic sum needs an element of its own for each addition."""
        mask = tensors.mask
        if mask is None or not tensors.needs_dmask:
            return None
        shape = mask.shape
        if self._expand_mask:
            q = tensors.q
            shape = torch.Size((q.shape[0], q.shape[2], q.shape[1], tensors.k.shape[1]))
        return torch.zeros(shape, dtype=torch.float32, device=mask.device)

    def _plan_delta(self, tensors: BackwardTensors, options: AttentionOptions, variant: BackwardVariant) -> Launch | None:
        grid = self._blocks * variant.num_heads
        if grid == 0:
            return None
        varying = (options.max_seqlen_q, _padded_rows(options.max_seqlen_q) // _DELTA_ROWS)
        rows = (*_row_strides(tensors.out), *_row_strides(tensors.dout))
        strides = (*rows, *_head_strides(tensors.lse.shape), *_head_strides(self._stats_shape))
        # Only what the kernel reads may tell variants apart, so that few of them are compiled.
        plain = replace(variant, groups=1, dim=0, block_d=0, block_m=0, block_n=0, has_left=False, has_right=False)
        plain = replace(plain, has_softcap=False, mask="none", mask_grad=False, adds_dq=False)
        plain = replace(plain, tma=False, tma_dq=False)
        return Launch(_attn_bwd_delta, grid, varying, (_DELTA_ROWS, plain), {"num_warps": 4, "num_stages": 1}, strides=strides)

    def _plan_kv(
        self, tensors: BackwardTensors, options: AttentionOptions, variant: BackwardVariant, tile: TileConfig, batch: int
    ) -> Launch | None:
        num_n = -(-options.max_seqlen_k // tile.block_n)
        grid = batch * variant.num_heads // variant.groups * num_n
        if grid == 0:
            return None
        dmask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if tensors.mask is not None and variant.mask_grad:
            shape = torch.Size((tensors.q.shape[0], tensors.q.shape[2], tensors.q.shape[1], tensors.k.shape[1]))
            dmask_strides = _contiguous_strides(shape if self._expand_mask else tensors.mask.shape)
        varying = _varying(options, num_n)
        strides = (*_strides(tensors, self._stats_shape), *dmask_strides)
        if self._uses_tma:
            return _TmaLaunch(grid, (*varying, *strides, variant), _launch_options(tile))
        return Launch(_attn_bwd_kv, grid, varying, (variant,), _launch_options(tile), strides=strides)

    def _plan_q(
        self, tensors: BackwardTensors, options: AttentionOptions, variant: BackwardVariant, tile: TileConfig, batch: int
    ) -> Launch | None:
        num_m = -(-options.max_seqlen_q // tile.block_m)
        grid = batch * variant.num_heads * num_m
        if grid == 0:
            return None
        variant = replace(variant, block_m=tile.block_m, block_n=tile.block_n, mask_grad=False, adds_dq=False)
        variant = replace(variant, tma=False, tma_dq=False)
        varying = _varying(options, num_m)
        return Launch(
            _attn_bwd_q, grid, varying, (variant,), _launch_options(tile), strides=_strides(tensors, self._stats_shape)
        )


class _TmaLaunch:
    """A launch with tensor descriptors, through the JIT at each call: the descriptors hold addresses."""

    __slots__ = ("_grid", "_numbers", "_options")

    def __init__(self, grid: int, numbers: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._grid = grid
        self._numbers = numbers
        self._options = options

    def __call__(self, pointers: tuple[Any, ...]) -> None:
        with on_device_of(pointers[0]):
            _attn_bwd_kv[self._grid,](*pointers, *self._numbers, **self._options)


def _laid_out(tensors: BackwardTensors) -> BackwardTensors:
    """The same numbers in layouts that the kernels read: unit strides along head_dim, and contiguous row statistics."""
    return tensors._replace(
        q=_with_unit_stride(tensors.q),
        k=_with_unit_stride(tensors.k),
        v=_with_unit_stride(tensors.v),
        out=_with_unit_stride(tensors.out),
        dout=_with_unit_stride(tensors.dout),
        lse=tensors.lse.contiguous(),
        dlse=None if tensors.dlse is None else tensors.dlse.contiguous(),
    )


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of (batch, token, head); 0 for the first if the tensor is packed."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def _padded_rows(rows: int) -> int:
    return -(-rows // _STATS_ROWS.value) * _STATS_ROWS.value


def _head_strides(shape: Sequence[int]) -> tuple[int, int]:
    """Strides of (batch, head) of contiguous row statistics; 0 for the first if they are packed."""
    return (0 if len(shape) == 2 else shape[1] * shape[2], shape[-1])


def _tma_strides(x: Tensor) -> bool:
    """Whether TMA can read a tensor with these strides, which must be multiples of 16 bytes. The address must be one, too."""
    return all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _descriptor(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """(batch, heads, seqlen, dim). Rows and columns out of bounds read as zero and are not written."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d])


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor, 0 where a dimension is broadcast."""
    strides = [0, 0, 0, 0]
    step = 1
    for i in (3, 2, 1, 0):
        strides[i] = 0 if shape[i] == 1 else step
        step *= shape[i]
    return tuple(strides)


def _varying(options: AttentionOptions, blocks: int) -> tuple[float, ...]:
    lengths = (options.max_seqlen_q, options.max_seqlen_k)
    return (float(options.softmax_scale), float(options.softcap), *options.window_size, *lengths, blocks)


def _strides(tensors: BackwardTensors, stats_shape: Sequence[int]) -> tuple[int, ...]:
    """In the order of the kernels' parameters."""
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if tensors.mask is not None:
        sizes = zip(tensors.mask.shape, tensors.mask.stride(), strict=True)
        mask_strides = tuple([0 if size == 1 else stride for size, stride in sizes])
    rows = (tensors.q, tensors.k, tensors.v, tensors.dout)
    return (*[stride for x in rows for stride in _row_strides(x)], *_head_strides(stats_shape), *mask_strides)


def _launch_options(tile: TileConfig) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
