"""The kernel of the forward pass: rows of queries against tiles of keys, dense, packed or in pages.

The module `plan` describes the algorithm and launches the kernel. This module leaves out what a call needs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS
from fa_serve.backends.triton.prefill.float8_products import (
    PROBABILITY_SHIFT,
    in_order_of_values,
    load_keys,
    load_transposed_values,
    softmax_update_by_scales,
)
from fa_serve.backends.triton.primitives import (
    LN2,
    LOG2E,
    add_alibi,
    clear_rows_past_end,
    find_tile,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    window_keep,
)


@dataclass(frozen=True, slots=True)
class ForwardVariant:
    """What the forward kernel is compiled for.

    groups:      query heads per KV head
    dim, dim_v:  head_dim and head_dim_v; block_d, block_dv: the same, padded to tiles
    page_size:   tokens per page, 0 for keys that are not paged
    tma:         K and V are read through tensor descriptors
    mask:        "none", "bool" or "float"
    precision:   `input_precision` of `tl.dot`, "ieee" or "tf32", which matters only for float32. It is not the option
                 `precision` of the call, which decides float8_keys and float8_values
    ptx:         inline PTX is available
    batch_block: with `skip_q`, the width of the prefix sum that finds a program's tile, else 0
    chunked:     window_left is the length of a chunk, not of a window
    alibi:       form of the ALiBi slopes, see `AttentionTensors.alibi_form`
    float8_keys: Q and K are the copies that `float8_inputs` makes, in which packed keys have gaps and paged keys are a dense
                 batch
    float8_values: V is a transposed copy, and P is float8
    masks_all:   every tile is masked, without a branch
    wide:        offsets need 64 bits: a row of Q, K, V or O may lie 2^31 elements or more after the first row of its page or
                 tile, or a column of the mask that far after the first column, see `key_pages`
    """

    num_heads: int
    groups: int
    dim: int
    dim_v: int
    block_d: int
    block_dv: int
    block_m: int
    block_n: int
    page_size: int
    tma: bool
    varlen: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    mask: str
    precision: str
    ptx: bool
    batch_block: int
    chunked: bool
    alibi: str
    float8_keys: bool
    float8_values: bool
    masks_all: bool
    wide: bool

    @staticmethod
    def switches_of(options: AttentionOptions) -> dict[str, Any]:
        """The fields that depend only on the options of a call."""
        return {
            "has_left": options.left >= 0,
            "has_right": options.window_size[1] >= 0,
            "has_softcap": options.softcap != 0.0,
            "chunked": options.attention_chunk > 0,
            "float8_keys": options.precision != "bf16",
            "float8_values": options.precision == "fp8",
        }


def forward_option_numbers(options: AttentionOptions) -> tuple[float, ...]:
    """The numeric options, in the order of the kernel's parameters from `scale` to `window_right`."""
    return (float(options.softmax_scale), float(options.softcap), options.left, options.window_size[1])


