"""The kernel of split-KV decoding: a tile of query rows against one split of the keys, in pages or dense.

The module `plan` describes the algorithm and launches the kernel, and `splits` cuts the keys. This module leaves out what a
call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.triton.float8_conversions import fit_float16, half_of_pairs, widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    add_alibi,
    clear_rows_past_end,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    softmax_update_by_columns,
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
class DecodeVariant:
    """What the decoding kernel is compiled for.

    split:        the fields that the kernel which combines splits needs as well
    dim:          head_dim; block_d: the same, padded to a tile
    page_size:    tokens per page, 0 for a dense cache
    same_strides: K and V have the same strides
    aligned:      the strides of pages and tokens are multiples of 16
    wide:         offsets within a page need 64 bits, see `key_pages.has_wide_rows`
    precision:    `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32
    pairs:        float8 values are read in pairs of columns
    by_rows:      the rows of the scores are queries, not keys
    ptx:          inline PTX is available
    alibi:        form of the ALiBi slopes, see `AttentionTensors.alibi_form`
    """

    split: SplitVariant
    dim: int
    block_d: int
    page_size: int
    has_right: bool
    has_softcap: bool
    same_strides: bool
    aligned: bool
    wide: bool
    precision: str
    pairs: bool
    by_rows: bool
    ptx: bool
    alibi: str

    @staticmethod
    def switches_of(options: AttentionOptions) -> dict[str, Any]:
        """The fields that depend only on the options of a call. A single query has no key to its right."""
        return {
            "has_right": options.window_size[1] >= 0 and max(options.max_seqlen_q, 1) > 1,
            "has_softcap": options.softcap != 0.0,
        }


def decode_option_numbers(options: AttentionOptions) -> tuple[float, ...]:
    """The numeric options of scores, in the order of the kernel's parameters: `scale` and `softcap`."""
    return (float(options.softmax_scale), float(options.softcap))


@triton.jit
def _of_keys(x, BY_ROWS: tl.constexpr):
    """Numbers of keys, [BLOCK_N], in the shape that broadcasts to scores."""
    return x[None, :] if BY_ROWS else x[:, None]


@triton.jit
def _of_queries(x, BY_ROWS: tl.constexpr):
    """Numbers of query rows, [BLOCK_M], in the shape that broadcasts to scores and to the output."""
    return x[:, None] if BY_ROWS else x[None, :]


@triton.jit
def _walk(
    q, row_scale, slopes, row_max, row_sum, span, pointers, seq, positions, lengths, scaling, window, strides, var: tl.constexpr
):
    """The inner loop over the key blocks of one split. q: [BLOCK_D, BLOCK_M], or [BLOCK_M, BLOCK_D] by rows.

    -> out [BLOCK_M, BLOCK_DV], not yet divided by the sum, the largest score and the sum of exponentials [BLOCK_M].

    row_scale: [BLOCK_M] factors of the scores, which undo the division of q's rows by `fit_float16`, or None
    slopes:    [BLOCK_M] ALiBi slopes in base 2, or None
    row_max, row_sum: the online softmax before the first block, [BLOCK_M]
    span:      (begin, end), numbers of key blocks
    pointers:  (K and V of the KV head, the sequence's row of the block table or None, its row of the mask or None)
    seq:       number of the sequence; in a dense cache, it is also the number of the sequence's only page
    positions: [BLOCK_M] positions of the queries among the keys: the last query stands at the last key
    lengths:   (the first key that any query sees, the number of keys of the sequence)
    scaling:   (softmax_scale with the scale of the cache's keys, softcap)
    window:    (left, right)
    strides:   elements from page to page and token to token of K, then of V, and from key to key of the mask
    """
    k_ptr, v_ptr, table_ptr, mask_ptr = pointers
    begin, end = span
    first_key, kv_len = lengths
    scale, softcap = scaling
    window_left, window_right = window
    stride_kp, stride_kt, stride_vp, stride_vt, stride_mk = strides
    BLOCK_M: tl.constexpr = var.split.block_m
    BLOCK_N: tl.constexpr = var.split.block_n
    BLOCK_DV: tl.constexpr = var.split.block_dv
    PRECISION: tl.constexpr = var.precision
    WIDTH: tl.constexpr = BLOCK_DV // 2 if var.pairs else BLOCK_DV
    HALVES: tl.constexpr = 2 if var.pairs else 1
    BY_ROWS: tl.constexpr = var.by_rows
    offs_d = tl.arange(0, var.block_d)
    offs_v = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, WIDTH] if BY_ROWS else [WIDTH, BLOCK_M], tl.float32)
    second = acc
    if var.pairs:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    if BY_ROWS:
        inner_end = kv_len // BLOCK_N
        inner_begin = 0
        if var.has_right:
            inner_end = tl.minimum(inner_end, tl.maximum(tl.min(positions, 0) + window_right + 1, 0) // BLOCK_N)
        if var.split.has_left:
            last_first = first_visible(tl.max(positions, 0), window_left, var.split.chunked)
            inner_begin = (tl.maximum(last_first, 0) + BLOCK_N - 1) // BLOCK_N
    next_page = seq.to(tl.int64)
    if var.page_size > 0:
        next_page = read_pages(table_ptr, begin, offs_n, first_key, kv_len, var)
    if mask_ptr is not None:
        cols = begin * BLOCK_N + offs_n
        next_seen = tl.load(mask_ptr + cols.to(tl.int64) * stride_mk, mask=cols < kv_len, other=0)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        # A page before the window may belong to another sequence by now, and 0 * NaN is NaN, so hidden keys are not read.
        owned = cols < kv_len
        if var.split.has_left:
            owned = owned & (cols >= first_key)
        if mask_ptr is not None:
            owned = owned & (next_seen != 0)
            next_seen = tl.load(mask_ptr + (cols + BLOCK_N).to(tl.int64) * stride_mk, mask=cols + BLOCK_N < kv_len, other=0)
        # The page number is loaded one iteration before it is needed, so that K and V have all stages for themselves.
        page = next_page
        if var.page_size > 0:
            next_page = read_pages(table_ptr, block + 1, offs_n, first_key, kv_len, var)
        k_offs = key_offsets(page, block, offs_n, stride_kp, stride_kt, var)
        v_offs = k_offs
        if not var.same_strides:
            v_offs = key_offsets(page, block, offs_n, stride_vp, stride_vt, var)
        if var.pairs:
            v_offs = v_offs >> 1
        k = tl.load(k_ptr + k_offs[:, None] + offs_d[None, :], mask=owned[:, None] & (offs_d < var.dim)[None, :], other=0.0)
        k = widen(k, q.dtype, var.ptx)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) if BY_ROWS else tl.dot(k, q, input_precision=PRECISION)
        if row_scale is not None:
            s *= _of_queries(row_scale, BY_ROWS)
        factor = scale * LOG2E
        if var.has_softcap:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee", var.ptx)
            factor = 1.0
        if slopes is not None:
            distances = _of_queries(positions, BY_ROWS) - _of_keys(cols, BY_ROWS)
            s = add_alibi(s, factor, _of_queries(slopes, BY_ROWS), distances)
            factor = 1.0
        hidden = True
        if BY_ROWS and mask_ptr is None:
            # Most blocks are visible to every row, and all threads skip their mask together.
            hidden = (block < inner_begin) | (block >= inner_end)
        if hidden:
            keep = _of_keys(owned, BY_ROWS)
            if var.has_right:
                keep = keep & (_of_keys(cols, BY_ROWS) <= _of_queries(positions, BY_ROWS) + window_right)
            if var.split.has_left:
                first = first_visible(positions, window_left, var.split.chunked)
                keep = keep & (_of_keys(cols, BY_ROWS) >= _of_queries(first, BY_ROWS))
            s = tl.where(keep, s, float("-inf"))
        if BY_ROWS:
            p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        else:
            p, row_max, row_sum, alpha = softmax_update_by_columns(s, factor, row_max, row_sum)
        p = p.to(q.dtype)
        if BY_ROWS:
            keep_v = owned[:, None] & (offs_v < var.split.dim_v)[None, :]
            v = tl.load(v_ptr + v_offs[:, None] + offs_v[None, :], mask=keep_v, other=0.0)
            acc = tl.dot(p, widen(v, q.dtype, var.ptx), acc * alpha[:, None], input_precision=PRECISION)
        else:
            # Values are loaded as the product takes them, columns first. Transposing them afterwards would cost a copy.
            keep_v = owned[None, :] & (offs_v < var.split.dim_v // HALVES)[:, None]
            v = tl.load(v_ptr + v_offs[None, :] + offs_v[:, None], mask=keep_v, other=0 if var.pairs else 0.0)
            if var.pairs:
                acc = tl.dot(half_of_pairs(v, "0x5410"), p, acc * alpha[None, :], input_precision=PRECISION)
                second = tl.dot(half_of_pairs(v, "0x7632"), p, second * alpha[None, :], input_precision=PRECISION)
            else:
                acc = tl.dot(widen(v, q.dtype, var.ptx), p, acc * alpha[None, :], input_precision=PRECISION)

    out = acc if BY_ROWS else tl.trans(acc)
    if var.pairs:
        out = tl.reshape(tl.join(out, tl.trans(second)), (BLOCK_M, BLOCK_DV))
    return out, row_max, row_sum


@triton.jit(
    do_not_specialize=["max_k", "stride_mb", *COUNTS, "window_right", "total_q", "stride_lh", "stride_table", "stride_mk"]
)
def attn_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    splits_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    sinks_ptr,
    mask_ptr,
    k_descale_ptr,
    v_descale_ptr,
    alibi_ptr,
    max_k,
    stride_mb,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    min_blocks,
    max_q,
    window_left,
    window_right,
    total_q,
    stride_lh,
    stride_table,
    stride_mk,
    scale,
    softcap,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    var: tl.constexpr,
):
    """One program: one tile of packed rows and one split (or one share of the batch's key blocks, which holds several
    splits)."""
    wait_for_previous_kernel(var.split.pdl, True)  # `_combine` reads the lengths before it waits
    SPLIT: tl.constexpr = var.split
    BLOCK_M: tl.constexpr = var.split.block_m
    BLOCK_N: tl.constexpr = var.split.block_n
    GROUPS: tl.constexpr = var.split.groups
    sequences = (cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left)
    # The KV heads of one split run side by side: in a (page, token, head, dim) cache they read one stretch of memory.
    unit = tl.program_id(0) % units
    share = tl.program_id(0) // units
    head_kv = unit // tiles_per_head
    row_first = unit % tiles_per_head * BLOCK_M
    if cu_q_ptr is not None:
        end_of_rows = tl.load(cu_q_ptr + batch)
    of_batch = tl.arange(0, SPLIT.batch_block)
    first_seq, stop, seq_start, line = sequences_of_share(share, of_batch, sequences, splits, min_blocks, SPLIT)
    if cu_q_ptr is not None:
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

    kv64 = head_kv.to(tl.int64)
    k_ptr += kv64 * stride_kh
    v_ptr += kv64 * stride_vh
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)
    offs_d = tl.arange(0, var.block_d)
    offs_m = tl.arange(0, BLOCK_M)
    rows = row_first + offs_m

    for index in tl.range(first_seq, stop, num_stages=1):
        seq = share * 0 + index  # a tensor also in the interpreter, whose ranges count in plain integers
        row0, q_len, kv_len = sequence_lengths(seq, sequences)
        first_key, first_block, blocks = visible_blocks(q_len, kv_len, window_left, SPLIT)
        ours = (q_len > 0) & (q_len <= max_q)
        split, num_splits, begin, end, place, seq_start = split_of_sequence(
            share, seq_start, line, blocks, splits, min_blocks, ours, SPLIT
        )
        if ours & (split < num_splits) & (row_first < q_len * GROUPS):
            live = rows < q_len * GROUPS
            # int64 before any product with a stride
            token = row0.to(tl.int64) + rows // GROUPS
            head = kv64 * GROUPS + rows % GROUPS
            q_ptrs = q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
            q = tl.load(q_ptrs, mask=live[:, None] & (offs_d < var.dim)[None, :], other=0.0)
            row_scale = None
            if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
                q, row_scale = fit_float16(q)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if sinks_ptr is not None:
                # A sink is one more key that has a score and no value: the first split starts from it.
                sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
                row_max = tl.where(split == 0, sink, row_max)
                row_sum = tl.where(split == 0, 1.0, row_sum)

            slopes = None
            if var.alibi != "none":
                of_sequence = seq * (units // tiles_per_head * GROUPS) if var.alibi == "batch" else 0
                slopes = tl.load(alibi_ptr + of_sequence + head, mask=live, other=0.0) * LOG2E

            offset = kv_len - q_len
            begin += first_block
            end = tl.minimum(end + first_block, (kv_len + BLOCK_N - 1) // BLOCK_N)
            if var.has_right:
                last_token = tl.minimum(row_first + BLOCK_M - 1, q_len * GROUPS - 1) // GROUPS
                end = tl.minimum(end, (tl.maximum(last_token + offset + window_right + 1, 0) + BLOCK_N - 1) // BLOCK_N)
            pointers = (
                k_ptr,
                v_ptr,
                None if table_ptr is None else table_ptr + seq.to(tl.int64) * stride_table,
                None if mask_ptr is None else mask_ptr + seq.to(tl.int64) * stride_mb,
            )
            acc, row_max, row_sum = _walk(
                q if var.by_rows else tl.trans(q),
                row_scale,
                slopes,
                row_max,
                row_sum,
                (begin, end),
                pointers,
                seq,
                rows // GROUPS + offset,
                (first_key, kv_len),
                (scale, softcap),
                (window_left, window_right),
                (stride_kp, stride_kt, stride_vp, stride_vt, stride_mk),
                var,
            )
            inverse, lse = finish_softmax(row_max, row_sum)
            out = acc * (inverse * descale_v)[:, None]
            whole = True
            if splits_ptr is not None:
                whole = num_splits == 1
                if not whole:
                    store_split(splits_ptr, out, lse, live, place, unit, batch, splits, units, unit_rows, SPLIT)
            if whole:
                strides = (stride_ot, stride_oh, stride_lh)
                store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, kv64, strides, SPLIT)
