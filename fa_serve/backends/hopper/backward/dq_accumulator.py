"""The sum of dQ in float32, to which all key tiles add: its order in memory, and how it becomes the gradient of q.

The sum has `width` numbers for each entry of the row statistics. Each square of 64 rows by 64 columns is stored in the order in
which the threads of a warpgroup hold a wgmma accumulator: a thread adds 4 neighbouring numbers with one instruction, and a warp
512 neighbouring bytes. FlashAttention-3 instead reorders each square in shared memory for the copy engine.

In a square, row 16 w + 8 h + r and column 8 n + 2 q + c are at index ((((n * 4 + w) * 8 + r) * 4 + q) * 2 + h) * 2 + c: lane
4 r + q of warp w has the four numbers that differ in h and c.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.triton.row_statistics import STATS_ROWS
from fa_serve.launching.launch import Launch

SQUARE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0]))
"""Layout of a square [8, 512] in the order of the sum, or of two squares [16, 512]."""
_ROWS = 64


@gluon.jit
def add_to_dq(sum_ptr, rows_of_dq):
    """Add one or two squares, [64, 64 or 128], which wgmma has computed, at `sum_ptr`.

    Additions of several thread blocks happen in the order in which these run.
    """
    OCTETS: gl.constexpr = rows_of_dq.shape[1] // 8
    values = rows_of_dq.reshape([4, 2, 8, OCTETS, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([OCTETS, 512])
    values = gl.convert_layout(values, SQUARE_LAYOUT, assert_trivial=True)
    rows = gl.expand_dims(gl.arange(0, OCTETS, layout=gl.SliceLayout(1, SQUARE_LAYOUT)), 1)
    columns = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, SQUARE_LAYOUT)), 0)
    gl.atomic_add(sum_ptr + rows * 512 + columns, values, sem="relaxed")


@triton.jit(do_not_specialize=["scale", "seqlen_q", "num_m", "num_heads", "stats_width"])
def _convert_dq(
    sum_ptr,
    dq_ptr,
    cu_q_ptr,
    scale,
    seqlen_q,
    num_m,
    num_heads,
    stats_width,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """One program converts 64 rows of dQ of one head of one sequence, PART columns at a time. dq is contiguous."""
    pid = tl.program_id(0)
    m = pid % num_m
    head = pid // num_m % num_heads
    batch = pid // num_m // num_heads
    first = batch * seqlen_q
    length = seqlen_q
    stats_row = batch * num_heads + head
    stats_column = m * 64
    if VARLEN:
        first = tl.load(cu_q_ptr + batch)
        length = tl.load(cu_q_ptr + batch + 1) - first
        stats_row = head
        stats_column = (first + batch * STATS_ROWS) // STATS_ROWS * STATS_ROWS + m * 64
    if m * 64 < length:
        rows = tl.arange(0, 64)[:, None]
        slab = sum_ptr + (stats_row.to(tl.int64) * stats_width + stats_column) * WIDTH
        token = first.to(tl.int64) + m * 64 + rows
        for part in tl.static_range(WIDTH // PART):
            columns = part * PART + tl.arange(0, PART)[None, :]
            squares = tl.load(slab + part * PART * 64 + tl.arange(0, 64 * PART))
            squares = tl.reshape(squares, (PART // 64, 8, 4, 8, 4, 2, 2))
            dq = tl.reshape(tl.permute(squares, (2, 5, 3, 0, 1, 4, 6)), (64, PART)) * scale
            target = dq_ptr + (token * num_heads + head) * HEAD_DIM + columns
            tl.store(target, dq.to(dq_ptr.dtype.element_ty), mask=(m * 64 + rows < length) & (columns < HEAD_DIM))


def convert_launch(
    queries: tuple[int, int, int], width: int, seqlen_q: int, stats_width: int, varlen: bool, scale: float
) -> Launch | None:
    """The launch (sum, dq, cu_seqlens_q or None) that writes dQ = scale * sum; None if there are no rows.

    queries:     sequences, heads and head_dim of q
    stats_width: statistics from one head to the next
    """
    batch, num_heads, head_dim = queries
    num_m = -(-seqlen_q // _ROWS)
    grid = batch * num_heads * num_m
    numbers = (scale, seqlen_q, num_m, num_heads, stats_width)
    fixed = (head_dim, width, 64 if width % 128 else 128, varlen)
    return Launch(_convert_dq, grid, numbers, fixed, {"num_warps": 4}) if grid else None