@triton.jit
def _load_tile(tensor, n, cols, kv_len, where, CHECK_ROWS, DIM: tl.constexpr, BLOCK_D: tl.constexpr, var: tl.constexpr):
    """[BLOCK_N, BLOCK_D] keys or values from key n on. Rows past kv_len belong to another sequence and read as 0.

    tensor, where: see `_walk`; cols: numbers of the keys, n first, [BLOCK_N]; CHECK_ROWS: a copy of TMA may reach past kv_len
    """
    BLOCK_N: tl.constexpr = var.block_n
    base_ptr, descriptor, stride_page, stride_t = tensor
    if var.wide:
        stride_t = tl.cast(stride_t, tl.int64)
    batch, head, row0, table_row_ptr = where
    if var.tma:
        if not var.varlen:
            return descriptor.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
        x = descriptor.load([0, head, row0 + n, 0]).reshape(BLOCK_N, BLOCK_D)
        if CHECK_ROWS:
            # the tail of the tile is the next sequence, and 0 * NaN is NaN
            x = tl.where((cols < kv_len)[:, None], x, 0.0)
        return x
    offs_d = tl.arange(0, BLOCK_D)
    if var.page_size > 0:
        page = tl.load(table_row_ptr + cols // var.page_size, mask=cols < kv_len, other=0).to(tl.int64)
        row_ptrs = base_ptr + page * stride_page + (cols % var.page_size) * stride_t
    else:
        row_ptrs = base_ptr + n.to(tl.int64) * stride_t + (cols - n) * stride_t
    keep = (cols < kv_len)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (offs_d < DIM)[None, :]
    return tl.load(row_ptrs[:, None] + offs_d[None, :], mask=keep, other=0.0)


@triton.jit
def _walk(state, q, span, k_tensor, v_tensor, mask_tensor, where, rows, scaling, scales, window, var: tl.constexpr):
    """The inner loop. Tiles outside of [inner_lo, inner_hi) cross the edge of the band or the end of the sequence and are
    masked.

    All threads take the same branch, and one loop keeps one software pipeline. Three loops would drain the pipeline twice more.
    A tile is read whole, so keys to the left of the window are read and masked. Their pages must therefore still belong to the
    sequence. `MAX_KEYS_PER_TILE` bounds how far to the left of the window such keys lie.

    state:       (acc, row_max, row_sum), the online softmax before the first tile
    span:        (lo, inner_lo, inner_hi, hi, kv_len), numbers of keys: the loop runs from lo to hi
    k_tensor, v_tensor: (pointer, descriptor or None, elements from page to page or sequence to sequence, from key to key)
    mask_tensor: (pointer to the mask of this sequence and head, elements from query to query, from key to key)
    where:       (sequence, KV head, first row of its keys in a packed tensor or copy, pointer to its row of the block table)
    rows:        (index of each query in its sequence [BLOCK_M], queries of the sequence, its keys minus its queries)
    scaling:     (softmax_scale, softcap, ALiBi slope of the head in base 2)
    scales:      for float8: (q_scale [BLOCK_M], which includes softmax_scale, pointers to the scales of groups of K and of V)
    window:      (left, right)

    With float8 values `acc` is in units of `unit`, the scale of the values that were added last. A new scale is one more factor
    of the multiplication that a new maximum needs anyway, and at the end `acc` is multiplied by the last unit.
    """
    BLOCK_N: tl.constexpr = var.block_n
    PRECISION: tl.constexpr = var.precision
    acc, row_max, row_sum = state
    lo, inner_lo, inner_hi, hi, kv_len = span
    q_rows, q_len, offset = rows
    scale, softcap, slope = scaling
    window_left, window_right = window
    mask_ptr, stride_mq, stride_mk = mask_tensor
    if var.wide and var.mask != "none":
        stride_mk = tl.cast(stride_mk, tl.int64)
    q_scale, k_scale_ptr, v_scale_ptr = scales
    unit = 1.0
    for n in tl.range(lo, hi, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        cols = n + tl.arange(0, BLOCK_N)
        edge = (n < inner_lo) | (n >= inner_hi)
        if var.masks_all:
            edge = True
        if var.float8_keys:
            k = load_keys(k_tensor[0], n, k_tensor[3], BLOCK_N, var.block_d)
            score_scale = (q_scale * tl.load(k_scale_ptr + n // BLOCK_KEYS))[:, None]
        else:
            k = _load_tile(k_tensor, n, cols, kv_len, where, False, var.dim, var.block_d, var)
            score_scale = scale
        s = tl.dot(q, k.T, input_precision=PRECISION)
        factor = score_scale * LOG2E
        if var.has_softcap:
            s = softcap_scores(s, score_scale, softcap, PRECISION == "ieee", var.ptx)
            factor = 1.0
        if var.mask != "none":
            inside = (q_rows < q_len)[:, None] & (cols < kv_len)[None, :]
            mask_ptrs = mask_ptr + q_rows[:, None].to(tl.int64) * stride_mq + cols[None, :] * stride_mk
            given = tl.load(mask_ptrs, mask=inside, other=0)
            if var.mask == "bool":
                s = tl.where(given != 0, s, float("-inf"))
            else:
                s = s * factor + given.to(tl.float32) * LOG2E
                factor = 1.0
        if var.alibi != "none":
            s = add_alibi(s, factor, slope, (q_rows + offset)[:, None] - cols[None, :])
            factor = 1.0
        if edge:
            keep = window_keep(
                (q_rows + offset)[:, None],
                cols[None, :],
                kv_len,
                window_left,
                window_right,
                var.has_left,
                var.has_right,
                var.chunked,
            )
            s = tl.where(keep, s, float("-inf"))
        if var.float8_keys:
            SHIFT: tl.constexpr = PROBABILITY_SHIFT if var.float8_values else 0.0
            p, row_max, row_sum, alpha = softmax_update_by_scales(s, factor, row_max, row_sum, SHIFT)
        else:
            p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        if var.float8_values:
            v = load_transposed_values(v_tensor[0], n, v_tensor[3], var.block_dv, BLOCK_N)
            v_scale = tl.load(v_scale_ptr + n // BLOCK_KEYS)
            p = in_order_of_values(p.to(v.dtype), var.block_m, BLOCK_N)
            product = tl.dot(p, v.T, max_num_imprecise_acc=BLOCK_N)
            acc = acc * (alpha * (unit / v_scale))[:, None] + product
            unit = v_scale
        else:
            v = _load_tile(v_tensor, n, cols, kv_len, where, edge, var.dim_v, var.block_dv, var)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if var.float8_values:
        acc = acc * unit
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "seqlen_k",
        "num_m",
        "window_left",
        "window_right",
        "head_group",
        "num_seqs",
        "skip_q",
    ]
)
def attn_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    mask_ptr,
    alibi_ptr,
    k_desc,
    v_desc,
    cu_q_ptr,
    cu_k_ptr,
    used_k_ptr,
    table_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    num_queries,
    seqlen_k,
    num_m,
    head_group,
    num_seqs,
    skip_q,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    stride_table,
    var: tl.constexpr,
):
    """One program: block_m query rows of one head of one sequence.

    An option that is absent has None as its pointer. Queries have q's dtype, or float8 with `float8_keys`; sums, scores and lse
    are float32.

    cu_q_ptr, cu_k_ptr: (num_seqs + 1,), int32, of packed rows; used_k_ptr: (num_seqs,), int32, the keys of paged sequences
    table_ptr:   (num_seqs, stride_table), int32: the pages of each sequence
    scale:       softmax_scale; softcap: in the unit of scores, which are converted to base 2 only where they are exponentiated
    num_queries: queries of each sequence of a dense batch; otherwise all packed rows, with the rows after the last sequence
    seqlen_k:    keys of each sequence of a dense batch; for other layouts, the kernel reads the number of keys from the device
    num_m:       blocks of rows of the longest sequence
    head_group:  number of (sequence, head) pairs whose programs run side by side, so that their keys stay in the L2 cache
    skip_q:      with `batch_block`: sequences with up to this many queries are left to another kernel
    stride_*:    elements from one sequence (b), token (t), head (h), query (q) or key (k) to the next; for a paged cache,
                 stride_kb and stride_vb lead from one page to the next
    """
    BLOCK_M: tl.constexpr = var.block_m
    BLOCK_N: tl.constexpr = var.block_n
    BLOCK_DV: tl.constexpr = var.block_dv
    # Neighbours in launch order share K and V: the order is (group of heads, block of rows, head in the group). The rows that
    # see the most keys go first.
    pid = tl.program_id(0)
    group = pid // (head_group * num_m)
    rest = pid % (head_group * num_m)
    bh = group * head_group + rest % head_group
    block = num_m - 1 - rest // head_group if var.has_right else rest // head_group
    batch = bh // var.num_heads
    head = bh % var.num_heads
    if var.batch_block > 0:
        head = pid % var.num_heads
        batch, block = find_tile(pid // var.num_heads, cu_q_ptr, num_seqs, skip_q, 1, BLOCK_M, var.batch_block)
        if batch >= num_seqs:
            return
    head_kv = head // var.groups

    if var.varlen:
        q_row0 = tl.load(cu_q_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row0
    else:
        q_row0 = 0
        q_len = num_queries
    if used_k_ptr is not None:
        k_row0 = 0
        kv_len = tl.load(used_k_ptr + batch)
    elif var.varlen:
        k_row0 = tl.load(cu_k_ptr + batch)
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row0
    else:
        k_row0 = 0
        kv_len = seqlen_k
    if var.varlen and var.batch_block == 0:  # noqa: SIM102, only this condition is known when the kernel is compiled
        # The programs of the last sequence know where it ends without a load. With `skip_q`, another kernel clears these rows.
        if batch == num_seqs - 1:
            clear_rows_past_end(
                out_ptr,
                lse_ptr,
                q_row0 + q_len,
                num_queries,
                block * var.num_heads + head,
                num_m * var.num_heads,
                var.num_heads,
                (stride_ot, stride_oh, stride_lh),
                var.dim_v,
                BLOCK_DV,
            )
    m0 = block * BLOCK_M
    if m0 >= q_len:
        return

    # int64 before any product with a stride: a long batch has more than 2^31 elements
    batch_q = 0 if var.varlen else batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv64 = head_kv.to(tl.int64)
    first_row = (q_row0 + m0).to(tl.int64)
    if var.wide:
        stride_qt = tl.cast(stride_qt, tl.int64)
        stride_ot = tl.cast(stride_ot, tl.int64)
    if var.page_size > 0:
        table_ptr += batch.to(tl.int64) * stride_table
        k_ptr += kv64 * stride_kh
        v_ptr += kv64 * stride_vh
    elif var.float8_keys:
        if cu_k_ptr is not None:
            k_row0 = (k_row0 // BLOCK_KEYS + batch) * BLOCK_KEYS
        batch_k = 0 if cu_k_ptr is not None else batch.to(tl.int64)
        row64 = k_row0.to(tl.int64) if cu_k_ptr is not None else 0
        first_key = batch_k * stride_kb + row64 * stride_kt + kv64 * stride_kh
        k_ptr += first_key
        # scales lie in the order of the keys: one for all columns of a group of BLOCK_KEYS keys
        k_scale_ptr += first_key // (BLOCK_KEYS * var.dim)
        v_ptr += batch_k * stride_vb + row64 * (1 if var.float8_values else stride_vt) + kv64 * stride_vh
        if var.float8_values:
            v_scale_ptr += first_key // (BLOCK_KEYS * var.dim)
    elif not var.tma:
        row64 = k_row0.to(tl.int64) if var.varlen else 0
        k_ptr += batch_q * stride_kb + row64 * stride_kt + kv64 * stride_kh
        v_ptr += batch_q * stride_vb + row64 * stride_vt + kv64 * stride_vh
    if var.mask != "none":
        mask_ptr += batch.to(tl.int64) * stride_mb + head64 * stride_mh

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, var.block_d)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_rows = m0 + offs_m
    live = (q_rows < q_len)[:, None]
    first_query = batch_q * stride_qb + first_row * stride_qt + head64 * stride_qh
    q_ptr += first_query
    q_scale = 1.0
    if var.float8_keys:
        # scales lie in the order of the rows; rows past the end of the sequence need a finite scale as well
        q_scale = scale * tl.load(q_scale_ptr + first_query // var.dim + offs_m, mask=q_rows < q_len, other=1.0)
    q = tl.load(
        q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :],
        mask=live & (offs_d < var.dim)[None, :] if var.dim < var.block_d else live,
        other=0.0,
    )

    SHIFT: tl.constexpr = PROBABILITY_SHIFT if var.float8_values else 0.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        # a sink is one more key that has a score and no value: start from it
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_M], 2.0**SHIFT, tl.float32)

    slope = 0.0
    if var.alibi == "heads":
        slope = tl.load(alibi_ptr + head) * LOG2E
    if var.alibi == "batch":
        slope = tl.load(alibi_ptr + batch * var.num_heads + head) * LOG2E

    # the band of visible keys for this block of rows, and the part of it where every row sees every key
    offset = kv_len - q_len
    last_row = tl.minimum(m0 + BLOCK_M, q_len) - 1
    lo = 0
    inner_lo = 0
    hi = kv_len
    inner_hi = kv_len // BLOCK_N * BLOCK_N
    if var.has_left:
        lo = tl.maximum(first_visible(m0 + offset, window_left, var.chunked), 0) // BLOCK_N * BLOCK_N
        inner_lo = tl.maximum(first_visible(last_row + offset, window_left, var.chunked), 0)
    if var.has_right:
        hi = tl.maximum(tl.minimum(kv_len, last_row + offset + window_right + 1), 0)
        inner_hi = tl.maximum(tl.minimum(kv_len, m0 + offset + window_right + 1), 0) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = _walk(
        (acc, row_max, row_sum),
        q,
        (lo, inner_lo, inner_hi, hi, kv_len),
        (k_ptr, k_desc, stride_kb, stride_kt),
        (v_ptr, v_desc, stride_vb, stride_vt),
        (mask_ptr, stride_mq, stride_mk),
        (batch, head_kv, k_row0, table_ptr),
        (q_rows, q_len, offset),
        (scale, softcap, slope),
        (q_scale, k_scale_ptr, v_scale_ptr),
        (window_left, window_right),
        var,
    )

    inverse, lse = finish_softmax(row_max, row_sum)
    if var.float8_values:
        lse -= PROBABILITY_SHIFT * LN2
    if lse_ptr is not None:
        lse_ptr += batch_q * stride_lb + head64 * stride_lh + first_row
        tl.store(lse_ptr + offs_m, lse, mask=q_rows < q_len)
    out_ptr += batch_q * stride_ob + first_row * stride_ot + head64 * stride_oh
    tl.store(
        out_ptr + offs_m[:, None] * stride_ot + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        mask=live & (offs_dv < var.dim_v)[None, :] if var.dim_v < BLOCK_DV else live,
    )
