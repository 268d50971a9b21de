"""Block-sparse attention in portable Triton (FlashAttention, Dao et al. 2022, section 3.3): a program walks over listed blocks.

One program computes `block_m` packed rows of one sequence and walks over the key blocks that its block of queries has in its
lists, first the partial blocks and then the full ones. Other keys are never read, so the bytes read grow with the blocks that
are kept. A row is one query of one query head. Where the query heads of a KV head share their lists, they are packed, so a
single query fills a tile with its heads; where each query head has lists, a tile has rows of one head.

The layouts (dense, packed, paged) differ in where keys lie, and the same kernel serves prompts and decoding. With few queries,
lists are cut into splits, which `splits._combine` merges: each sequence has the same number of splits, because only the device
knows how long its lists are, and a split may be empty. Blocks of 64 or 128 keys are walked in tiles of `block_n`. A tile is
masked, in a uniform branch, if it crosses the edge of the band or the end of the sequence, or if its block has bits. This
module leaves out the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.launch import Launch, multiprocessors, with_unit_stride
from fa_serve.backends.plan import AttentionOptions, AttentionTensors, Run
from fa_serve.backends.triton.float8_conversions import fit_float16, widen
from fa_serve.backends.triton.key_pages import key_offsets, read_pages
from fa_serve.backends.triton.primitives import (
    LOG2E,
    add_alibi,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    window_keep,
)
from fa_serve.backends.triton.splits import SplitCounts, SplitVariant, combine_launch, lse_of_splits, store_rows
from fa_serve.backends.triton.triton_tiles import SparseTiles, padded_dim, sparse_tiles
from fa_serve.block_lists import BlockLists


@dataclass(frozen=True, slots=True)
class SparseVariant:
    """What the block-sparse kernel is compiled for.

    split:         what it shares with the kernel that merges splits; its groups are the query heads that share a list
    lists_per_kv:  list heads per KV head: 1 where query heads are packed, else the query heads of a KV head
    block_q, block_k: queries and keys per block of the lists
    bits:          partial blocks have bits
    dim:           head_dim; block_d: the same, padded to a tile
    layout:        "dense", "varlen" or "paged"
    page_size:     tokens per page, 0 for keys that are not paged
    same_strides:  K and V have the same strides
    aligned:       the strides of pages and tokens are multiples of 16
    precision:     input precision of the products
    ptx:           inline PTX is available
    alibi:         "none", "heads" or "batch", see `forward.ForwardVariant`
    """

    split: SplitVariant
    lists_per_kv: int
    block_q: int
    block_k: int
    bits: bool
    dim: int
    block_d: int
    layout: str
    page_size: int
    has_right: bool
    has_softcap: bool
    same_strides: bool
    aligned: bool
    precision: str
    ptx: bool
    alibi: str


@triton.jit
def _tile_at(place, lists, var: tl.constexpr):
    """The tile of keys at this place of the lists of one block of queries, which are partial tiles and then full ones. Any
    number past the end."""
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

    band: the keys that any row sees, [lo, hi), and those that every row sees, [inner_lo, inner_hi). Keys outside of the first
    are not read: their pages may belong to another sequence by now, and 0 * NaN is NaN.
    """
    BLOCK_N: tl.constexpr = var.split.block_n
    TILES: tl.constexpr = var.block_k // BLOCK_N
    WORDS: tl.constexpr = var.block_k // 32
    PRECISION: tl.constexpr = var.precision
    acc, row_max, row_sum = state
    k_ptr, v_ptr, table_ptr, bits_ptr, seq64 = pointers
    lo, hi, inner_lo, inner_hi, kv_len = band
    queries, offset, live = rows
    scale, softcap = scaling
    window_left, window_right = window
    stride_kp, stride_kt, stride_vp, stride_vt = strides
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
        # The list and the page are read one iteration before their address is needed, which leaves all the stages to K and V.
        # Triton pipelines no loop that carries a value over two iterations.
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
        if var.bits:
            masked = masked | (place < partial)
        if masked:
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
                block_ptr = bits_ptr + tl.cast(place // TILES, tl.int64) * (var.block_q * WORDS)
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
        "max_q",
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
def _block_sparse(
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
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    max_q,
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
    var: tl.constexpr,
):
    """One program: one tile of packed rows, which lies in one block of queries, and one split of its lists."""
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

    row0 = seq * max_q
    q_len = max_q
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

    # the keys that a row of this tile may see, and those that all of them see as far as the band is concerned
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
        (k_ptr, v_ptr, None if table_ptr is None else table_ptr + seq64 * stride_table, bits_ptr, seq64),
        (lo, hi, inner_lo, inner_hi, kv_len),
        (queries, offset, live),
        (scale, softcap),
        (window_left, window_right),
        (stride_kp, stride_kt, stride_vp, stride_vt),
        var,
    )
    inverse, lse = finish_softmax(row_max, row_sum)
    out = acc * (inverse * descale_v)[:, None]
    if splits_ptr is None:
        store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, list_of.to(tl.int64), (stride_ot, stride_oh, stride_lh), SPLIT)
    else:
        at = (share.to(tl.int64) * units + unit) * unit_rows + offs_m
        offs_dv = tl.arange(0, SPLIT.block_dv)
        keep = live[:, None] & (offs_dv < SPLIT.dim_v)[None, :]
        tl.store(splits_ptr + at[:, None] * SPLIT.dim_v + offs_dv[None, :], out, mask=keep)
        split_lse_ptr = lse_of_splits(splits_ptr, (None, None, batch, None, None, None), splits, units, unit_rows, SPLIT)
        tl.store(split_lse_ptr + at, lse, mask=live)


