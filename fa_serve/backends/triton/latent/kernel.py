"""The kernel of latent attention: rows of all query heads against pages whose values are the first numbers of their keys.

The module `plan` describes the algorithm and launches the kernel, and `splits` cuts the keys. This module leaves out what a
call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fa_serve.backends.triton.float8_conversions import widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    clear_rows_past_end,
    find_tile,
    finish_softmax,
    online_softmax_update,
    wait_for_previous_kernel,
)
from fa_serve.backends.triton.splits import (
    COUNTS,
    SplitVariant,
    sequence_lengths,
    sequences_of_share,
    split_of_sequence,
    store_rows,
    store_split,
    visible_blocks,
)


@dataclass(frozen=True, slots=True)
class LatentVariant:
    """What the kernel is compiled for.

    split:      the fields that the kernel which combines splits needs as well; its dim_v is the size of values
    rest:       numbers of a key after its value; block_rest: the same, padded to a tile
    width:      columns of values in a slice; slices: the number of slices
    prefetch:   as in `plan.LatentTiles`
    page_size:  tokens per page
    has_right:  some queries of a sequence do not see all of its keys
    aligned:    the strides of pages and tokens are multiples of 16
    wide:       offsets within a page need 64 bits, see `key_pages.has_wide_rows`
    precision:  `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32
    ptx:        inline PTX is available
    converts:   one instruction converts float16 to bfloat16
    tile_block: the width of the prefix sum that finds a prompt's tile, 0 for decoding
    """

    split: SplitVariant
    rest: int
    block_rest: int
    width: int
    slices: int
    prefetch: bool
    page_size: int
    has_right: bool
    aligned: bool
    wide: bool
    precision: str
    ptx: bool
    converts: bool
    tile_block: int


@triton.jit
def _widened(x, dtype: tl.constexpr, var: tl.constexpr):
    """A tile of the cache in the dtype of the queries."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16 and not var.converts:
        return x.to(tl.float32).to(dtype)
    return widen(x, dtype, var.ptx)


@triton.jit
def _prefetch(row_ptrs, DIM: tl.constexpr):
    """Fetch rows of DIM 16-bit numbers to the L2 cache, 64 numbers or 128 bytes at a time."""
    columns = tl.minimum(tl.arange(0, 16), (DIM - 1) // 64) * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_ptrs[:, None] + columns[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _walk(q_r, q_c, span, k_ptr, table_ptr, positions, kv_len, factor, window_right, strides, var: tl.constexpr):
    """The inner loop over key blocks. q_r: Q_r [BLOCK_M, BLOCK_R], q_c: the slices of Q_c [BLOCK_M, WIDTH]

    -> slices of out [BLOCK_M, WIDTH], not yet divided by the sum, the largest score and the sum of exponentials [BLOCK_M].
    """
    begin, end = span
    stride_page, stride_token = strides
    BLOCK_M: tl.constexpr = var.split.block_m
    BLOCK_N: tl.constexpr = var.split.block_n
    DIM_C: tl.constexpr = var.split.dim_v
    WIDTH: tl.constexpr = var.width
    SLICES: tl.constexpr = var.slices
    offs_c = tl.arange(0, WIDTH)
    offs_r = tl.arange(0, var.block_rest)
    offs_n = tl.arange(0, BLOCK_N)
    acc = ()
    for _ in tl.static_range(SLICES):
        acc += (tl.zeros([BLOCK_M, WIDTH], tl.float32),)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    inner_end = kv_len // BLOCK_N
    if var.has_right:
        inner_end = tl.minimum(inner_end, tl.maximum(tl.min(positions, 0) + window_right + 1, 0) // BLOCK_N)
    next_page = read_pages(table_ptr, begin, offs_n, 0, kv_len, var)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        if var.prefetch:
            # The page numbers are read again. Using `next_page` here would keep more registers alive: the loop would reload 15
            # registers instead of 3.
            ahead = (block + 1) * BLOCK_N + offs_n
            ahead_page = tl.load(table_ptr + ahead // var.page_size, mask=ahead < kv_len, other=0)
            _prefetch(k_ptr + key_offsets(ahead_page, block + 1, offs_n, stride_page, stride_token, var), DIM_C + var.rest)
        # A page past the end may belong to another sequence, and 0 * NaN is NaN, so keys past the end are not read.
        owned = cols < kv_len
        page = next_page
        next_page = read_pages(table_ptr, block + 1, offs_n, 0, kv_len, var)
        row_ptrs = k_ptr + key_offsets(page, block, offs_n, stride_page, stride_token, var)[:, None]
        r = tl.load(row_ptrs + (DIM_C + offs_r)[None, :], mask=owned[:, None] & (offs_r < var.rest)[None, :], other=0.0)
        s = tl.dot(q_r, tl.trans(_widened(r, q_r.dtype, var)), input_precision=var.precision)
        values = ()
        for i in tl.static_range(SLICES):
            columns = i * WIDTH + offs_c
            c = tl.load(row_ptrs + columns[None, :], mask=owned[:, None] & (columns < DIM_C)[None, :], other=0.0)
            c = _widened(c, q_r.dtype, var)
            s = tl.dot(q_c[i], tl.trans(c), s, input_precision=var.precision)
            values += (c,)
        if block >= inner_end:
            keep = owned[None, :]
            if var.has_right:
                keep = keep & (cols[None, :] <= positions[:, None] + window_right)
            s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        sums = ()
        for i in tl.static_range(SLICES):
            sums += (tl.dot(p.to(q_r.dtype), values[i], acc[i] * alpha[:, None], input_precision=var.precision),)
        acc = sums
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["max_k", *COUNTS, "window_right", "skip_q", "total_q", "stride_lh", "stride_table"])
def attn_latent(
    k_ptr,
    q_ptr,
    out_ptr,
    lse_ptr,
    splits_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    k_descale_ptr,
    v_descale_ptr,
    max_k,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    min_blocks,
    max_q,
    window_left,
    window_right,
    skip_q,
    total_q,
    stride_lh,
    stride_table,
    scale,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    var: tl.constexpr,
):
    """One program: one tile of packed rows, and one split, one share of the batch's key blocks or all keys of a sequence."""
    wait_for_previous_kernel(var.split.pdl, True)  # `_combine` reads the lengths before it waits
    SPLIT: tl.constexpr = var.split
    BLOCK_M: tl.constexpr = var.split.block_m
    BLOCK_N: tl.constexpr = var.split.block_n
    GROUPS: tl.constexpr = var.split.groups
    sequences = (cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left)
    unit = tl.program_id(0) % units
    share = tl.program_id(0) // units
    head_kv = unit // tiles_per_head
    row_first = unit % tiles_per_head * BLOCK_M
    end_of_rows = tl.load(cu_q_ptr + batch)
    if var.tile_block > 0:
        # a tile of a prompt has one split, which is the whole sequence
        share, tile = find_tile(share, cu_q_ptr, batch, skip_q, GROUPS, BLOCK_M, var.tile_block)
        row_first = tile * BLOCK_M
        first_seq = share
        stop = tl.minimum(share + 1, batch)
        seq_start = 0
        line = (0, 0, 0)
    else:
        of_batch = tl.arange(0, SPLIT.batch_block)
        first_seq, stop, seq_start, line = sequences_of_share(share, of_batch, sequences, splits, min_blocks, SPLIT)
    kv64 = head_kv.to(tl.int64)
    k_ptr += kv64 * stride_kh
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)
    WIDTH: tl.constexpr = var.width
    SLICES: tl.constexpr = var.slices
    offs_c = tl.arange(0, WIDTH)
    offs_r = tl.arange(0, var.block_rest)
    offs_m = tl.arange(0, BLOCK_M)
    rows = row_first + offs_m
    for index in tl.range(first_seq, stop, num_stages=1):
        seq = share * 0 + index  # a tensor also in the interpreter, whose ranges count in plain integers
        row0, q_len, kv_len = sequence_lengths(seq, sequences)
        _, _, blocks = visible_blocks(q_len, kv_len, window_left, SPLIT)
        ours = (q_len > 0) & (q_len <= max_q)
        split, num_splits, begin, end, place, seq_start = split_of_sequence(
            share, seq_start, line, blocks, splits, min_blocks, ours, SPLIT
        )
        if ours & (split < num_splits) & (row_first < q_len * GROUPS):
            live = rows < q_len * GROUPS
            # int64 before any product with a stride
            token = row0.to(tl.int64) + rows // GROUPS
            q_ptrs = q_ptr + (token * stride_qt + (kv64 * GROUPS + rows % GROUPS) * stride_qh)[:, None]
            q_r = tl.load(
                q_ptrs + (var.split.dim_v + offs_r)[None, :], mask=live[:, None] & (offs_r < var.rest)[None, :], other=0.0
            )
            q_c = ()
            for i in tl.static_range(SLICES):
                columns = i * WIDTH + offs_c
                keep = live[:, None] & (columns < var.split.dim_v)[None, :]
                q_c += (tl.load(q_ptrs + columns[None, :], mask=keep, other=0.0),)
            offset = kv_len - q_len
            end = tl.minimum(end, (kv_len + BLOCK_N - 1) // BLOCK_N)
            if var.has_right:
                last_token = tl.minimum(row_first + BLOCK_M - 1, q_len * GROUPS - 1) // GROUPS
                end = tl.minimum(end, (tl.maximum(last_token + offset + window_right + 1, 0) + BLOCK_N - 1) // BLOCK_N)
            acc, row_max, row_sum = _walk(
                q_r,
                q_c,
                (begin, end),
                k_ptr,
                table_ptr + seq.to(tl.int64) * stride_table,
                rows // GROUPS + offset,
                kv_len,
                scale * LOG2E,
                window_right,
                (stride_kp, stride_kt),
                var,
            )
            inverse, lse = finish_softmax(row_max, row_sum)
            whole = True
            if splits_ptr is not None:
                whole = num_splits == 1
            strides = (stride_ot, stride_oh, stride_lh)
            for i in tl.static_range(SLICES):
                out = acc[i] * (inverse * descale_v)[:, None]
                if splits_ptr is not None:  # noqa: SIM102, only this condition is known when the kernel is compiled
                    if not whole:
                        store_split(splits_ptr, out, lse, live, place, unit, batch, splits, units, unit_rows, SPLIT, i)
                if whole:
                    store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, kv64, strides, SPLIT, i)
    if skip_q == 0:  # otherwise another kernel clears these rows
        clear_rows_past_end(
            out_ptr,
            lse_ptr,
            end_of_rows,
            total_q,
            tl.program_id(0),
            tl.num_programs(0),
            units // tiles_per_head * GROUPS,
            (stride_ot, stride_oh, stride_lh),
            SPLIT.dim_v,
            SPLIT.block_dv,
        )
