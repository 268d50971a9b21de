"""The FlashAttention-2 forward pass in portable Triton: dense, varlen and paged, in one kernel.

One program computes `block_m` query rows of one head of one sequence and walks over the keys in tiles of `block_n`. The rows of
Q are divided among the warps, which share K and V (FlashAttention-2, Dao 2023, sections 3.2 and 3.3). The N x N scores never
leave the registers, and the output stays unscaled until the last tile (section 3.1). Keys that lie completely outside of the
causal or window band are never visited, and only tiles that cross the edge of the band are masked, in a uniform branch of the
one loop.

The layouts differ only in where row r of sequence b lies: dense and varlen add an offset, paged looks the page up. Lengths are
runtime values that the kernel reads on the device. This module leaves out dividing one sequence's keys among programs
(`decode`) and the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.launch import FUSED, Launch, on_device_of, with_unit_stride
from fa_serve.backends.plan import AttentionOptions, AttentionTensors, Run
from fa_serve.backends.triton.primitives import (
    LOG2E,
    add_alibi,
    finish_softmax,
    first_visible,
    online_softmax_update,
    softcap_scores,
    window_keep,
)
from fa_serve.backends.triton.triton_tiles import TileConfig, batch_block, forward_tiles, padded_dim

_L2_BYTES = 32 << 20  # how much of the L2 cache the keys and values of concurrent programs may fill


@dataclass(frozen=True, slots=True)
class ForwardVariant:
    """What the forward kernel is compiled for.

    groups:      query heads per KV head
    dim, dim_v:  head_dim and head_dim_v; block_d, block_dv: the same, padded to tiles
    page_size:   tokens per page, 0 for keys that are not paged
    tma:         K and V are read through tensor descriptors
    mask:        "none", "bool" or "float"
    precision:   input precision of the products
    ptx:         inline PTX is available
    batch_block: with `skip_q`, the width of the prefix sum that finds a program's tile, else 0
    chunked:     the left limit is a chunk and not a window
    alibi:       "none", "heads" or "batch": slopes for each head, or for each sequence and head
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


