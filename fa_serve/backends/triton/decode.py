"""Split-KV flash decoding: few queries, many keys, paged or dense (Dao et al. 2023, "Flash-Decoding").

One program holds the queries of one KV head, up to `block_m` packed rows (a row is one query of one query head), and walks over
one split of the keys. Splits are cut on the device, from the lengths there, so one captured CUDA graph is right for every
length:

- balanced (`num_splits == 0`): the key blocks of all sequences lie on one line, which is cut into equal shares, as many as
  programs run at once. A share may hold the end of one sequence, several whole sequences and the beginning of another.
- fixed (`num_splits > 0`, or a batch of one): each sequence is cut into `splits` splits by its own length. If the caller gave
  `num_splits`, the tile depends on heads and dtypes alone, so the bits of a row do not depend on the rest of the batch.

A sequence that has one split is written at once. The others leave (out, lse) for each split, which `splits._combine` merges. On
Hopper and later both kernels are launched programmatically: the next kernel starts while this one drains and waits for its
results (griddepcontrol).

Scores of up to 32 rows have keys as rows, so 8 query rows fill the other side of a tensor core's tile (16 by 8). Tiles of 64
rows have queries as rows: they fill a wgmma, and a row's maximum and sum stay within four threads. A float8 cache is widened to
float16 (`float8_conversions`). Sequences with more than `max_seqlen_q` queries are skipped: in a mixed batch they belong to
another kernel. This module leaves out long prompts (`forward`) and writing the cache (`store_kv`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.launch import Launch, launch_options, multiprocessors, with_unit_stride
from fa_serve.backends.plan import AttentionOptions, AttentionTensors, Run
from fa_serve.backends.triton.float8_conversions import fit_float16, half_of_pairs, widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    add_alibi,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    softmax_update_by_columns,
    wait_for_previous_kernel,
)
from fa_serve.backends.triton.splits import (
    COUNTS,
    SplitCounts,
    SplitVariant,
    combine_launch,
    lse_of_splits,
    sequence_lengths,
    share_of_line,
    split_of_sequence,
    store_rows,
    visible_blocks,
)
from fa_serve.backends.triton.triton_tiles import DecodeTiles, batch_block, decode_tiles, padded_dim


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """What the decoding kernel is compiled for.

    split:        what it shares with the kernel that merges splits
    dim:          head_dim; block_d: the same, padded to a tile
    page_size:    tokens per page, 0 for a dense cache
    same_strides: K and V have the same strides
    aligned:      the strides of pages and tokens are multiples of 16
    precision:    input precision of the products
    pairs:        float8 values are read in pairs of columns
    by_rows:      scores have queries as rows, not keys
    ptx:          inline PTX is available
    alibi:        "none", "heads" or "batch", see `forward.ForwardVariant`
    """

    split: SplitVariant
    dim: int
    block_d: int
    page_size: int
    has_right: bool
    has_softcap: bool
    same_strides: bool
    aligned: bool
    precision: str
    pairs: bool
    by_rows: bool
    ptx: bool
    alibi: str


@triton.jit
def _of_keys(x, BY_ROWS: tl.constexpr):
    """What belongs to keys, [BLOCK_N], as it is combined with scores."""
    return x[None, :] if BY_ROWS else x[:, None]


@triton.jit
def _of_queries(x, BY_ROWS: tl.constexpr):
    """What belongs to query rows, [BLOCK_M], as it is combined with scores and with the output."""
    return x[:, None] if BY_ROWS else x[None, :]


@triton.jit
def _walk(
    q, row_scale, slopes, row_max, row_sum, span, pointers, seq, positions, lengths, scaling, window, strides, var: tl.constexpr
):
    """The inner loop over the key blocks of one split. q: [BLOCK_D, BLOCK_M], or [BLOCK_M, BLOCK_D] by rows.

    -> out [BLOCK_M, BLOCK_DV], which is not divided yet, the largest score and the sum of exponentials [BLOCK_M].
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
        next_seen = tl.load(mask_ptr + cols * stride_mk, mask=cols < kv_len, other=0)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        # A page before the window may belong to another sequence by now, and 0 * NaN is NaN, so hidden keys are not read.
        owned = cols < kv_len
        if var.split.has_left:
            owned = owned & (cols >= first_key)
        if mask_ptr is not None:
            owned = owned & (next_seen != 0)
            next_seen = tl.load(mask_ptr + (cols + BLOCK_N) * stride_mk, mask=cols + BLOCK_N < kv_len, other=0)
        # The page is loaded one iteration before its address is needed, which leaves all the stages to K and V.
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


