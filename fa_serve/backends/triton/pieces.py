"""How split-KV decoding cuts keys into pieces, on the device, and how it merges what they give.

The kernel of decode.py and `_combine` here find the same pieces, each from the lengths: nothing about them is stored. Left out:
what is done with a piece (decode.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fa_serve.backends.launch import Launch
from fa_serve.backends.triton.primitives import LOG2E, finish_softmax, wait_for_previous_kernel
from fa_serve.backends.triton.tiles import launch_options


@triton.jit
def visible_blocks(q_len, kv_len, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> the first key that any query of the sequence sees, its block, and how many blocks there are from it on."""
    first_key = kv_len * 0
    if HAS_LEFT:
        first_key = tl.maximum(kv_len - q_len - window_left, 0)
    first_block = first_key // BLOCK_N
    return first_key, first_block, tl.maximum((kv_len + BLOCK_N - 1) // BLOCK_N - first_block, 0)


@triton.jit
def sequence_lengths(seq, cu_q_ptr, used_k_ptr, max_q, max_k):
    """-> first row, queries and keys of a sequence; a dense batch has no cu_q_ptr, and all are alike."""
    if cu_q_ptr is None:
        row0 = seq * max_q
        q_len = max_q
        kv_len = max_k
    else:
        row0 = tl.load(cu_q_ptr + seq)
        q_len = tl.load(cu_q_ptr + seq + 1) - row0
        kv_len = tl.load(used_k_ptr + seq)
    return row0, q_len, kv_len


@triton.jit
def _ends_on_line(
    index,
    cu_q_ptr,
    used_k_ptr,
    batch,
    max_q,
    max_k,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where sequences end on a line on which all their blocks lie, at least one each; those of other kernels take no room."""
    if cu_q_ptr is None:
        _, _, blocks = visible_blocks(max_q, max_k, window_left, HAS_LEFT, BLOCK_N)
        ends = tl.minimum(index + 1, batch) * tl.maximum(blocks, 1)
    else:
        live = index < batch
        q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
        kv_len = tl.load(used_k_ptr + index, mask=live, other=0)
        _, _, blocks = visible_blocks(q_len, kv_len, window_left, HAS_LEFT, BLOCK_N)
        ends = tl.cumsum(tl.where((q_len > 0) & (q_len <= max_q), tl.maximum(blocks, 1), 0), 0)
    return ends


@triton.jit
def share_of_line(
    piece,
    cu_q_ptr,
    used_k_ptr,
    batch,
    parts,
    min_blocks,
    max_q,
    max_k,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
):
    """The line of `_ends_on_line`, cut in equal shares.

    -> begin and end of this share, the first sequence in it and the one after its last, where that first one starts on the
    line, and the size of a share.
    """
    index = tl.arange(0, BATCH_BLOCK)
    ends = _ends_on_line(index, cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left, HAS_LEFT, BLOCK_N)
    total = tl.max(ends, 0)
    share = tl.maximum((total + parts - 1) // parts, min_blocks)
    begin = piece * share
    end = tl.minimum(begin + share, total)
    first = tl.sum((ends <= begin).to(tl.int32), 0)
    behind = tl.where(begin < end, tl.sum((ends < end).to(tl.int32), 0) + 1, first)
    return begin, end, first, behind, tl.max(tl.where(ends <= begin, ends, 0), 0), share


@triton.jit
def _start_of(
    seq,
    cu_q_ptr,
    used_k_ptr,
    batch,
    parts,
    min_blocks,
    max_q,
    max_k,
    window_left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
):
    """-> where on the line a sequence starts, and the size of a share."""
    index = tl.arange(0, BATCH_BLOCK)
    ends = _ends_on_line(index, cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left, HAS_LEFT, BLOCK_N)
    share = tl.maximum((tl.max(ends, 0) + parts - 1) // parts, min_blocks)
    return tl.max(tl.where(index < seq, ends, 0), 0), share


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    lse,
    rows,
    live,
    row0,
    kv64,
    stride_ot,
    stride_oh,
    stride_lh,
    GROUPS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Packed rows to where their token and query head are."""
    offs_dv = tl.arange(0, BLOCK_DV)
    token = row0.to(tl.int64) + rows // GROUPS
    head = kv64 * GROUPS + rows % GROUPS
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_dv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (offs_dv < DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


@triton.jit(
    do_not_specialize=[
        "batch",
        "units",
        "tiles_per_head",
        "unit_rows",
        "parts",
        "min_blocks",
        "max_q",
        "max_k",
        "window_left",
        "stride_lh",
        "blocks_per_seq",
    ]
)
def _combine(
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    used_k_ptr,
    cu_q_ptr,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    parts,
    min_blocks,
    max_q,
    max_k,
    window_left,
    stride_lh,
    blocks_per_seq,
    stride_ot,
    stride_oh,
    GROUPS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BALANCED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Merge the pieces of BLOCK_ROWS rows of one sequence, BLOCK_PARTS at a time: weights exp(lse - max lse).

    The lengths may be read before the wait: `_decode`, which let us start, had by then waited for whoever wrote them.
    """
    seq = tl.program_id(0) // blocks_per_seq
    row0, q_len, kv_len = sequence_lengths(seq, cu_q_ptr, used_k_ptr, max_q, max_k)
    _, _, blocks = visible_blocks(q_len, kv_len, window_left, HAS_LEFT, BLOCK_N)
    if BALANCED:
        start, share = _start_of(
            seq, cu_q_ptr, used_k_ptr, batch, parts, min_blocks, max_q, max_k, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
        )
        place0 = 2 * (start // share)
        num_parts = (start + tl.maximum(blocks, 1) - 1) // share - start // share + 1
    else:
        place0 = seq * parts
        num_parts = tl.minimum(tl.maximum(blocks // min_blocks, 1), parts)
    wait_for_previous_kernel(PDL)
    if (num_parts <= 1) | (q_len <= 0) | (q_len > max_q):
        return

    slot = (tl.program_id(0) % blocks_per_seq) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = slot // unit_rows
    rows = unit % tiles_per_head * BLOCK_M + slot % unit_rows
    live = (unit < units) & (rows < q_len * GROUPS)
    offs_p = tl.arange(0, BLOCK_PARTS)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for first in tl.range(0, num_parts, BLOCK_PARTS):
        part = first + offs_p
        place = place0 + part
        if BALANCED:
            # only the first piece of a sequence left it in its second place
            place = place0 + 2 * part + (part == 0).to(tl.int32)
        keep = (part < num_parts)[:, None] & live[None, :]
        at = place.to(tl.int64)[:, None] * (units * unit_rows) + slot[None, :]
        lse = tl.load(part_lse_ptr + at, mask=keep, other=float("-inf")) * LOG2E
        out = tl.load(
            part_out_ptr + at[:, :, None] * DIM_V + offs_dv[None, None, :],
            mask=keep[:, :, None] & (offs_dv < DIM_V)[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max[None, :])
        alpha = tl.exp2(row_max - safe_max)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    inverse, lse = finish_softmax(row_max, row_sum)
    store_rows(
        out_ptr,
        lse_ptr,
        acc * inverse[:, None],
        lse,
        rows,
        live,
        row0,
        (unit // tiles_per_head).to(tl.int64),
        stride_ot,
        stride_oh,
        stride_lh,
        GROUPS,
        DIM_V,
        BLOCK_DV,
    )


def combine_launch(plan: tuple[int, ...], lse_stride: int, fixed: tuple[Any, ...], out_strides: tuple[int, ...]) -> Launch:
    """Merges what `_decode` left in pieces. plan and fixed: those arguments of `_combine` that `_decode` has too; the tensors
    are out, lse, part_out, part_lse, seqused_k and cu_seqlens_q."""
    batch, units, _, unit_rows, parts, *_ = plan
    _, _, block_dv, _, _, _, balanced, _, pdl = fixed
    block_parts, block_rows, num_warps = _combine_block(balanced, parts, block_dv, batch * units * unit_rows)
    blocks_per_seq = -(-units * unit_rows // block_rows)
    return Launch(
        _combine,
        batch * blocks_per_seq,
        (*plan, lse_stride, blocks_per_seq),
        (*fixed, block_parts, block_rows),
        launch_options(pdl, num_warps),
        out_strides,
    )


def _combine_block(balanced: bool, parts: int, block_dv: int, rows: int) -> tuple[int, int, int]:
    """BLOCK_PARTS, BLOCK_ROWS and warps: of few values each, so that changing shapes compile few kernels.

    One warp adds up a row in its registers, where four pass every sum through shared memory. The call with it, us on one H200,
    32/8 and 64/8 heads of 128: 8 x 8192 72.2 and 74.6 with four, 32 x 4096 131.7 and 134.5, 134.0 and 141.7. One sequence
    leaves so many pieces that two warps share them: 1024 keys 6.8 and 7.5. The order in which pieces are added follows from
    the first two, so with fixed pieces it does not depend on the batch.
    """
    if not balanced:
        return 16 if parts <= 16 else 32 if parts <= 32 else 64, 1, 2 if block_dv <= 128 else 4
    if rows >= 4096:
        return 4, 2, 1  # fewer programs, of few pieces each: 256 x 4096, 64/8 heads, 994 and 1004 us; of 64 539 and 550
    return 16 if block_dv <= 128 else 4, 1, 1