@triton.jit
def _load_tile(tensor, n, cols, kv_len, where, CHECK_ROWS, DIM: tl.constexpr, BLOCK_D: tl.constexpr, var: tl.constexpr):
    """[BLOCK_N, BLOCK_D] keys or values from key n on. Rows past kv_len belong to another sequence and read as 0."""
    BLOCK_N: tl.constexpr = var.block_n
    base_ptr, descriptor, stride_page, stride_t = tensor
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
def _walk(state, q, span, k_tensor, v_tensor, mask_tensor, where, rows, scaling, window, var: tl.constexpr):
    """The inner loop. Tiles outside of [inner_lo, inner_hi) cross the edge of the band or the end of the sequence and are
    masked.

    The branch is uniform, and one loop keeps one software pipeline. Cutting the walk into three loops drains the pipeline
    twice more.
    """
    BLOCK_N: tl.constexpr = var.block_n
    PRECISION: tl.constexpr = var.precision
    acc, row_max, row_sum = state
    lo, inner_lo, inner_hi, hi, kv_len = span
    q_rows, q_len, offset = rows
    scale, softcap, slope = scaling
    window_left, window_right = window
    mask_ptr, stride_mq, stride_mk = mask_tensor
    for n in tl.range(lo, hi, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        cols = n + tl.arange(0, BLOCK_N)
        edge = (n < inner_lo) | (n >= inner_hi)
        k = _load_tile(k_tensor, n, cols, kv_len, where, False, var.dim, var.block_d, var)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        factor = scale * LOG2E
        if var.has_softcap:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee", var.ptx)
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
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        v = _load_tile(v_tensor, n, cols, kv_len, where, edge, var.dim_v, var.block_dv, var)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _find_tile(tile, cu_q_ptr, batch, skip_q, var: tl.constexpr):
    """-> the sequence and the block of rows of a tile, among the sequences with more than skip_q queries, last rows first.

    The sequence is `batch` when there are no more tiles.
    """
    index = tl.arange(0, var.batch_block)
    live = index < batch
    q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
    tiles = tl.where(q_len > skip_q, (q_len + var.block_m - 1) // var.block_m, 0)
    ends = tl.cumsum(tiles, 0)
    seq = tl.sum((ends <= tile).to(tl.int32), 0)
    return tl.minimum(seq, batch), tl.sum(tl.where(index == seq, ends, 0), 0) - 1 - tile


@triton.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "num_m", "window_left", "window_right", "head_group", "num_seqs", "skip_q"]
)
def _attn_fwd(
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
    scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
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
    """One program: block_m query rows of one head of one sequence."""
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
        batch, block = _find_tile(pid // var.num_heads, cu_q_ptr, num_seqs, skip_q, var)
        if batch >= num_seqs:
            return
    head_kv = head // var.groups

    if var.varlen:
        q_row0 = tl.load(cu_q_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row0
    else:
        q_row0 = 0
        q_len = seqlen_q
    if var.page_size > 0:
        k_row0 = 0
        kv_len = tl.load(used_k_ptr + batch)
    elif var.varlen:
        k_row0 = tl.load(cu_k_ptr + batch)
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row0
    else:
        k_row0 = 0
        kv_len = seqlen_k
    m0 = block * BLOCK_M
    if m0 >= q_len:
        return

    # int64 before any product with a stride: a long batch has more than 2^31 elements
    batch_q = 0 if var.varlen else batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv64 = head_kv.to(tl.int64)
    first_row = (q_row0 + m0).to(tl.int64)
    if var.page_size > 0:
        table_ptr += batch.to(tl.int64) * stride_table
        k_ptr += kv64 * stride_kh
        v_ptr += kv64 * stride_vh
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
    q_ptr += batch_q * stride_qb + first_row * stride_qt + head64 * stride_qh
    q = tl.load(
        q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :],
        mask=live & (offs_d < var.dim)[None, :] if var.dim < var.block_d else live,
        other=0.0,
    )

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        # a sink is one more key that has a score and no value: start from it
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)

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
        (window_left, window_right),
        var,
    )

    inverse, lse = finish_softmax(row_max, row_sum)
    if lse_ptr is not None:
        lse_ptr += batch_q * stride_lb + head64 * stride_lh + first_row
        tl.store(lse_ptr + offs_m, lse, mask=q_rows < q_len)
    out_ptr += batch_q * stride_ob + first_row * stride_ot + head64 * stride_oh
    tl.store(
        out_ptr + offs_m[:, None] * stride_ot + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        mask=live & (offs_dv < var.dim_v)[None, :] if var.dim_v < BLOCK_DV else live,
    )


