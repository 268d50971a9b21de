"""Split-KV flash decoding over a paged cache: few queries, many keys (Dao et al. 2023, "Flash-Decoding").

One program holds the queries of one KV head, up to BLOCK_M packed (token, query head) rows, and walks one piece of one
sequence's keys. Pieces are cut on the device, from the lengths there, so one captured CUDA graph is right for every length:

- balanced (`num_splits == 0`): the batch's key blocks are cut in about `parts` equal shares, so a sequence 20 times longer gets
  20 times the programs. Each program finds its piece with a prefix sum over the batch.
- fixed (`num_splits > 0`, or a batch of one): each sequence is cut in `parts` pieces by its own length. With `num_splits` given
  the tile, too, depends on nothing but heads and dtypes: a row's result is bitwise the same whatever else is in the batch.

A sequence of one piece is written at once; the others leave (out, lse) per piece, which `_combine` merges. On Hopper and later
both kernels are launched programmatically: the next starts while this one drains, and waits for its results (griddepcontrol).
Left out: long prompts (forward.py) and writing the cache (kv_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import (
    LOG2E,
    finish_softmax,
    online_softmax_update,
    softcap_scores,
    window_keep,
)
from fa_serve.backends.triton.tiles import padded_dim


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """block_m packed query rows by block_n keys.

    parts: pieces per sequence, or, when balanced, equal shares of the whole batch's key blocks
    min_blocks: no piece is cut shorter than this many key blocks
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    balanced: bool
    min_blocks: int = 1


