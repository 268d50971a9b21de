"""The kernel that combines the results of the splits of a row's keys (Dao et al. 2023, "Flash-Decoding").

Each split stores the output and the log-sum-exp of its rows in a float32 buffer: outputs (splits, tokens, query heads,
head_dim_v), followed by log-sum-exps (splits, tokens, query heads). The tokens of all sequences are end to end, so the buffer
does not grow with unequal lengths. A row is combined with the weights exp(lse - max lse), in the order of splits.

The kernel reads the table of splits (see `split_kv.tile_scheduler`), so it leaves out sequences that the attention kernel
leaves out, and rows that are whole. This module leaves out which keys a split has (`split_kv.split`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.hopper.split_kv.split import SPLIT_BASE
from fa_serve.backends.triton.primitives import LN2, LOG2E, wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2

_PROGRAMS = 2048
"""The most programs of a launch. Each combines rows until none is left, because the host does not know how many there are."""


@triton.jit(do_not_specialize=["capacity", "tokens", "num_heads", "logs", "lse_stride", "min_splits"])
def combine_splits(
    out_ptr,
    lse_ptr,
    buffer_ptr,
    table_ptr,
    capacity,
    tokens,
    num_heads,
    logs,
    lse_stride,
    min_splits,
    stride_token,
    stride_head,
    QUERIES: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Combine the rows of one tile after another, BLOCK_ROWS at a time. A row is one query of one query head.

    capacity: records that the table has room for
    logs:     where the log-sum-exps begin in the buffer
    min_splits: rows with fewer splits than this are left out, because the attention kernel has written them

    The weights need the greatest log-sum-exp, so the log-sum-exps are read once before the outputs, and again with the outputs,
    which are added one after the other. A thread keeps its columns, and no load depends on another one.
    """
    records = tl.load(table_ptr + capacity * 8 + 1)
    parts = (QUERIES * num_heads + BLOCK_ROWS - 1) // BLOCK_ROWS
    columns = tl.arange(0, BLOCK_DV)
    wait_for_previous_kernel(True)
    for item in range(tl.program_id(0), records * parts, tl.num_programs(0)):
        record = table_ptr + item // parts * 8
        begin = item % parts * BLOCK_ROWS
        row = tl.load(record)
        code = tl.load(record + 1)
        first = tl.load(record + 2) + row
        rows = tl.minimum(tl.load(record + 3) - row, QUERIES) * num_heads
        splits = code // SPLIT_BASE
        if (code % SPLIT_BASE == 0) & (splits >= min_splits) & (begin < rows):
            slot = begin + tl.arange(0, BLOCK_ROWS)
            live = slot < rows
            token = (first + slot // num_heads).to(tl.int64)
            head = (slot % num_heads).to(tl.int64)
            at = token * num_heads + head
            stride_split = tl.cast(tokens, tl.int64) * num_heads
            row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
            for split in range(0, splits):
                lse = tl.load(buffer_ptr + logs + at + split * stride_split, mask=live, other=float("-inf")) * LOG2E
                new_max = tl.maximum(row_max, lse)
                safe = tl.where(new_max == float("-inf"), 0.0, new_max)
                row_sum = row_sum * tl.exp2(row_max - safe) + tl.exp2(lse - safe)
                row_max = new_max
            empty = row_sum == 0.0  # rows without keys
            inverse = tl.where(empty, 0.0, 1.0 / row_sum)
            safe = tl.where(empty, 0.0, row_max)
            keep = live[:, None] & (columns < DIM_V)[None, :]
            out = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
            for split in range(0, splits):
                of_split = at + split * stride_split
                lse = tl.load(buffer_ptr + logs + of_split, mask=live, other=float("-inf")) * LOG2E
                values = tl.load(buffer_ptr + of_split[:, None] * DIM_V + columns[None, :], mask=keep, other=0.0)
                out += values * (tl.exp2(lse - safe) * inverse)[:, None]
            cells = out_ptr + (token * stride_token + head * stride_head)[:, None] + columns[None, :]
            tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=keep)
            if lse_ptr is not None:
                combined = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
                tl.store(lse_ptr + head * lse_stride + token, combined, mask=live)


class Combine(NamedTuple):
    """The launch that follows a launch whose keys may be split, and the buffer between them.

    launch:      combines splits
    buffer_size: float32 numbers in the buffer to which the splits write
    logs:        where in the buffer the log-sum-exps begin
    """

    launch: Launch
    buffer_size: int
    logs: int

    def buffer(self, q: Tensor) -> Tensor:
        return q.new_empty(self.buffer_size, dtype=torch.float32)

    def __call__(self, out: Tensor, lse: Tensor | None, buffer: Tensor, table: Tensor | None) -> None:
        self.launch((out, lse, buffer, table))


def plan_combine(
    *,
    capacity: int,
    queries: int,
    tokens: int,
    num_heads: int,
    splits: int,
    head_dim_v: int,
    out_strides: tuple[int, int],
    padded: bool,
) -> Combine:
    """Plan the launch that combines up to `splits` splits of each row.

    capacity: records that the table has room for
    queries:  queries of one head in a tile; tokens: queries of all sequences; num_heads: query heads
    padded:   tiles are padded, so the attention kernel leaves all rows to this launch
    """
    block_dv = max(16, power_of_2(head_dim_v))
    block_rows = 8 if block_dv <= 128 else 4
    rows = splits * tokens * num_heads
    programs = min(capacity * -(-queries * num_heads // block_rows), _PROGRAMS)
    launch = Launch(
        combine_splits,
        programs,
        varying=(capacity, tokens, num_heads, rows * head_dim_v, tokens, 1 if padded else 2),
        strides=out_strides,
        fixed=(queries, head_dim_v, block_dv, block_rows),
        options=launch_options(True, 4),
    )
    return Combine(launch, rows * (head_dim_v + 1), rows * head_dim_v)