def plan_block_sparse(tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of any layout with `blocks` (see `fa_serve.api`).

    A run is one launch, and a second one if lists are cut into splits. `tiles` overrides the choice, for tuning.
    """
    return _BlockSparsePlan(tensors, options, tiles)


class _BlockSparsePlan:
    """The launches of one kind of call, and the shapes of what a run allocates."""

    __slots__ = (
        "_combine",
        "_launch",
        "_layout",
        "_lse_shape",
        "_needs_lse",
        "_out_shape",
        "_split_size",
        "_takes_out",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles | None) -> None:
        q, k, v = (with_unit_stride(x) for x in tensors[:3])
        blocks = tensors.blocks
        assert blocks is not None
        dense = tensors.cu_seqlens_q is None
        self._layout = "dense" if dense else "varlen" if tensors.block_table is None else "paged"
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        num_heads = q.shape[-2]
        dim_v = v.shape[-1]
        rows_in_all = q.shape[:-2].numel()
        self._out_shape = (*q.shape[:-1], dim_v)
        self._needs_lse = options.return_lse
        self._lse_shape = (num_heads, rows_in_all)
        out = tensors.out
        self._takes_out = out is not None and (out.is_contiguous() if dense else out.stride(2) == 1)
        self._launch: Launch | None = None
        self._combine: Launch | None = None
        self._split_size = 0
        if q.numel() == 0 or batch * options.max_seqlen_q == 0:
            return
        groups = num_heads // k.shape[-2]
        packed = blocks.kv_num_blocks.shape[1] in (1, k.shape[-2])
        shared = groups if packed else 1
        list_heads = num_heads // shared
        if tiles is None:
            tiles = sparse_tiles(
                spec.arch_of(q.device),
                multiprocessors(q.device, 8),
                q.element_size(),
                q.shape[-1],
                dim_v,
                shared * blocks.block_size[0],
                blocks.block_size[1],
                shared * options.max_seqlen_q,
                batch * list_heads,
                _longest_list(blocks, options.max_seqlen_k) if options.max_seqlen_q <= spec.FEW_QUERIES else 0,
                options.num_splits,
            )
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        counts = SplitCounts(
            batch=batch,
            heads=list_heads,
            rows=shared * options.max_seqlen_q,
            block_m=tiles.block_m,
            splits=tiles.splits,
            min_blocks=1,
            max_q=options.max_seqlen_q,
            left=options.left,
        )
        variant = self._variant(tensors, options, tiles, shared, k, v)
        out_strides = out.stride()[-3:-1] if out is not None and self._takes_out else (num_heads * dim_v, dim_v)
        lse_stride = rows_in_all if self._needs_lse else 0
        programs = batch * counts.units * tiles.splits
        self._launch = Launch(
            _block_sparse,
            programs,
            varying=(
                batch,
                counts.units,
                counts.tiles_per_head,
                counts.unit_rows,
                tiles.splits,
                options.max_seqlen_q,
                options.max_seqlen_k,
                options.left,
                options.window_size[1],
                *_list_numbers(blocks),
                lse_stride,
                0 if tensors.block_table is None else tensors.block_table.stride(0),
                float(options.softmax_scale),
                float(options.softcap),
            ),
            strides=(*_row_strides(q), *_row_strides(k), *_row_strides(v), *out_strides),
            fixed=(variant,),
            options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        )
        if tiles.splits > 1:
            self._split_size = counts.buffer_size(variant.split)
            self._combine = combine_launch(counts, variant.split, lse_stride, out_strides)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v = (with_unit_stride(x) for x in tensors[:3])
        out = tensors.out
        result = out if self._takes_out and out is not None else q.new_empty(self._out_shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if self._needs_lse else None
        if self._launch is not None:
            assert tensors.blocks is not None
            lists = [x if x is None else x.contiguous() for x in tensors.blocks.tensors]
            cu_seqlens_k = tensors.keys if self._layout == "varlen" else None
            seqused_k = tensors.keys if self._layout == "paged" else None
            splits = None if self._combine is None else q.new_empty(self._split_size, dtype=torch.float32)
            where = (tensors.block_table, seqused_k, tensors.cu_seqlens_q, cu_seqlens_k)
            scales = (tensors.k_descale, tensors.v_descale, tensors.alibi_slopes)
            self._launch((q, k, v, result, lse, splits, *lists, *where, tensors.sinks, *scales))
            if self._combine is not None:
                self._combine((result, lse, splits, seqused_k, tensors.cu_seqlens_q), 0)
        if lse is not None and self._layout == "dense":
            lse = lse.view(lse.shape[0], *result.shape[:2]).transpose(0, 1)
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse

    def _variant(
        self, tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles, shared: int, k: Tensor, v: Tensor
    ) -> SparseVariant:
        """`shared`: query heads that share a list, and are packed."""
        blocks = tensors.blocks
        assert blocks is not None
        q = tensors.q
        arch = spec.arch_of(q.device)
        dim_v = v.shape[-1]
        slopes = tensors.alibi_slopes
        strides = (*_row_strides(k)[:2], *_row_strides(v)[:2])
        return SparseVariant(
            split=SplitVariant(
                groups=shared,
                dim_v=dim_v,
                block_dv=padded_dim(dim_v),
                block_m=tiles.block_m,
                block_n=tiles.block_n,
                batch_block=1,
                balanced=False,
                has_left=options.left >= 0,
                pdl=False,
                chunked=options.attention_chunk > 0,
                listed=True,
            ),
            lists_per_kv=q.shape[-2] // shared // k.shape[-2],
            block_q=blocks.block_size[0],
            block_k=blocks.block_size[1],
            bits=blocks.partial_bits is not None,
            dim=q.shape[-1],
            block_d=padded_dim(q.shape[-1]),
            layout=self._layout,
            page_size=k.shape[1] if self._layout == "paged" else 0,
            has_right=options.window_size[1] >= 0,
            has_softcap=options.softcap != 0.0,
            same_strides=_row_strides(k) == _row_strides(v),
            aligned=all(stride % 16 == 0 for stride in strides),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
            ptx=arch >= 89,
            alibi="none" if slopes is None else "heads" if slopes.dim() == 1 else "batch",
        )


def _row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of (batch or page, token, head); 0 for the first if the tensor is packed."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def _longest_list(blocks: BlockLists, max_seqlen_k: int) -> int:
    """A bound of the keys that a block of queries attends to, known on the host."""
    width = sum(x.shape[3] for x in (blocks.kv_indices, blocks.full_kv_indices) if x is not None)
    return min(width * blocks.block_size[1], max_seqlen_k)


def _list_numbers(blocks: BlockLists) -> tuple[int, ...]:
    """How far the lists of sequences and of heads are apart, in lists, and the widths of the three tensors."""
    batch, heads, query_blocks = blocks.kv_num_blocks.shape
    full_width = 0 if blocks.full_kv_indices is None else blocks.full_kv_indices.shape[3]
    return (
        0 if batch == 1 else heads * query_blocks,
        0 if heads == 1 else query_blocks,
        blocks.kv_indices.shape[3],
        full_width,
        0 if blocks.partial_bits is None else blocks.partial_bits.shape[3],
    )
