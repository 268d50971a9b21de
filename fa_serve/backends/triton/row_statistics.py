"""The statistics of query rows that a backward pass starts from, and the gradient of the sinks, which follows from them.

    delta = rowsum(dO * O) - dlse         dsinks = -rowsum(exp(sink - lse) * delta)

    statistics = RowStatistics(tensors, options)     # once for calls that look alike
    lse2, delta, dsinks = statistics(tensors)

Both backward passes read them, the portable one and Hopper's. Left out: the other gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, BackwardTensors
from fa_serve.backends.triton.primitives import LOG2E
from fa_serve.backends.triton.tiles import padded_dim
from fa_serve.launching.launch import Launch, row_strides

STATS_ROWS = tl.constexpr(128)
"""Row statistics of a sequence start at a multiple of this number and are padded to a multiple of it."""
_DELTA_ROWS = 32  # query rows of one program


@triton.jit
def row_range(cu_ptr, batch, seqlen, VARLEN: tl.constexpr):
    """-> the first row of a sequence and its length."""
    if VARLEN:
        first = tl.load(cu_ptr + batch)
        return first, tl.load(cu_ptr + batch + 1) - first
    return 0, seqlen


@triton.jit
def load_rows(ptr, rows, length, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D]; rows past the end of the sequence belong to another sequence and read as 0."""
    cols = tl.arange(0, BLOCK_D)
    keep = (rows < length)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (cols < DIM)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=keep, other=0.0)


@triton.jit
def stats_at(batch, head, q_row0, stride_lb, stride_lh, VARLEN: tl.constexpr):
    """Where the row statistics of a head of a sequence begin. They are padded, so that whole tiles can be read."""
    if VARLEN:
        return head.to(tl.int64) * stride_lh + (q_row0 + batch * STATS_ROWS) // STATS_ROWS * STATS_ROWS
    return batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh


@triton.jit(do_not_specialize=["seqlen_q", "num_m"])
def attn_bwd_delta(
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
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """The row statistics of BLOCK_M rows of one head of one sequence, and their part of the sink's gradient.

    lse2_ptr:   lse in base 2. Rows that see no key and rows of the padding have +inf, so that their P is 0
    dsinks_ptr: (num_heads, batch * num_m), one sum for each program, so that adding them up has a fixed order
    """
    pid = tl.program_id(0)
    head = pid % NUM_HEADS
    block = pid // NUM_HEADS
    batch = block // num_m
    q_row0, q_len = row_range(cu_q_ptr, batch, seqlen_q, VARLEN)
    m0 = block % num_m * BLOCK_M
    if m0 >= (q_len + STATS_ROWS - 1) // STATS_ROWS * STATS_ROWS:
        return
    rows = m0 + tl.arange(0, BLOCK_M)
    head64 = head.to(tl.int64)
    batch64 = 0 if VARLEN else batch.to(tl.int64)
    row64 = q_row0.to(tl.int64) if VARLEN else 0
    out_ptr += batch64 * stride_ob + row64 * stride_ot + head64 * stride_oh
    dout_ptr += batch64 * stride_gb + row64 * stride_gt + head64 * stride_gh
    given = batch64 * stride_lb + head64 * stride_lh + row64
    out = load_rows(out_ptr, rows, q_len, stride_ot, DIM, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr, rows, q_len, stride_gt, DIM, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + given + rows, mask=rows < q_len, other=0.0)
    lse = tl.load(lse_ptr + given + rows, mask=rows < q_len, other=float("-inf"))
    lse2 = tl.where(lse < -1e30, float("inf"), lse * LOG2E)
    stats = stats_at(batch, head, q_row0, stride_sb, stride_sh, VARLEN)
    tl.store(lse2_ptr + stats + rows, lse2)
    tl.store(delta_ptr + stats + rows, delta)
    if dsinks_ptr is not None:
        weight = tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E - lse2)
        tl.store(dsinks_ptr + head64 * (tl.num_programs(0) // NUM_HEADS) + block, -tl.sum(weight * delta, 0))


class RowStatistics:
    """The plan of the statistics of one kind of call, whose out and dout have unit strides along head_dim.

    shape: of the statistics, float32: (batch, num_heads, rows), or (num_heads, rows) if packed; rows are padded, see `stats_at`
    """

    __slots__ = ("_blocks", "_launch", "shape")

    def __init__(self, tensors: BackwardTensors, options: AttentionOptions) -> None:
        total = tensors.q.shape[0]
        heads = tensors.q.shape[-2]
        varlen = tensors.cu_seqlens_q is not None
        batch = total if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        padded = _padded_rows(options.max_seqlen_q)
        self._blocks = batch * (padded // _DELTA_ROWS)
        self.shape = (heads, _padded_rows(total) + STATS_ROWS.value * batch) if varlen else (batch, heads, padded)
        dim = tensors.out.shape[-1]
        strides = (
            *row_strides(tensors.out),
            *row_strides(tensors.dout),
            *head_strides(tensors.lse.shape),
            *head_strides(self.shape),
        )
        self._launch: Launch | None = None
        if self._blocks * heads:
            numbers = (options.max_seqlen_q, padded // _DELTA_ROWS)
            fixed = (_DELTA_ROWS, heads, dim, padded_dim(dim), varlen)
            launch_options = {"num_warps": 4, "num_stages": 1}
            self._launch = Launch(attn_bwd_delta, self._blocks * heads, numbers, fixed, launch_options, strides=strides)

    def __call__(self, tensors: BackwardTensors) -> tuple[Tensor, Tensor, Tensor | None]:
        """-> lse in base 2 and delta, of `shape`, and the gradient of the sinks if it was asked for. lse and dlse are
        contiguous."""
        delta = tensors.lse.new_empty(self.shape)
        lse2 = delta.new_empty(self.shape)
        sinks = tensors.sinks
        parts = None
        if sinks is not None and tensors.needs_dsinks:
            parts = delta.new_zeros(tensors.q.shape[-2], self._blocks)
        if self._launch is not None:
            given = (tensors.out, tensors.dout, tensors.lse, tensors.dlse, sinks)
            self._launch((*given, lse2, delta, parts, tensors.cu_seqlens_q))
        dsinks = None if parts is None or sinks is None else parts.sum(1).to(sinks.dtype)
        return lse2, delta, dsinks


def head_strides(shape: Sequence[int]) -> tuple[int, int]:
    """Strides of (batch, head) of contiguous row statistics; packed statistics have 0 for the batch."""
    return (0 if len(shape) == 2 else shape[1] * shape[2], shape[-1])


def _padded_rows(rows: int) -> int:
    step: int = STATS_ROWS.value
    return -(-rows // step) * step
