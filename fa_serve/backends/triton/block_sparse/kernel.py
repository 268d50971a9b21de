"""The kernel of block-sparse attention: a tile of query rows against the key blocks in its lists.

The module `plan` describes the algorithm and launches the kernel. This module leaves out what a call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fa_serve.backends.triton.float8_conversions import fit_float16, widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    add_alibi,
    clear_rows_past_end,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    window_keep,
)
from fa_serve.backends.triton.splits import SplitVariant, store_rows, store_split


@dataclass(frozen=True, slots=True)
class SparseVariant:
    """What the block-sparse kernel is compiled for.

    split:         the fields that the kernel which combines splits needs as well; its groups are the query heads that share a
                   list
    lists_per_kv:  list heads per KV head: 1 where query heads are packed, else the number of query heads per KV head
    block_q, block_k: queries and keys per block of the lists
    bits:          partial blocks have bits
    mask:          "none", or the form of the mask from which the lists were scanned: "bool", where the bits of a block are
                   stored at the number of its key block, or "float", where the mask is added in partial blocks
    dim:           head_dim; block_d: the same, padded to a tile
    layout:        "dense", "varlen" or "paged"
    page_size:     tokens per page, 0 for keys that are not paged
    same_strides:  K and V have the same strides
    aligned:       the strides of pages and tokens are multiples of 16
    wide:          offsets within a page need 64 bits, see `key_pages.has_wide_rows`
    precision:     `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32
    ptx:           inline PTX is available
    alibi:         form of the ALiBi slopes, see `AttentionTensors.alibi_form`
    """

    split: SplitVariant
    lists_per_kv: int
    block_q: int
    block_k: int
    bits: bool
    mask: str
    dim: int
    block_d: int
    layout: str
    page_size: int
    has_right: bool
    has_softcap: bool
    same_strides: bool
    aligned: bool
    wide: bool
    precision: str
    ptx: bool
    alibi: str


@triton.jit
def _tile_at(place, lists, var: tl.constexpr):
    """The number of the key tile at this place in the lists of one block of queries: first partial tiles, then full ones. Past
    the end, it is any number."""
    index_ptr, full_index_ptr, partial, total = lists
    TILES: tl.constexpr = var.block_k // var.split.block_n
    if full_index_ptr is None:
        block = tl.load(index_ptr + place // TILES, mask=place < total, other=0)
    else:
        block = tl.load(index_ptr + place // TILES, mask=place < partial, other=0)
        full_ptr = full_index_ptr + (place - partial) // TILES
        block += tl.load(full_ptr, mask=(place >= partial) & (place < total), other=0)
    return block * TILES + place % TILES


@triton.jit
def _walk(q, row_scale, slopes, state, span, lists, pointers, band, rows, scaling, window, strides, var: tl.constexpr):
    """The inner loop over the listed tiles from span[0] to span[1]. q: [BLOCK_M, BLOCK_D].

    band: (lo, hi, inner_lo, inner_hi, kv_len). Keys in [lo, hi) are in the band of some row, keys in [inner_lo, inner_hi) in
    the band of every row. Keys outside of [lo, hi) are not read: their pages may belong to another sequence by now, and
    0 * NaN is NaN.
    """
    BLOCK_N: tl.constexpr = var.split.block_n
    TILES: tl.constexpr = var.block_k // BLOCK_N
    WORDS: tl.constexpr = var.block_k // 32
    PRECISION: tl.constexpr = var.precision
    acc, row_max, row_sum = state
    k_ptr, v_ptr, table_ptr, bits_ptr, mask_ptr, seq64 = pointers
    lo, hi, inner_lo, inner_hi, kv_len = band
    queries, offset, live = rows
    scale, softcap = scaling
    window_left, window_right = window
    stride_kp, stride_kt, stride_vp, stride_vt, stride_mq, stride_mk = strides
    _, _, partial, _ = lists
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, var.block_d)
    offs_dv = tl.arange(0, var.split.block_dv)
    positions = queries + offset
    begin, end = span
    next_tile = _tile_at(begin, lists, var)
    next_page = seq64
    if var.page_size > 0:
        next_page = read_pages(table_ptr, next_tile, offs_n, lo, hi, var)
    for place in tl.range(begin, end):
        # The list and the page number are read one iteration before they are needed, so that K and V have all stages for
        # themselves. They are not read earlier: Triton pipelines no loop that carries a value over two iterations.
        tile = next_tile
        page = next_page
        next_tile = _tile_at(place + 1, lists, var)
        if var.page_size > 0:
            next_page = read_pages(table_ptr, next_tile, offs_n, lo, hi, var)
        n = tile * BLOCK_N
        cols = n + offs_n
        owned = (cols >= lo) & (cols < hi)
        k_offs = key_offsets(page, tile, offs_n, stride_kp, stride_kt, var)
        v_offs = k_offs
        if not var.same_strides:
            v_offs = key_offsets(page, tile, offs_n, stride_vp, stride_vt, var)
        k = tl.load(k_ptr + k_offs[:, None] + offs_d[None, :], mask=owned[:, None] & (offs_d < var.dim)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(widen(k, q.dtype, var.ptx)), input_precision=PRECISION)
        if row_scale is not None:
            s *= row_scale[:, None]
        factor = scale * LOG2E
        if var.has_softcap:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee", var.ptx)
            factor = 1.0
        if slopes is not None:
            s = add_alibi(s, factor, slopes[:, None], positions[:, None] - cols[None, :])
            factor = 1.0
        masked = (n < inner_lo) | (n + BLOCK_N > inner_hi)
        if var.bits or var.mask != "none":
            masked = masked | (place < partial)
        if masked:
            if var.mask == "float":
                inside = (live & (place < partial))[:, None] & (cols < kv_len)[None, :]
                given_ptrs = mask_ptr + queries[:, None].to(tl.int64) * stride_mq + cols[None, :].to(tl.int64) * stride_mk
                s += tl.load(given_ptrs, mask=inside, other=0).to(tl.float32) * (LOG2E / factor)
            keep = window_keep(
                positions[:, None],
                cols[None, :],
                kv_len,
                window_left,
                window_right,
                var.split.has_left,
                var.has_right,
                var.split.chunked,
            )
            if var.bits:
                key = place % TILES * BLOCK_N + offs_n
                stored = place // TILES if var.mask == "none" else tile // TILES
                block_ptr = bits_ptr + tl.cast(stored, tl.int64) * (var.block_q * WORDS)
                words_ptr = block_ptr + (queries % var.block_q)[:, None] * WORDS + (key // 32)[None, :]
                words = tl.load(words_ptr, mask=(live & (place < partial))[:, None], other=-1)
                keep = keep & (((words >> (key % 32)[None, :]) & 1) != 0)
            s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        keep_v = owned[:, None] & (offs_dv < var.split.dim_v)[None, :]
        v = tl.load(v_ptr + v_offs[:, None] + offs_dv[None, :], mask=keep_v, other=0.0)
        acc = tl.dot(p.to(q.dtype), widen(v, q.dtype, var.ptx), acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "batch",
        "units",
        "tiles_per_head",
        "unit_rows",
        "splits",
        "num_queries",
        "max_k",
        "window_left",
        "window_right",
        "list_batch",
        "list_head",
        "width",
        "full_width",
        "bits_width",
        "stride_lh",
        "stride_table",
    ]
)
def attn_block_sparse(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    splits_ptr,
    num_ptr,
    index_ptr,
    full_num_ptr,
    full_index_ptr,
    bits_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    cu_k_ptr,
    sinks_ptr,
    k_descale_ptr,
    v_descale_ptr,
    alibi_ptr,
    mask_ptr,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    num_queries,
    max_k,
    window_left,
    window_right,
    list_batch,
    list_head,
    width,
    full_width,
    bits_width,
    stride_lh,
    stride_table,
    scale,
    softcap,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    var: tl.constexpr,
):
    """One program: one tile of packed rows, which lies in one block of queries, and one split of its lists.

    num_queries: queries of each sequence of a dense batch; otherwise all packed rows, with the rows after the last sequence
    """
    SPLIT: tl.constexpr = var.split
    BLOCK_M: tl.constexpr = var.split.block_m
    BLOCK_N: tl.constexpr = var.split.block_n
    BLOCK_DV: tl.constexpr = var.split.block_dv
    GROUPS: tl.constexpr = var.split.groups
    TILES: tl.constexpr = var.block_k // BLOCK_N
    # Neighbours in launch order are tiles of one head, whose lists overlap in most patterns. Late rows, which see the most
    # keys of a causal call, go first.
    at_unit = tl.program_id(0) % units
    share = tl.program_id(0) // units
    split = share % splits
    seq = share // splits
    list_of = at_unit // tiles_per_head  # a list head: a KV head, or a query head
    tile = at_unit % tiles_per_head
    if var.has_right:
        tile = tiles_per_head - 1 - tile
    unit = list_of * tiles_per_head + tile
    head_kv = list_of // var.lists_per_kv

    row0 = seq * num_queries
    q_len = num_queries
    if cu_q_ptr is not None:
        row0 = tl.load(cu_q_ptr + seq)
        q_len = tl.load(cu_q_ptr + seq + 1) - row0
    if var.layout == "paged":
        kv_len = tl.load(used_k_ptr + seq)
    elif var.layout == "varlen":
        k_row0 = tl.load(cu_k_ptr + seq)
        kv_len = tl.load(cu_k_ptr + seq + 1) - k_row0
    else:
        kv_len = max_k
    if cu_q_ptr is not None:  # noqa: SIM102, only this condition is known when the kernel is compiled
        if seq == batch - 1:  # the programs of the last sequence know where it ends without a load
            clear_rows_past_end(
                out_ptr,
                lse_ptr,
                row0 + q_len,
                num_queries,
                split * units + at_unit,
                splits * units,
                units // tiles_per_head * GROUPS,
                (stride_ot, stride_oh, stride_lh),
                SPLIT.dim_v,
                BLOCK_DV,
            )
    if tile * BLOCK_M >= q_len * GROUPS:
        return

    # int64 before any product with a stride
    seq64 = seq.to(tl.int64)
    kv64 = head_kv.to(tl.int64)
    k_ptr += kv64 * stride_kh
    v_ptr += kv64 * stride_vh
    if var.layout == "varlen":
        k_ptr += k_row0.to(tl.int64) * stride_kt
        v_ptr += k_row0.to(tl.int64) * stride_vt
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, var.block_d)
    rows = tile * BLOCK_M + offs_m
    live = rows < q_len * GROUPS
    queries = rows // GROUPS
    heads = list_of * GROUPS + rows % GROUPS
    first_row = seq64 * stride_qb if var.layout == "dense" else row0.to(tl.int64) * stride_qt
    q_ptrs = q_ptr + first_row + queries.to(tl.int64) * stride_qt + heads.to(tl.int64) * stride_qh
    q = tl.load(q_ptrs[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < var.dim)[None, :], other=0.0)
    row_scale = None
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q, row_scale = fit_float16(q)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is one more key that has a score and no value: the first split starts from it.
        sink = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2E
        row_max = tl.where(split == 0, sink, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    slopes = None
    if var.alibi != "none":
        of_sequence = seq * (units // tiles_per_head * GROUPS) if var.alibi == "batch" else 0
        slopes = tl.load(alibi_ptr + of_sequence + heads, mask=live, other=0.0) * LOG2E

    # the lists of this block of queries, in tiles
    list_row = (seq * list_batch + list_of * list_head + tile * BLOCK_M // (GROUPS * var.block_q)).to(tl.int64)
    partial = tl.load(num_ptr + list_row) * TILES
    total = partial
    if full_num_ptr is not None:
        total += tl.load(full_num_ptr + list_row) * TILES
        full_index_ptr += list_row * full_width
    lists = (index_ptr + list_row * width, full_index_ptr, partial, total)
    if var.bits:
        bits_ptr += list_row * bits_width * (var.block_q * var.block_k // 32)
    if var.mask == "float":
        mask_ptr += seq64 * stride_mb + list_of.to(tl.int64) * stride_mh

    # the keys in the band of any row of this tile, and the keys in the band of all its rows
    offset = kv_len - q_len
    first_query = tile * BLOCK_M // GROUPS
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUPS, q_len - 1)
    lo = kv_len * 0
    inner_lo = lo
    hi = kv_len
    inner_hi = kv_len
    if SPLIT.has_left:
        lo = tl.maximum(first_visible(first_query + offset, window_left, SPLIT.chunked), 0)
        inner_lo = tl.maximum(first_visible(last_query + offset, window_left, SPLIT.chunked), 0)
    if var.has_right:
        hi = tl.maximum(tl.minimum(kv_len, last_query + offset + window_right + 1), 0)
        inner_hi = tl.maximum(tl.minimum(kv_len, first_query + offset + window_right + 1), 0)
    acc, row_max, row_sum = _walk(
        q,
        row_scale,
        slopes,
        (acc, row_max, row_sum),
        (total * split // splits, total * (split + 1) // splits),
        lists,
        (k_ptr, v_ptr, None if table_ptr is None else table_ptr + seq64 * stride_table, bits_ptr, mask_ptr, seq64),
        (lo, hi, inner_lo, inner_hi, kv_len),
        (queries, offset, live),
        (scale, softcap),
        (window_left, window_right),
        (stride_kp, stride_kt, stride_vp, stride_vt, stride_mq, stride_mk),
        var,
    )
    inverse, lse = finish_softmax(row_max, row_sum)
    out = acc * (inverse * descale_v)[:, None]
    if splits_ptr is None:
        store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, list_of.to(tl.int64), (stride_ot, stride_oh, stride_lh), SPLIT)
    else:
        store_split(splits_ptr, out, lse, live, share, unit, batch, splits, units, unit_rows, SPLIT)