def plan_forward(tensors: AttentionTensors, options: AttentionOptions, tiles: TileConfig | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of any layout (see `fa_serve.api`). A run is one launch.

    With options.skip_q > 0, sequences of up to skip_q queries are left to another kernel: their rows of out and lse stay as
    they are, and the grid holds only the tiles of the other sequences, which a prefix sum on the device finds. `tiles`
    overrides the choice, for tuning. Caches are not quantised here and keys are not split.
    """
    return _ForwardPlan(tensors, options, tiles)


class _ForwardPlan:
    """The launch of one kind of call, and the shapes of what a run allocates."""

    __slots__ = (
        "_block_d",
        "_block_dv",
        "_launch",
        "_layout",
        "_lse_shape",
        "_needs_lse",
        "_options",
        "_out_shape",
        "_tiles",
        "_uses_tma",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: TileConfig | None) -> None:
        q, k, v = (with_unit_stride(x) for x in tensors[:3])
        paged = tensors.block_table is not None
        if tiles is None:
            tiles = forward_tiles(
                spec.arch_of(q.device),
                q.element_size(),
                q.shape[-1],
                v.shape[-1],
                options.max_seqlen_q,
                options.max_seqlen_k,
                causal=options.window_size[1] >= 0,
                paged=paged,
                masked=tensors.mask is not None,
            )
        assert not paged or tiles.block_n <= MAX_KEYS_PER_TILE
        self._options = options
        self._tiles = tiles
        self._layout = "paged" if paged else "dense" if tensors.cu_seqlens_q is None else "varlen"
        self._block_d = padded_dim(q.shape[-1])
        # With tiles of K 32 wide and of V 16 wide the kernel that Triton 3.6 makes for head_dim 24 and head_dim_v 12 in 16 bits
        # gave wrong rows and read invalid addresses on an H200. It is right with tiles of V that are 32 wide, too.
        self._block_dv = max(padded_dim(v.shape[-1]), min(32, self._block_d))
        self._out_shape = (*q.shape[:-1], v.shape[-1])
        self._needs_lse = options.return_lse
        self._lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        # A tensor without elements has no descriptor. Through pointers nothing of it is read.
        has_keys = k.numel() > 0 and v.numel() > 0
        self._uses_tma = tiles.tma and not paged and has_keys and _tma_strides(k) and _tma_strides(v)
        out = tensors.out if tensors.out is not None and tensors.out.stride(-1) == 1 else None
        self._launch = self._make_launch(tensors._replace(q=q, k=k, v=v, out=out), options)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v = (with_unit_stride(x) for x in tensors[:3])
        if self._uses_tma and (k.data_ptr() | v.data_ptr()) & 15:
            return _ForwardPlan(tensors, self._options, replace(self._tiles, tma=False))(tensors)
        out = tensors.out
        result = out if out is not None and out.stride(-1) == 1 else q.new_empty(self._out_shape)
        lse = tensors.lse
        if self._needs_lse and lse is None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._launch is not None:
            mask = tensors.mask
            if mask is not None and mask.dtype == torch.bool:
                mask = mask.view(torch.uint8)
            cu_seqlens_k = tensors.keys if self._layout == "varlen" else None
            seqused_k = tensors.keys if self._layout == "paged" else None
            descriptors: tuple[Any, ...] = (None, None)
            if self._uses_tma:
                descriptors = (
                    _descriptor(k, self._tiles.block_n, self._block_d),
                    _descriptor(v, self._tiles.block_n, self._block_dv),
                )
            pointers = (q, k, v, result, lse, tensors.sinks, mask, tensors.alibi_slopes, *descriptors)
            self._launch((*pointers, tensors.cu_seqlens_q, cu_seqlens_k, seqused_k, tensors.block_table))
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse

    def _make_launch(self, tensors: AttentionTensors, options: AttentionOptions) -> Any:
        """The launch for these tensors; None if there is nothing to compute."""
        q = tensors.q
        k = tensors.k
        dense = self._layout == "dense"
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        num_heads = q.shape[-2]
        num_m = -(-options.max_seqlen_q // self._tiles.block_m)
        num_tiles = batch * num_m
        if options.skip_q:
            # At most so many sequences have more than skip_q queries, each with one tile that is not full.
            num_tiles = min(batch, q.shape[0] // (options.skip_q + 1)) + q.shape[0] // self._tiles.block_m
        if num_tiles * num_heads == 0:
            return None
        groups = num_heads // k.shape[-2]
        head_bytes = options.max_seqlen_k * (q.shape[-1] + self._out_shape[-1]) * k.element_size()
        varying = (
            float(options.softmax_scale),
            float(options.softcap),
            options.left,
            options.window_size[1],
            options.max_seqlen_q,
            options.max_seqlen_k,
            num_m,
            _head_group(batch * num_heads, groups, head_bytes),
            batch,
            options.skip_q,
        )
        launch_options = {"num_warps": self._tiles.num_warps, "num_stages": self._tiles.num_stages}
        variant = self._variant(tensors, options, groups, batch)
        strides = self._strides(tensors, dense)
        grid = num_tiles * num_heads
        if self._uses_tma:
            return _TmaLaunch(grid, (*varying, *strides, variant), launch_options)
        return Launch(_attn_fwd, grid, varying=varying, strides=strides, fixed=(variant,), options=launch_options)

    def _variant(self, tensors: AttentionTensors, options: AttentionOptions, groups: int, batch: int) -> ForwardVariant:
        mask = tensors.mask
        return ForwardVariant(
            num_heads=tensors.q.shape[-2],
            groups=groups,
            dim=tensors.q.shape[-1],
            dim_v=tensors.v.shape[-1],
            block_d=self._block_d,
            block_dv=self._block_dv,
            block_m=self._tiles.block_m,
            block_n=self._tiles.block_n,
            page_size=tensors.k.shape[1] if self._layout == "paged" else 0,
            tma=self._uses_tma,
            varlen=self._layout != "dense",
            has_left=options.left >= 0,
            has_right=options.window_size[1] >= 0,
            has_softcap=options.softcap != 0.0,
            mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
            precision="ieee" if tensors.q.dtype == torch.float32 else "tf32",
            ptx=spec.arch_of(tensors.q.device) >= 80,
            batch_block=batch_block(batch) if options.skip_q else 0,
            chunked=options.attention_chunk > 0,
            alibi=_alibi_of(tensors),
        )

    def _strides(self, tensors: AttentionTensors, dense: bool) -> tuple[int, ...]:
        """In the order of the kernel's parameters. A packed tensor has no stride between sequences."""
        q_strides = _row_strides(tensors.q)
        out_strides = _row_strides(tensors.out) if tensors.out is not None else _contiguous_strides(self._out_shape)
        lse_strides = (0, 0)
        if self._needs_lse:
            lse_head_stride = tensors.lse.stride(-2) if tensors.lse is not None else self._lse_shape[-1]
            lse_strides = (self._lse_shape[1] * self._lse_shape[2] if dense else 0, lse_head_stride)
        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if tensors.mask is not None:
            sizes = zip(tensors.mask.shape, tensors.mask.stride(), strict=True)
            mask_strides = tuple([0 if size == 1 else stride for size, stride in sizes])
        table_stride = 0 if tensors.block_table is None else tensors.block_table.stride(0)
        return (
            *q_strides,
            *_row_strides(tensors.k),
            *_row_strides(tensors.v),
            *out_strides,
            *lse_strides,
            *mask_strides,
            table_stride,
        )


class _TmaLaunch:
    """A launch with tensor descriptors, through the JIT at each call: the descriptors hold addresses."""

    __slots__ = ("_grid", "_numbers", "_options")

    def __init__(self, grid: int, numbers: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._grid = grid
        self._numbers = numbers
        self._options = {**FUSED, **options}

    def __call__(self, pointers: tuple[Any, ...]) -> None:
        with on_device_of(pointers[0]):
            _attn_fwd[self._grid,](*pointers, *self._numbers, **self._options)


def _alibi_of(tensors: AttentionTensors) -> str:
    slopes = tensors.alibi_slopes
    return "none" if slopes is None else "heads" if slopes.dim() == 1 else "batch"


def _row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of (batch or page, token, head); 0 for the first if the tensor is packed."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """`_row_strides` of a contiguous tensor."""
    head = shape[-1]
    token = shape[-2] * head
    return (shape[1] * token if len(shape) == 4 else 0, token, head)


def _head_group(batch_heads: int, groups: int, head_bytes: int) -> int:
    """How many (batch, head) pairs run side by side, so that their K and V stay in L2 while the row blocks pass over them."""
    group = max(1, min(batch_heads, _L2_BYTES * groups // max(1, head_bytes)))
    while batch_heads % group:
        group -= 1
    return group


def _tma_strides(x: Tensor) -> bool:
    """Whether TMA can read a tensor with these strides, which must be multiples of 16 bytes. The address must be one, too."""
    return all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _descriptor(x: Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    """(batch, heads, seqlen, dim). Rows past the end of a sequence and columns past head_dim are filled with zeros."""
    x = (x if x.dim() == 4 else x[None]).transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block_n, block_d])