@triton.jit(do_not_specialize=["max_k", "stride_mb", *COUNTS, "window_right", "stride_lh", "stride_table", "stride_mk"])
def _decode(
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
    wait_for_previous_kernel(var.split.pdl)
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
    if var.split.balanced:
        line_begin, line_end, first_seq, behind, seq_start, share_size = share_of_line(
            share, sequences, splits, min_blocks, SPLIT
        )
        line = (line_begin, line_end, share_size)
    else:
        first_seq = share // splits
        behind = first_seq + 1
        seq_start = 0
        line = (0, 0, 0)

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

    for index in tl.range(first_seq, behind, num_stages=1):
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
                    at = (place.to(tl.int64) * units + unit) * unit_rows + offs_m
                    offs_dv = tl.arange(0, var.split.block_dv)
                    keep = live[:, None] & (offs_dv < var.split.dim_v)[None, :]
                    tl.store(splits_ptr + at[:, None] * var.split.dim_v + offs_dv[None, :], out, mask=keep)
                    split_lse_ptr = lse_of_splits(splits_ptr, sequences, splits, units, unit_rows, SPLIT)
                    tl.store(split_lse_ptr + at, lse, mask=live)
            if whole:
                strides = (stride_ot, stride_oh, stride_lh)
                store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, kv64, strides, SPLIT)


