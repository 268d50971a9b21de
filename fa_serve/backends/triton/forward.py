"""The FlashAttention-2 forward pass in portable Triton: dense, varlen and paged, one kernel.

One program computes BLOCK_M query rows of one head of one sequence, and walks over the keys in tiles of BLOCK_N; rows of Q are
split among the warps, K and V are shared by them (FlashAttention-2, Dao 2023, 3.2 and 3.3). The N x N scores never leave the
registers; the output stays unscaled until the last tile (3.1). Keys wholly outside the causal or window band are never visited
and only tiles that cross its edge are masked, in a uniform branch of the one loop.

Layouts differ only in where row r of sequence b lies: dense and varlen add an offset, paged looks the page up. Lengths are
runtime values read on the device. Left out: splitting one sequence's keys among programs (decode.py), the backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_serve import spec
from fa_serve.backends.launch import launch, on_device_of
from fa_serve.backends.triton.primitives import LOG2E, finish_softmax, online_softmax_update, softcap_scores, window_keep
from fa_serve.backends.triton.tiles import TileConfig, batch_block, forward_tiles, padded_dim


@triton.jit
def _load_tile(
    tensor,
    n,
    cols,
    kv_len,
    where,
    CHECK_ROWS,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    USE_TMA: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] keys or values from key n on. Rows past kv_len read as 0: they belong to somebody else."""
    base_ptr, descriptor, stride_page, stride_t = tensor
    batch, head, row0, table_row_ptr = where
    if USE_TMA:
        if not VARLEN:
            return descriptor.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
        x = descriptor.load([0, head, row0 + n, 0]).reshape(BLOCK_N, BLOCK_D)
        if CHECK_ROWS:
            # the tile's tail is the next sequence, and 0 * NaN is NaN
            x = tl.where((cols < kv_len)[:, None], x, 0.0)
        return x
    offs_d = tl.arange(0, BLOCK_D)
    if PAGE_SIZE > 0:
        page = tl.load(table_row_ptr + cols // PAGE_SIZE, mask=cols < kv_len, other=0).to(tl.int64)
        row_ptrs = base_ptr + page * stride_page + (cols % PAGE_SIZE) * stride_t
    else:
        row_ptrs = base_ptr + n.to(tl.int64) * stride_t + (cols - n) * stride_t
    keep = (cols < kv_len)[:, None]
    if DIM < BLOCK_D:
        keep = keep & (offs_d < DIM)[None, :]
    return tl.load(row_ptrs[:, None] + offs_d[None, :], mask=keep, other=0.0)


@triton.jit
def _walk(
    state,
    q,
    span,
    k_tensor,
    v_tensor,
    mask_tensor,
    where,
    rows,
    scaling,
    window,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    USE_TMA: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The inner loop. Tiles outside [inner_lo, inner_hi) cross the band's edge or the end of the sequence and are masked.

    The branch is uniform, and one loop keeps one software pipeline: cutting the walk in three drains it twice more.
    """
    acc, row_max, row_sum = state
    lo, inner_lo, inner_hi, hi, kv_len = span
    q_rows, q_len, offset = rows
    scale, softcap = scaling
    window_left, window_right = window
    mask_ptr, stride_mq, stride_mk = mask_tensor
    for n in tl.range(lo, hi, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        cols = n + tl.arange(0, BLOCK_N)
        edge = (n < inner_lo) | (n >= inner_hi)
        k = _load_tile(k_tensor, n, cols, kv_len, where, False, DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, USE_TMA, VARLEN)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee")
            factor = 1.0
        if MASK != "none":
            inside = (q_rows < q_len)[:, None] & (cols < kv_len)[None, :]
            mask_ptrs = mask_ptr + q_rows[:, None].to(tl.int64) * stride_mq + cols[None, :] * stride_mk
            given = tl.load(mask_ptrs, mask=inside, other=0)
            if MASK == "bool":
                s = tl.where(given != 0, s, float("-inf"))
            else:
                s = s * factor + given.to(tl.float32) * LOG2E
                factor = 1.0
        if edge:
            keep = window_keep(q_rows + offset, cols, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        v = _load_tile(v_tensor, n, cols, kv_len, where, edge, DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, USE_TMA, VARLEN)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _find_tile(tile, cu_q_ptr, batch, skip_q, BLOCK_M: tl.constexpr, BATCH_BLOCK: tl.constexpr):
    """-> the sequence and block of rows of a tile, among those of sequences with more than skip_q queries, longest rows first.

    The sequence is `batch` when the tiles have run out.
    """
    index = tl.arange(0, BATCH_BLOCK)
    live = index < batch
    q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
    tiles = tl.where(q_len > skip_q, (q_len + BLOCK_M - 1) // BLOCK_M, 0)
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
    NUM_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    USE_TMA: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
):
    # neighbours in launch order share K and V: (group of heads, block of rows, head in the group). The longest rows go first.
    pid = tl.program_id(0)
    group = pid // (head_group * num_m)
    rest = pid % (head_group * num_m)
    bh = group * head_group + rest % head_group
    block = num_m - 1 - rest // head_group if HAS_RIGHT else rest // head_group
    batch = bh // NUM_HEADS
    head = bh % NUM_HEADS
    if BATCH_BLOCK > 0:
        head = pid % NUM_HEADS
        batch, block = _find_tile(pid // NUM_HEADS, cu_q_ptr, num_seqs, skip_q, BLOCK_M, BATCH_BLOCK)
        if batch >= num_seqs:
            return
    head_kv = head // GROUPS

    if VARLEN:
        q_row0 = tl.load(cu_q_ptr + batch)
        q_len = tl.load(cu_q_ptr + batch + 1) - q_row0
    else:
        q_row0 = 0
        q_len = seqlen_q
    if PAGE_SIZE > 0:
        k_row0 = 0
        kv_len = tl.load(used_k_ptr + batch)
    elif VARLEN:
        k_row0 = tl.load(cu_k_ptr + batch)
        kv_len = tl.load(cu_k_ptr + batch + 1) - k_row0
    else:
        k_row0 = 0
        kv_len = seqlen_k
    m0 = block * BLOCK_M
    if m0 >= q_len:
        return

    # int64 before any product with a stride: a long batch passes 2^31 elements
    batch_q = 0 if VARLEN else batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv64 = head_kv.to(tl.int64)
    first_row = (q_row0 + m0).to(tl.int64)
    if PAGE_SIZE > 0:
        table_ptr += batch.to(tl.int64) * stride_table
        k_ptr += kv64 * stride_kh
        v_ptr += kv64 * stride_vh
    elif not USE_TMA:
        row64 = k_row0.to(tl.int64) if VARLEN else 0
        k_ptr += batch_q * stride_kb + row64 * stride_kt + kv64 * stride_kh
        v_ptr += batch_q * stride_vb + row64 * stride_vt + kv64 * stride_vh
    if MASK != "none":
        mask_ptr += batch.to(tl.int64) * stride_mb + head64 * stride_mh

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_rows = m0 + offs_m
    live = (q_rows < q_len)[:, None]
    q_ptr += batch_q * stride_qb + first_row * stride_qt + head64 * stride_qh
    q = tl.load(
        q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :],
        mask=live & (offs_d < DIM)[None, :] if DIM < BLOCK_D else live,
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

    # the band of visible keys for this block of rows, and the part of it where every row sees every key
    offset = kv_len - q_len
    last_row = tl.minimum(m0 + BLOCK_M, q_len) - 1
    lo = 0
    inner_lo = 0
    hi = kv_len
    inner_hi = kv_len // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        lo = tl.maximum(m0 + offset - window_left, 0) // BLOCK_N * BLOCK_N
        inner_lo = tl.maximum(last_row + offset - window_left, 0)
    if HAS_RIGHT:
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
        (scale, softcap),
        (window_left, window_right),
        DIM,
        DIM_V,
        BLOCK_D,
        BLOCK_DV,
        BLOCK_N,
        PAGE_SIZE,
        USE_TMA,
        VARLEN,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        MASK,
        PRECISION,
    )

    inverse, lse = finish_softmax(row_max, row_sum)
    if lse_ptr is not None:
        lse_ptr += batch_q * stride_lb + head64 * stride_lh + first_row
        tl.store(lse_ptr + offs_m, lse, mask=q_rows < q_len)
    out_ptr += batch_q * stride_ob + first_row * stride_ot + head64 * stride_oh
    tl.store(
        out_ptr + offs_m[:, None] * stride_ot + offs_dv[None, :],
        (acc * inverse[:, None]).to(out_ptr.dtype.element_ty),
        mask=live & (offs_dv < DIM_V)[None, :] if DIM_V < BLOCK_DV else live,
    )


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    skip_q: int = 0,
    lse: Tensor | None = None,
    tiles: TileConfig | None = None,
    memo: object = None,
    k_descale: None = None,
    v_descale: None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Allocates out and lse, picks the tile, launches once.

    Dense: q (batch, seqlen_q, heads, dim) and no cu_seqlens. Varlen: q (total, heads, dim) with cu_seqlens_q and _k. Paged: q
    (total, heads, dim) with cu_seqlens_q, block_table, seqused_k, and k, v as (num_pages, page_size, heads, dim).
    With skip_q > 0, sequences of up to skip_q queries are left to another kernel: their rows of out and lse stay as they are,
    and the grid holds the tiles of the others alone, found by a prefix sum on the device. `lse` is written if given, `tiles`
    overrides the choice, for tuning. It keeps no memo, and caches here are not quantised, nor keys split.
    """
    varlen = cu_seqlens_q is not None
    paged = block_table is not None
    num_heads = q.shape[-2]
    num_kv_heads = k.shape[-2]
    dim = q.shape[-1]
    dim_v = v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if varlen:
        batch = cu_seqlens_q.shape[0] - 1
        q_strides = (0, *q.stride()[:2])
        lse_shape = (num_heads, q.shape[0])
    else:
        batch = q.shape[0]
        max_seqlen_q = q.shape[1]
        max_seqlen_k = k.shape[1]
        q_strides = q.stride()[:3]
        lse_shape = (batch, num_heads, max_seqlen_q)
    k_strides, v_strides = ((0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3] for x in (k, v))
    result = torch.empty((*q.shape[:-1], dim_v), dtype=q.dtype, device=q.device) if out is None else out
    if result.stride(-1) != 1:
        result = torch.empty_like(result, memory_format=torch.contiguous_format)
    out_strides = (0, *result.stride()[:2]) if varlen else result.stride()[:3]
    if return_lse and lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    mask_strides = (0, 0, 0, 0)
    if mask is not None:
        mask_strides = tuple(0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True))
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    if tiles is None:
        tiles = forward_tiles(
            spec.arch_of(q.device),
            q.element_size(),
            dim,
            dim_v,
            max_seqlen_q,
            max_seqlen_k,
            causal=window_size[1] >= 0,
            paged=paged,
            masked=mask is not None,
        )
    use_tma = tiles.tma and not paged and _tma_reads(k) and _tma_reads(v)
    block_d = padded_dim(dim)
    block_dv = padded_dim(dim_v)
    num_m = -(-max_seqlen_q // tiles.block_m)
    # more than skip_q queries each: that many sequences at most, with a part of a tile each
    num_tiles = batch * num_m if skip_q == 0 else min(batch, q.shape[0] // (skip_q + 1)) + q.shape[0] // tiles.block_m
    if num_tiles * num_heads > 0:
        descriptors = (None, None)
        if use_tma:
            descriptors = _descriptor(k, tiles.block_n, block_d), _descriptor(v, tiles.block_n, block_dv)
        pointers = (q, k, v, result, lse, sinks, mask, *descriptors, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
        group = _head_group(batch * num_heads, num_heads // num_kv_heads, max_seqlen_k, dim + dim_v, k.element_size())
        varying = (float(softmax_scale), float(softcap), *window_size, max_seqlen_q, max_seqlen_k, num_m, group, batch, skip_q)
        strides = (
            *q_strides,
            *k_strides,
            *v_strides,
            *out_strides,
            0 if lse is None or varlen else lse.stride(0),
            0 if lse is None else lse.stride(-2),
            *mask_strides,
            0 if block_table is None else block_table.stride(0),
        )
        fixed = (
            num_heads,
            num_heads // num_kv_heads,
            dim,
            dim_v,
            block_d,
            block_dv,
            tiles.block_m,
            tiles.block_n,
            k.shape[1] if paged else 0,
            use_tma,
            varlen,
            window_size[0] >= 0,
            window_size[1] >= 0,
            softcap != 0.0,
            "none" if mask is None else "bool" if mask.dtype == torch.uint8 else "float",
            "ieee" if q.dtype == torch.float32 else "tf32",
            batch_block(batch) if skip_q else 0,
        )
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        grid = num_tiles * num_heads
        if use_tma:
            with on_device_of(q):
                _attn_fwd[grid,](*pointers, *varying, *strides, *fixed, **options)
        else:
            launch(_attn_fwd, grid, pointers, varying, fixed, options, strides)
    if out is not None and result is not out:
        return out.copy_(result), lse
    return result, lse


def _head_group(batch_heads: int, groups: int, seqlen_k: int, dims: int, itemsize: int, l2_bytes: int = 32 << 20) -> int:
    """How many (batch, head) pairs run side by side, so that their K and V stay in L2 while the row blocks pass over them."""
    group = max(1, min(batch_heads, l2_bytes * groups // max(1, seqlen_k * dims * itemsize)))
    while batch_heads % group:
        group -= 1
    return group


def _tma_reads(x: Tensor) -> bool:
    """TMA wants a 16-byte aligned base and strides that are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _descriptor(x: Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    """(batch, heads, seqlen, dim): rows past the end of a sequence, and columns past head_dim, are filled with zeros."""
    x = (x if x.dim() == 4 else x[None]).transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block_n, block_d])
