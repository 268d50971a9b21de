"""The attention kernels with a fixed tree: a tile of query rows against groups of keys in pages, and the fold of groups.

The module `plan` describes the tree and launches the kernels. This module leaves out what a call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fa_serve.backends.triton.float8_conversions import fit_float16, widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    clear_rows_past_end,
    find_tile,
    finish_softmax,
    first_visible,
    fold_outputs,
    fold_rows,
    group_softmax,
    softcap_scores,
    wait_for_previous_kernel,
    window_keep,
)


@dataclass(frozen=True, slots=True)
class TreeVariant:
    """What both kernels are compiled for.

    groups:      query heads per KV head
    dim, dim_v:  head_dim and head_dim_v; block_d, block_dv: the same, padded to tiles
    block_m:     packed rows per tile; a row is one query of one query head
    block_n:     keys per block; group: keys per group, a multiple of block_n
    page_size:   tokens per page
    same_strides, aligned, wide: of K and V, as in `decode.kernel.DecodeVariant`
    has_left:    there is a limit to the left, a window or, if `chunked`, a chunk
    batch_block: width of the prefix sum that finds a program's tile; 0 if all sequences have the same number of tiles
    apart:       each program computes only one group of keys, and `fold_groups` folds the groups
    precision:   `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32
    ptx:         inline PTX is available; pdl: kernels are launched programmatically
    """

    groups: int
    dim: int
    dim_v: int
    block_d: int
    block_dv: int
    block_m: int
    block_n: int
    group: int
    page_size: int
    same_strides: bool
    aligned: bool
    wide: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    chunked: bool
    batch_block: int
    apart: bool
    precision: str
    ptx: bool
    pdl: bool

    @property
    def split(self) -> TreeVariant:
        """The fields that `key_pages` reads: it looks for them where the variants of the kernels with splits have them."""
        return self


@triton.jit
def _fold(state, group_max, group_sum, group_out):
    """Fold a group of keys into the groups before it."""
    row_max, row_sum, out = state
    row_max, row_sum, before, added = fold_rows(row_max, row_sum, group_max, group_sum)
    return row_max, row_sum, fold_outputs(out, group_out, before[:, None], added[:, None])


@triton.jit
def _load_keys(ptr, rows, owned, offs_d, DIM: tl.constexpr, dtype: tl.constexpr, var: tl.constexpr):
    """[BLOCK_N, BLOCK_D] keys or values at the offsets `rows`; keys that are not owned are not read, and are 0."""
    keep = owned[:, None] & (offs_d < DIM)[None, :]
    return widen(tl.load(ptr + rows[:, None] + offs_d[None, :], mask=keep, other=0.0), dtype, var.ptx)


@triton.jit
def _compute_group(
    q, row_scale, begin, end, k_tensor, v_tensor, table_ptr, positions, limits, scaling, window, var: tl.constexpr
):
    """Walk in order over the blocks of a group with keys in [begin, end) -> maximum, sum and weighted values of each row.

    limits: (the first key that any row sees, the number of keys, begin and end of the keys that every row sees)
    """
    BLOCK_M: tl.constexpr = var.block_m
    BLOCK_DV: tl.constexpr = var.block_dv
    first_key, kv_len, inner_begin, inner_end = limits
    scale, softcap = scaling
    window_left, window_right = window
    offs_d = tl.arange(0, var.block_d)
    offs_v = tl.arange(0, var.block_dv)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_ptr, stride_kp, stride_kt = k_tensor
    v_ptr, stride_vp, stride_vt = v_tensor
    offs_n = tl.arange(0, var.block_n)
    first_block = begin // var.block_n
    next_page = read_pages(table_ptr, first_block, offs_n, first_key, kv_len, var)
    for block in tl.range(first_block, (end + var.block_n - 1) // var.block_n):
        n = block * var.block_n
        cols = n + offs_n
        # a page before the window may belong to another sequence by now, and 0 * NaN is NaN
        owned = (cols < kv_len) & (cols >= first_key)
        # The page number is loaded one iteration before it is needed, so that K and V have all stages for themselves.
        page = next_page
        next_page = read_pages(table_ptr, block + 1, offs_n, first_key, kv_len, var)
        k_rows = key_offsets(page, block, offs_n, stride_kp, stride_kt, var)
        v_rows = k_rows
        if not var.same_strides:
            v_rows = key_offsets(page, block, offs_n, stride_vp, stride_vt, var)
        k = _load_keys(k_ptr, k_rows, owned, offs_d, var.dim, q.dtype, var)
        s = tl.dot(q, k.T, input_precision=var.precision)
        if row_scale is not None:
            s *= row_scale[:, None]
        factor = scale
        if var.has_softcap:
            s = softcap_scores(s, scale, softcap, var.precision == "ieee", var.ptx)
            factor = 1.0
        if (n < inner_begin) | (n + var.block_n > inner_end):
            keep = window_keep(
                positions[:, None],
                cols[None, :],
                kv_len,
                window_left,
                window_right,
                var.has_left,
                var.has_right,
                var.chunked,
            )
            s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = group_softmax(s, factor, row_max, row_sum)
        v = _load_keys(v_ptr, v_rows, owned, offs_v, var.dim_v, q.dtype, var)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=var.precision)
    return row_max, row_sum, acc


@triton.jit
def _initial_state(sinks_ptr, head, live, ROWS: tl.constexpr, var: tl.constexpr):
    """The state into which the first group is folded: empty, or a sink, which is one more key that has a score and no value."""
    BLOCK_DV: tl.constexpr = var.block_dv
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        row_sum += 1.0
    return row_max, row_sum, tl.zeros([ROWS, BLOCK_DV], tl.float32)


@triton.jit
def _store_rows(out_ptr, lse_ptr, state, descale_v, token, head, live, strides, var: tl.constexpr):
    """Divide by the sum, and store rows at their tokens and query heads."""
    row_max, row_sum, out = state
    stride_ot, stride_oh, stride_lh = strides
    inverse, lse = finish_softmax(row_max, row_sum)
    offs_v = tl.arange(0, var.block_dv)
    out = out * (inverse * descale_v)[:, None]
    cells = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_v[None, :]
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (offs_v < var.dim_v)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


@triton.jit
def _tile_of(index, cu_q_ptr, batch, tiles_per_seq, var: tl.constexpr):
    """The sequence and the first packed row of a tile. The sequence is `batch` if there are no more tiles."""
    if var.batch_block > 0:
        seq, block = find_tile(index, cu_q_ptr, batch, 0, var.groups, var.block_m, var.batch_block)
    else:
        seq = index // tiles_per_seq
        block = index % tiles_per_seq
    return seq, block * var.block_m


@triton.jit
def _slot_of(index, head_kv, heads, group, most_groups, rows, unit_rows):
    """Where a group of a tile has its rows in the buffer: (tiles, heads, groups, unit_rows)."""
    tile = (tl.cast(index, tl.int64) * heads + head_kv) * most_groups + group
    return tile * unit_rows + rows


@triton.jit(
    do_not_specialize=[
        "batch",
        "heads",
        "tiles",
        "tiles_per_seq",
        "most_groups",
        "unit_rows",
        "most_queries",
        "total_q",
        "window_left",
        "window_right",
        "stride_table",
        "stride_lh",
    ]
)
def attn_tree(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    buffer_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    sinks_ptr,
    k_descale_ptr,
    v_descale_ptr,
    batch,
    heads,
    tiles,
    tiles_per_seq,
    most_groups,
    unit_rows,
    most_queries,
    total_q,
    window_left,
    window_right,
    stride_table,
    stride_lh,
    scale,
    softcap,
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
    var: tl.constexpr,
):
    """A program computes one tile of packed rows of one KV head: all groups of keys, or with `apart` one of them.

    scale: turns products into exponents of 2 or, with a softcap, into scores
    most_queries: a sequence with more queries is left to another kernel
    """
    wait_for_previous_kernel(var.pdl, True)  # `fold_groups` reads the lengths before it waits
    BLOCK_M: tl.constexpr = var.block_m
    program = tl.program_id(0)
    # KV heads of a tile run side by side: in a (page, token, head, dim) cache they read one stretch of memory
    head_kv = program % heads
    index = program // heads % tiles
    only = program // heads // tiles
    seq, row_first = _tile_of(index, cu_q_ptr, batch, tiles_per_seq, var)
    # all lengths are loaded before the first one is needed, so that a program waits for memory once
    known = seq < batch
    row0 = tl.load(cu_q_ptr + seq, mask=known, other=0)
    q_len = tl.load(cu_q_ptr + seq + 1, mask=known, other=0) - row0
    kv_len = tl.load(used_k_ptr + seq, mask=known, other=0)
    clear_rows_past_end(
        out_ptr,
        lse_ptr,
        tl.load(cu_q_ptr + batch),
        total_q,
        program,
        tl.num_programs(0),
        heads * var.groups,
        (stride_ot, stride_oh, stride_lh),
        var.dim_v,
        var.block_dv,
    )
    if not known:
        return
    if (row_first >= q_len * var.groups) | (q_len > most_queries):
        return
    offset = kv_len - q_len
    offs_m = tl.arange(0, BLOCK_M)
    rows = row_first + offs_m
    live = rows < q_len * var.groups
    positions = rows // var.groups + offset
    # int64 before any product with a stride
    kv64 = head_kv.to(tl.int64)
    token = row0.to(tl.int64) + rows // var.groups
    head = kv64 * var.groups + rows % var.groups
    last_token = tl.minimum(row_first + BLOCK_M - 1, q_len * var.groups - 1) // var.groups
    end = kv_len
    if var.has_right:
        end = tl.minimum(kv_len, tl.maximum(last_token + offset + window_right + 1, 0))
    inner_end = kv_len
    if var.has_right:
        inner_end = tl.minimum(kv_len, row_first // var.groups + offset + window_right + 1)
    first_key = kv_len * 0
    inner_begin = first_key
    if var.has_left:
        first_key = tl.maximum(first_visible(row_first // var.groups + offset, window_left, var.chunked), 0)
        inner_begin = first_visible(last_token + offset, window_left, var.chunked)
    first_group = first_key // var.group
    end_group = (end + var.group - 1) // var.group
    if var.apart:
        if only * var.group >= kv_len:
            return
        first_group = only
        end_group = only + 1

    offs_d = tl.arange(0, var.block_d)
    q_ptrs = q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (offs_d < var.dim)[None, :], other=0.0)
    row_scale = None
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q, row_scale = fit_float16(q)
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)
    k_tensor = (k_ptr + kv64 * stride_kh, stride_kp, stride_kt)
    v_tensor = (v_ptr + kv64 * stride_vh, stride_vp, stride_vt)
    table_ptr += seq.to(tl.int64) * stride_table
    state = _initial_state(sinks_ptr, head, live, BLOCK_M, var)
    row_max, row_sum, out = state
    for group in tl.range(first_group, end_group, num_stages=1):
        begin = tl.maximum(group * var.group, first_key // var.block_n * var.block_n)
        stop = tl.minimum((group + 1) * var.group, end)
        group_max, group_sum, group_out = _compute_group(
            q,
            row_scale,
            begin,
            stop,
            k_tensor,
            v_tensor,
            table_ptr,
            positions,
            (first_key, kv_len, inner_begin, inner_end),
            (scale, softcap),
            (window_left, window_right),
            var,
        )
        if var.apart:
            slots = _slot_of(index, head_kv, heads, group, most_groups, offs_m, unit_rows)
            offs_v = tl.arange(0, var.block_dv)
            numbers_ptr = buffer_ptr + slots * (var.dim_v + 2)
            tl.store(numbers_ptr, group_max, mask=live)
            tl.store(numbers_ptr + 1, group_sum, mask=live)
            keep = live[:, None] & (offs_v < var.dim_v)[None, :]
            tl.store(numbers_ptr[:, None] + 2 + offs_v[None, :], group_out, mask=keep)
        else:
            row_max, row_sum, out = _fold((row_max, row_sum, out), group_max, group_sum, group_out)
    if not var.apart:
        strides = (stride_ot, stride_oh, stride_lh)
        _store_rows(out_ptr, lse_ptr, (row_max, row_sum, out), descale_v, token, head, live, strides, var)


@triton.jit(
    do_not_specialize=[
        "batch",
        "heads",
        "tiles_per_seq",
        "most_groups",
        "unit_rows",
        "most_queries",
        "blocks_per_tile",
        "stride_lh",
    ]
)
def fold_groups(
    out_ptr,
    lse_ptr,
    buffer_ptr,
    used_k_ptr,
    cu_q_ptr,
    sinks_ptr,
    v_descale_ptr,
    batch,
    heads,
    tiles_per_seq,
    most_groups,
    unit_rows,
    most_queries,
    blocks_per_tile,
    stride_lh,
    stride_ot,
    stride_oh,
    var: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A program folds the groups of BLOCK_ROWS rows of a tile of one KV head, in their order.

    Lengths may be read before the wait: the kernel that lets this one start has waited for the kernels that wrote them.
    """
    program = tl.program_id(0)
    head_kv = program % heads
    index = program // heads // blocks_per_tile
    seq, row_first = _tile_of(index, cu_q_ptr, batch, tiles_per_seq, var)
    exists = seq < batch
    row0 = tl.load(cu_q_ptr + seq, mask=exists, other=0)
    q_len = tl.load(cu_q_ptr + seq + 1, mask=exists, other=0) - row0
    q_len = tl.where(q_len > most_queries, 0, q_len)
    kv_len = tl.load(used_k_ptr + seq, mask=exists, other=0)
    wait_for_previous_kernel(var.pdl)
    offs_m = program // heads % blocks_per_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = row_first + offs_m
    live = (rows < q_len * var.groups) & (offs_m < unit_rows) & exists
    kv64 = head_kv.to(tl.int64)
    token = row0.to(tl.int64) + rows // var.groups
    head = kv64 * var.groups + rows % var.groups
    offs_v = tl.arange(0, var.block_dv)
    descale_v = 1.0
    if v_descale_ptr is not None:
        descale_v = tl.load(v_descale_ptr + head_kv)
    row_max, row_sum, out = _initial_state(sinks_ptr, head, live, BLOCK_ROWS, var)
    for group in tl.range(0, (kv_len + var.group - 1) // var.group):
        slots = _slot_of(index, head_kv, heads, group, most_groups, offs_m, unit_rows)
        numbers_ptr = buffer_ptr + slots * (var.dim_v + 2)
        group_max = tl.load(numbers_ptr, mask=live, other=float("-inf"))
        group_sum = tl.load(numbers_ptr + 1, mask=live, other=0.0)
        keep = live[:, None] & (offs_v < var.dim_v)[None, :]
        group_out = tl.load(numbers_ptr[:, None] + 2 + offs_v[None, :], mask=keep, other=0.0)
        row_max, row_sum, out = _fold((row_max, row_sum, out), group_max, group_sum, group_out)
    strides = (stride_ot, stride_oh, stride_lh)
    _store_rows(out_ptr, lse_ptr, (row_max, row_sum, out), descale_v, token, head, live, strides, var)