def plan_decode(tensors: AttentionTensors, options: AttentionOptions, tiles: DecodeTiles | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of the layouts "paged" and "dense" (see `fa_serve.api`).

    A run is one launch, and a second one if any sequence may be cut into splits. Sequences with more than
    `options.max_seqlen_q` queries are left alone: their rows of out and lse stay as they are. A dense mask depends on the key
    alone, (1 or batch, 1, 1, seqlen_k) bool, and keys that it hides are not read. `tiles` overrides the choice, for tuning.
    """
    return _DecodePlan(tensors, options, tiles)


class _DecodePlan:
    """The launches of one kind of call, and the shapes of what a run allocates.

    A dense plan for one query per sequence takes the number of keys and their strides from each call, because a cache grows
    (`plan.growing_facts`).
    """

    __slots__ = (
        "_combine",
        "_decode",
        "_is_dense",
        "_late",
        "_lse_shape",
        "_needs_lse",
        "_out_shape",
        "_split_size",
        "_takes_out",
        "_takes_q",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: DecodeTiles | None) -> None:
        self._is_dense = tensors.block_table is None
        q = _rows_of(tensors.q)
        k, v = (with_unit_stride(x) for x in (tensors.k, tensors.v))
        total_q, num_heads, dim = q.shape
        dim_v = v.shape[3]
        batch = v.shape[0] if tensors.block_table is None else tensors.block_table.shape[0]
        self._takes_q = q.data_ptr() == tensors.q.data_ptr() and (tensors.q.dim() == 3 or tensors.q.shape[1] == 1)
        self._out_shape = (*tensors.q.shape[:-1], dim_v)
        out = tensors.out
        self._takes_out = out is not None and (out.is_contiguous() if self._is_dense else out.stride(2) == 1)
        self._needs_lse = options.return_lse
        self._lse_shape = (num_heads, total_q)
        self._late: tuple[int, ...] | None = None
        self._decode: Launch | None = None
        self._combine: Launch | None = None
        self._split_size = 0
        if batch == 0:
            return
        max_seqlen_q = max(options.max_seqlen_q, 1)
        arch = spec.arch_of(q.device)
        if tiles is None:
            tiles = decode_tiles(
                arch,
                multiprocessors(q.device, 8),
                q.element_size(),
                k.element_size(),
                dim,
                dim_v,
                num_heads,
                k.shape[2],
                batch,
                max_seqlen_q,
                options.max_seqlen_k,
                options.num_splits,
            )
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        groups = num_heads // k.shape[2]
        counts = SplitCounts(
            batch=batch,
            heads=k.shape[2],
            rows=groups * max_seqlen_q,
            block_m=tiles.block_m,
            splits=tiles.splits,
            min_blocks=tiles.min_blocks,
            max_q=max_seqlen_q,
            left=options.left,
        )
        variant = _variant(tensors, options, tiles, arch, groups, batch, k, v)
        out_strides = out.stride()[-3:-1] if out is not None and self._takes_out else (num_heads * dim_v, dim_v)
        lse_stride = tensors.lse.stride(0) if tensors.lse is not None else total_q if self._needs_lse else 0
        mask = tensors.mask
        limit = {"maxnreg": tiles.registers} if tiles.registers and arch >= 80 else {}
        programs = tiles.splits if tiles.balanced else batch * tiles.splits
        self._decode = Launch(
            _decode,
            programs * counts.units,
            varying=(
                *counts.numbers,
                options.window_size[1],
                lse_stride,
                0 if tensors.block_table is None else tensors.block_table.stride(0),
                0 if mask is None or mask.shape[3] == 1 else mask.stride(3),
                float(options.softmax_scale),
                float(options.softcap),
            ),
            strides=(*out_strides, *q.stride()[:2]),
            fixed=(variant,),
            options={**launch_options(variant.split.pdl, tiles.num_warps), "num_stages": tiles.num_stages, **limit},
        )
        if not self._is_dense:
            self._late = _late_numbers(k, v, None, options.max_seqlen_k)
        if tiles.balanced or tiles.splits > 1:
            self._split_size = counts.buffer_size(variant.split)
            self._combine = combine_launch(counts, variant.split, lse_stride, out_strides)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v, sinks, mask, cu_seqlens_q, keys, block_table, k_descale, v_descale, out, lse, alibi_slopes, _ = tensors
        if not self._takes_q:
            q = _rows_of(q)
        result = out if self._takes_out and out is not None else q.new_empty(self._out_shape)
        if self._needs_lse and lse is None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._decode is not None:
            late = self._late
            if late is None:
                k = with_unit_stride(k)
                v = with_unit_stride(v)
                late = _late_numbers(k, v, mask, k.shape[1])
            splits = None if self._combine is None else q.new_empty(self._split_size, dtype=torch.float32)
            if mask is not None:
                mask = mask.view(torch.uint8)
            pointers = (q, k, v, result, lse, splits, block_table, keys, cu_seqlens_q, sinks, mask)
            self._decode((*pointers, k_descale, v_descale, alibi_slopes), *late)
            if self._combine is not None:
                self._combine((result, lse, splits, keys, cu_seqlens_q), late[0])
        if lse is not None and self._is_dense:
            lse = lse.view(lse.shape[0], *result.shape[:2]).transpose(0, 1)
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse


def _rows_of(q: Tensor) -> Tensor:
    """(total_q, heads, dim) with a contiguous last dimension."""
    rows = q if q.dim() == 3 else q.reshape(q.shape[0] * q.shape[1], *q.shape[2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _late_numbers(k: Tensor, v: Tensor, mask: Tensor | None, max_seqlen_k: int) -> tuple[int, ...]:
    """The numbers that a launch takes at each call: the bound of the keys, and the strides that follow from it."""
    mask_stride = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    page_k, token_k, head_k, _ = k.stride()
    page_v, token_v, head_v, _ = v.stride()
    return (max_seqlen_k, mask_stride, page_k, token_k, head_k, page_v, token_v, head_v)


def _variant(
    tensors: AttentionTensors,
    options: AttentionOptions,
    tiles: DecodeTiles,
    arch: int,
    groups: int,
    batch: int,
    k: Tensor,
    v: Tensor,
) -> DecodeVariant:
    """What the kernel is compiled for."""
    dim = k.shape[3]
    dim_v = v.shape[3]
    dtype = tensors.q.dtype
    k_strides = k.stride()[:3]
    v_strides = v.stride()[:3]
    right = options.window_size[1]
    float8 = k.element_size() == 1
    even = dim_v % 2 == 0 and all(s % 2 == 0 for s in v_strides)
    return DecodeVariant(
        split=SplitVariant(
            groups=groups,
            dim_v=dim_v,
            block_dv=padded_dim(dim_v),
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            batch_block=batch_block(batch) if tiles.balanced else 1,
            balanced=tiles.balanced,
            has_left=options.left >= 0,
            pdl=arch >= 90,
            chunked=options.attention_chunk > 0,
        ),
        dim=dim,
        block_d=padded_dim(dim),
        page_size=0 if tensors.block_table is None else k.shape[1],
        has_right=right >= 0 and max(options.max_seqlen_q, 1) > 1,
        has_softcap=options.softcap != 0.0,
        same_strides=k_strides == v_strides,
        aligned=all(stride % 16 == 0 for stride in (*k_strides[:2], *v_strides[:2])),
        precision="ieee" if dtype == torch.float32 else "tf32",
        # pairs of columns need an even number of columns at even addresses
        pairs=arch >= 89 and float8 and even and dtype.itemsize == 2 and not tiles.by_rows,
        by_rows=tiles.by_rows,
        ptx=arch >= 89,
        alibi="none" if tensors.alibi_slopes is None else "heads" if tensors.alibi_slopes.dim() == 1 else "batch",
    )