@lru_cache(maxsize=4096)
def decode_tiles(
    arch: int, num_sms: int, itemsize: int, kv_itemsize: int, head_dim: int, head_dim_v: int, num_heads: int, num_kv_heads: int,
    batch: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int,
) -> DecodeTiles:  # fmt: skip
    """A pure function of what the host knows. With `num_splits` given, batch and lengths have no say in it."""
    groups = num_heads // num_kv_heads
    rows = groups if num_splits else groups * max_seqlen_q
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    block_m = min(64, padded_dim(rows))
    # 16 rows by 64 keys on 2 warps was the fastest of all tried on the H200 nearly everywhere (bf16, head_dim 64 and 128)
    block_n, num_warps = 64 if width <= 128 else 32, 2 if block_m == 16 and width <= 128 else 4
    if kv_itemsize == 1:
        # what is converted on the way spills on 2 warps
        num_warps = 4
    if itemsize == 4:
        # float32 products run on the FMA units, their operands live in registers
        block_m, block_n, num_warps = min(block_m, 32), 32 if width <= 128 else 16, 8
    tile_bytes = block_n * (padded_dim(head_dim) + padded_dim(head_dim_v)) * kv_itemsize
    q_bytes = block_m * padded_dim(head_dim) * itemsize
    num_stages = min(4, max(2, 1 + (_pipeline_bytes(arch) - q_bytes) // tile_bytes))
    if num_splits:
        return DecodeTiles(block_m, block_n, num_warps, num_stages, num_splits, False)
    units = num_kv_heads * triton.cdiv(groups * max_seqlen_q, block_m)
    max_blocks = triton.cdiv(max_seqlen_k, block_n)
    if max_blocks <= 1 or (batch * units >= 4 * num_sms and max_blocks <= 8):
        # every SM has several programs of a few microseconds: nothing to balance, and no second launch
        return DecodeTiles(block_m, block_n, num_warps, num_stages, 1, False)
    parts = triton.cdiv(4 * num_sms, units)
    if batch == 1:
        return DecodeTiles(block_m, block_n, num_warps, num_stages, min(parts, max_blocks), False)
    return DecodeTiles(block_m, block_n, num_warps, num_stages, parts, True, 2)


def _pipeline_bytes(arch: int) -> int:
    """Shared memory for queries, and keys and values in flight, such that two programs fit on one SM."""
    if arch in (90, 100):
        return 100 << 10
    return 72 << 10 if arch == 80 else 40 << 10 if arch else 24 << 10


@triton.jit
def _wait_for_previous_kernel(PDL: tl.constexpr):
    """Every program waits, one with nothing to do as well: the next kernel takes our end for that of our predecessor too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _visible_blocks(q_len, kv_len, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> the first key that any query of the sequence sees, its block, and how many blocks there are from it on."""
    first_key = kv_len * 0
    if HAS_LEFT:
        first_key = tl.maximum(kv_len - q_len - window_left, 0)
    first_block = first_key // BLOCK_N
    return first_key, first_block, tl.maximum((kv_len + BLOCK_N - 1) // BLOCK_N - first_block, 0)


@triton.jit
def _balanced_pieces(
    used_k_ptr, cu_q_ptr, batch, parts, min_blocks, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
):  # fmt: skip
    """-> sequence numbers and how many pieces each gets [BATCH_BLOCK].

    ceil(blocks / share) with share = ceil(all blocks / parts): at most parts + batch pieces in all.
    """
    index = tl.arange(0, BATCH_BLOCK)
    live = index < batch
    q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
    kv_len = tl.load(used_k_ptr + index, mask=live, other=0)
    _, _, blocks = _visible_blocks(q_len, kv_len, window_left, HAS_LEFT, BLOCK_N)
    blocks = tl.where(q_len > 0, blocks, 0)
    share = tl.maximum((tl.sum(blocks, 0) + parts - 1) // parts, min_blocks)
    return index, tl.where(q_len > 0, tl.maximum((blocks + share - 1) // share, 1), 0)


@triton.jit(
    do_not_specialize=["batch", "units", "tiles_per_head", "unit_rows", "parts", "min_blocks", "window_left", "window_right"]
)
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, table_ptr, used_k_ptr, cu_q_ptr, sinks_ptr,
    k_descale_ptr, v_descale_ptr, scale, softcap, batch, units, tiles_per_head, unit_rows, parts, min_blocks, window_left,
    window_right, stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_lh, stride_table,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BALANCED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _wait_for_previous_kernel(PDL)
    # the KV heads of one piece run side by side: in a (page, token, head, dim) cache they read one stretch of memory
    unit = tl.program_id(0) % units
    piece = tl.program_id(0) // units
    head_kv = unit // tiles_per_head
    tile = unit % tiles_per_head

    if BALANCED:
        index, pieces = _balanced_pieces(
            used_k_ptr, cu_q_ptr, batch, parts, min_blocks, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
        )
        ends = tl.cumsum(pieces, 0)
        seq = tl.sum((ends <= piece).to(tl.int32), 0)
        part = piece - tl.max(tl.where(ends <= piece, ends, 0), 0)
        num_parts = tl.sum(tl.where(index == seq, pieces, 0), 0)
        if seq >= batch:
            return
    else:
        seq = piece // parts
        part = piece % parts
    row0 = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - row0
    kv_len = tl.load(used_k_ptr + seq)
    first_key, first_block, blocks = _visible_blocks(q_len, kv_len, window_left, HAS_LEFT, BLOCK_N)
    if not BALANCED:
        num_parts = tl.minimum(tl.maximum(blocks // min_blocks, 1), parts)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < q_len * GROUPS
    if (part >= num_parts) | (tile * BLOCK_M >= q_len * GROUPS):
        return

    # int64 before any product with a stride: caches pass 2^31 elements
    kv64 = head_kv.to(tl.int64)
    token = row0.to(tl.int64) + rows // GROUPS
    head = kv64 * GROUPS + rows % GROUPS
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    q_ptrs = q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (offs_d < DIM)[None, :], other=0.0)
    k_ptr += kv64 * stride_kh
    v_ptr += kv64 * stride_vh
    table_ptr += seq.to(tl.int64) * stride_table
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # a sink is one more key that has a score and no value: the first piece starts from it
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        row_max = tl.where(part == 0, sink, row_max)
        row_sum = tl.where(part == 0, 1.0, row_sum)

    offset = kv_len - q_len
    begin = first_block + blocks * part // num_parts
    end = first_block + blocks * (part + 1) // num_parts
    if HAS_RIGHT:
        last_token = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, q_len * GROUPS - 1) // GROUPS
        end = tl.minimum(end, (tl.maximum(last_token + offset + window_right + 1, 0) + BLOCK_N - 1) // BLOCK_N)
    cols = begin * BLOCK_N + offs_n
    page = tl.load(table_ptr + cols // PAGE_SIZE, mask=(cols >= first_key) & (cols < kv_len), other=0)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        # a page before the window may have gone to another sequence, and 0 * NaN is NaN: hidden keys are not read
        owned = ((cols >= first_key) & (cols < kv_len))[:, None]
        page64 = page.to(tl.int64)
        slot = cols % PAGE_SIZE
        # the next block's pages: a load that feeds an address one iteration later leaves K and V all the stages
        ahead = cols + BLOCK_N
        page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=(ahead >= first_key) & (ahead < kv_len), other=0)
        k_ptrs = k_ptr + (page64 * stride_kp + slot * stride_kt)[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=owned & (offs_d < DIM)[None, :], other=0.0)
        s = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee")
            factor = 1.0
        keep = window_keep(rows // GROUPS + offset, cols, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        v_ptrs = v_ptr + (page64 * stride_vp + slot * stride_vt)[:, None] + offs_dv[None, :]
        v = tl.load(v_ptrs, mask=owned & (offs_dv < DIM_V)[None, :], other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    inverse, lse = finish_softmax(row_max, row_sum)
    out = acc * (inverse * descale_v)[:, None]
    keep_out = live[:, None] & (offs_dv < DIM_V)[None, :]
    final = True
    if part_out_ptr is not None:
        final = num_parts == 1
        slot = (piece.to(tl.int64) * units + unit) * unit_rows + tl.arange(0, BLOCK_M)
        tl.store(part_out_ptr + slot[:, None] * DIM_V + offs_dv[None, :], out, mask=keep_out & (num_parts > 1))
        tl.store(part_lse_ptr + slot, lse, mask=live & (num_parts > 1))
    if final:
        out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_dv[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=keep_out)
        if lse_ptr is not None:
            tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


@triton.jit(
    do_not_specialize=["batch", "units", "tiles_per_head", "unit_rows", "parts", "min_blocks", "window_left", "blocks_per_seq"]
)
def _combine(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, used_k_ptr, cu_q_ptr, batch, units, tiles_per_head, unit_rows, parts,
    min_blocks, window_left, blocks_per_seq, stride_ot, stride_oh, stride_lh,
    GROUPS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BALANCED: tl.constexpr,
    HAS_LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of BLOCK_ROWS rows of one sequence: weights exp(lse - max lse), BLOCK_PARTS pieces at a time."""
    _wait_for_previous_kernel(PDL)
    seq = tl.program_id(0) // blocks_per_seq
    q_len = tl.load(cu_q_ptr + seq + 1) - tl.load(cu_q_ptr + seq)
    if BALANCED:
        index, pieces = _balanced_pieces(
            used_k_ptr, cu_q_ptr, batch, parts, min_blocks, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
        )
        first_piece = tl.sum(tl.where(index < seq, pieces, 0), 0)
        num_parts = tl.sum(tl.where(index == seq, pieces, 0), 0)
    else:
        _, _, blocks = _visible_blocks(q_len, tl.load(used_k_ptr + seq), window_left, HAS_LEFT, BLOCK_N)
        first_piece = seq * parts
        num_parts = tl.minimum(tl.maximum(blocks // min_blocks, 1), parts)
    if num_parts <= 1:
        return

    slot = (tl.program_id(0) % blocks_per_seq) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = slot // unit_rows
    rows = (unit % tiles_per_head) * BLOCK_M + slot % unit_rows
    live = (rows < q_len * GROUPS) & (unit < units)
    offs_p = tl.arange(0, BLOCK_PARTS)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, num_parts, BLOCK_PARTS):
        part = start + offs_p
        keep = (part < num_parts)[:, None] & live[None, :]
        at = (first_piece + part).to(tl.int64)[:, None] * (units * unit_rows) + slot[None, :]
        lse = tl.load(part_lse_ptr + at, mask=keep, other=float("-inf")) * LOG2E
        out = tl.load(part_out_ptr + at[:, :, None] * DIM_V + offs_dv[None, None, :],
                      mask=keep[:, :, None] & (offs_dv < DIM_V)[None, None, :], other=0.0)  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max[None, :])
        alpha = tl.exp2(row_max - safe_max)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max

    inverse, lse = finish_softmax(row_max, row_sum)
    token = tl.load(cu_q_ptr + seq).to(tl.int64) + rows // GROUPS
    head = (unit // tiles_per_head).to(tl.int64) * GROUPS + rows % GROUPS
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_dv[None, :]
    tl.store(out_ptrs, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (offs_dv < DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


def launch_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, window_size: tuple[int, int], softcap: float,
    sinks: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, num_splits: int, out: Tensor | None,
    return_lse: bool, tiles: DecodeTiles | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Arguments as in `fa_serve.attention_paged`. One launch, and a second one if any sequence may be cut in pieces.

    `tiles` overrides the choice, for tuning.
    """
    total_q, num_heads, dim = q.shape
    num_kv_heads, dim_v, batch = k_cache.shape[2], v_cache.shape[3], seqused_k.shape[0]
    groups, max_seqlen_q, arch = num_heads // num_kv_heads, max(max_seqlen_q, 1), spec.arch_of(q.device)
    if tiles is None:
        tiles = decode_tiles(
            arch, _num_sms(q.device), q.element_size(), k_cache.element_size(), dim, dim_v, num_heads, num_kv_heads, batch,
            max_seqlen_q, max_seqlen_k, num_splits,
        )  # fmt: skip
    q = q if q.stride(2) == 1 else q.contiguous()
    result = q.new_empty(total_q, num_heads, dim_v) if out is None or out.stride(2) != 1 else out
    lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device) if return_lse else None
    if batch == 0:
        return result if out is None else out, lse

    tiles_per_head = -(-groups * max_seqlen_q // tiles.block_m)
    units, unit_rows = num_kv_heads * tiles_per_head, min(tiles.block_m, groups * max_seqlen_q)
    pieces = batch + tiles.parts if tiles.balanced else batch * tiles.parts
    part_out = part_lse = None
    if tiles.balanced or tiles.parts > 1:
        part_out = torch.empty(pieces * units * unit_rows, dim_v, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(pieces * units * unit_rows, dtype=torch.float32, device=q.device)
    block_dv = padded_dim(dim_v)
    pdl = arch >= 90
    plan = (batch, units, tiles_per_head, unit_rows, tiles.parts, tiles.min_blocks, window_size[0])
    out_strides = (result.stride(0), result.stride(1), 0 if lse is None else lse.stride(0))
    options = {
        "GROUPS": groups, "DIM_V": dim_v, "BLOCK_DV": block_dv, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BATCH_BLOCK": _batch_block(batch) if tiles.balanced else 1, "BALANCED": tiles.balanced,
        "HAS_LEFT": window_size[0] >= 0, "PDL": pdl, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    _decode[(pieces * units,)](
        q, k_cache, v_cache, result, lse, part_out, part_lse, block_table, seqused_k, cu_seqlens_q, sinks, k_descale, v_descale,
        softmax_scale, softcap, *plan, window_size[1], q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        *out_strides, block_table.stride(0),
        DIM=dim, BLOCK_D=padded_dim(dim), PAGE_SIZE=k_cache.shape[1], HAS_RIGHT=window_size[1] >= 0 and max_seqlen_q > 1,
        HAS_SOFTCAP=softcap != 0.0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
    )  # fmt: skip
    if part_out is not None:
        block_rows = max(1, 256 // block_dv)
        blocks_per_seq = -(-units * unit_rows // block_rows)
        _combine[(batch * blocks_per_seq,)](
            part_out, part_lse, result, lse, seqused_k, cu_seqlens_q, *plan, blocks_per_seq, *out_strides,
            BLOCK_PARTS=32, BLOCK_ROWS=block_rows, num_warps=4, **options,
        )  # fmt: skip
    if out is not None and result is not out:
        return out.copy_(result), lse
    return result, lse


def _batch_block(batch: int) -> int:
    """The prefix sum's width. Few steps, so that a growing batch compiles few kernels."""
    block = 32
    while block < batch:
        block *= 8
    return block


@cache
def _num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on ROCm) to fill; a few on the CPU, for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
