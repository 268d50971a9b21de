"""Split-KV flash decoding over a paged cache: few queries, many keys (Dao et al. 2023, "Flash-Decoding").

One program holds the queries of one KV head, up to BLOCK_M packed (token, query head) rows, and walks one piece of one
sequence's keys. Pieces are cut on the device, from the lengths there, so one captured CUDA graph is right for every length:

- balanced (`num_splits == 0`): the batch's key blocks are cut in about `parts` equal shares, so a sequence 20 times longer gets
  20 times the programs. Each program finds its piece with a prefix sum over the batch. What counts is how the pieces fill the
  GPU: exactly one wave of resident programs, or several; 1.3 waves last as long as 2.
- fixed (`num_splits > 0`, or a batch of one): each sequence is cut in `parts` pieces by its own length. With `num_splits` given
  the tile, too, depends on nothing but heads and dtypes: a row's result is bitwise the same whatever else is in the batch.

A sequence of one piece is written at once; the others leave (out, lse) per piece, which `_combine` merges. On Hopper and later
both kernels are launched programmatically: the next starts while this one drains, and waits for its results (griddepcontrol).
A float8 cache is widened to float16, which holds every e4m3 number and takes one instruction for two; queries of another type
are scaled by a power of two per row, so that they fit. Sequences with more than `max_seqlen_q` queries are skipped: in a mixed
batch they are forward.py's. Left out: long prompts (forward.py) and writing the cache (kv_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import launch
from fa_serve.backends.triton.primitives import (
    LOG2E,
    finish_softmax,
    online_softmax_update,
    softcap_scores,
    window_keep,
)
from fa_serve.backends.triton.tiles import batch_block, padded_dim


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """block_m packed query rows by block_n keys.

    parts: pieces per sequence, or, when balanced, equal shares of the whole batch's key blocks
    min_blocks: no piece is cut shorter than this many key blocks
    prefetch: page numbers are read one block ahead of their keys
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    balanced: bool
    min_blocks: int = 1
    prefetch: bool = True


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
    # (64 keys, 4 warps, 3 stages) is within 4% of the fastest tile on the H200 in the mean of 45 cells, where every other
    # one falls behind somewhere by 17 to 46%; by its 160 registers (80 at head_dim 64) 3 programs (6) live on an SM
    block_n, num_warps, most_stages, resident = 64, 4, 3, 3 if width > 64 else 6
    if kv_itemsize == 1:
        # half the bytes a key, so twice the keys in flight
        block_n, resident = 128, 2 if width > 64 else 3
    if width > 128:
        block_n, most_stages, resident = 32, 4, 2
    if itemsize == 4:
        # float32 products run on the FMA units, their operands live in registers
        block_m, block_n, num_warps, most_stages, resident = min(block_m, 32), 32 if width <= 128 else 16, 8, 4, 2
    if block_m > 16 or arch not in (90, 100):
        block_n, most_stages, resident = min(block_n, 64), 4, 2
    tile_bytes = block_n * (padded_dim(head_dim) + padded_dim(head_dim_v)) * kv_itemsize
    q_bytes = block_m * padded_dim(head_dim) * itemsize
    num_stages = min(most_stages, max(2, 1 + (_pipeline_bytes(arch) - q_bytes) // tile_bytes))
    tiles = DecodeTiles(block_m, block_n, num_warps, num_stages, num_splits, False)
    if num_splits:
        return tiles
    units = num_kv_heads * triton.cdiv(groups * max_seqlen_q, block_m)
    max_blocks = triton.cdiv(max_seqlen_k, block_n)
    if max_blocks <= 1 or (batch * units >= 4 * num_sms and max_blocks * block_n <= 1024):
        # every SM has several programs of a few microseconds: nothing to balance, and no second launch (6% at 128 x 1024)
        return replace(tiles, parts=1)
    wave = max(1, resident * num_sms // units)  # pieces that run at once
    if batch == 1:
        return replace(tiles, parts=min(wave, max_blocks))
    if 2 * batch <= wave:
        # rounding up gives each sequence at most one piece more: all of them run at once (16 uneven sequences: -8%)
        return replace(tiles, parts=wave - batch, balanced=True, min_blocks=2)
    # pieces for each of `batch` equal sequences such that the last wave is nearly full; a piece costs about 1% to combine. On
    # the H200, 64 x 8192 keys of 8 heads: 1 piece (1.3 waves) 614 us, 4 pieces (5.2 waves) 522 us
    pieces = min(range(1, 9), key=lambda n: triton.cdiv(batch * n, wave) * wave / (batch * n) + 0.01 * n)
    return replace(tiles, parts=batch * pieces, balanced=True, min_blocks=4)


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
def _widen(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """A tile of the cache in the type of the product.

    The conversion of float8 is impure for Triton's eyes alone: it keeps it from moving behind the load from shared memory,
    where values, transposed, would be read byte by byte (64 loads for 64 keys) and copied in by 8 bytes, not 16.
    """
    if PTX and x.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }", "=r,=r,r", [x],
            dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return x.to(dtype)


@triton.jit
def _fit_float16(q):
    """-> q / 2^e in float16 and 2^e [BLOCK_M] with 1 <= max |q / 2^e| < 2: exact for bfloat16 from the largest 2^-14 down."""
    x = q.to(tl.float32)
    # the exponent's bits alone are a power of two; 0 and the largest, whose inverses are not normal numbers, are kept off
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    return (x * inverse[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


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
    used_k_ptr, cu_q_ptr, batch, parts, min_blocks, max_q, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr,
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
    ours = (q_len > 0) & (q_len <= max_q)
    blocks = tl.where(ours, blocks, 0)
    share = tl.maximum((tl.sum(blocks, 0) + parts - 1) // parts, min_blocks)
    return index, tl.where(ours, tl.maximum((blocks + share - 1) // share, 1), 0)


@triton.jit(
    do_not_specialize=["batch", "units", "tiles_per_head", "unit_rows", "parts", "min_blocks", "max_q", "window_left",
                       "stride_lh", "window_right", "stride_table"]
)  # fmt: skip
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, table_ptr, used_k_ptr, cu_q_ptr, sinks_ptr,
    k_descale_ptr, v_descale_ptr, batch, units, tiles_per_head, unit_rows, parts, min_blocks, max_q, window_left, stride_lh,
    window_right, stride_table, scale, softcap,
    stride_ot, stride_oh, stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    GROUPS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, BALANCED: tl.constexpr, HAS_LEFT: tl.constexpr, PDL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    _wait_for_previous_kernel(PDL)
    # the KV heads of one piece run side by side: in a (page, token, head, dim) cache they read one stretch of memory
    unit = tl.program_id(0) % units
    piece = tl.program_id(0) // units
    head_kv = unit // tiles_per_head
    tile = unit % tiles_per_head

    if BALANCED:
        index, pieces = _balanced_pieces(
            used_k_ptr, cu_q_ptr, batch, parts, min_blocks, max_q, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
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
    if (part >= num_parts) | (tile * BLOCK_M >= q_len * GROUPS) | (q_len > max_q):
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
    row_scale = None
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q, row_scale = _fit_float16(q)
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
    if PREFETCH:
        cols = begin * BLOCK_N + offs_n
        next_page = tl.load(table_ptr + cols // PAGE_SIZE, mask=(cols >= first_key) & (cols < kv_len), other=0)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        # a page before the window may have gone to another sequence, and 0 * NaN is NaN: hidden keys are not read
        owned = (cols >= first_key) & (cols < kv_len)
        if PREFETCH:
            # a load that feeds an address one iteration later leaves K and V all the stages
            page = next_page.to(tl.int64)
            ahead = cols + BLOCK_N
            next_page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=(ahead >= first_key) & (ahead < kv_len), other=0)
        else:
            page = tl.load(table_ptr + cols // PAGE_SIZE, mask=owned, other=0).to(tl.int64)
        slot = cols % PAGE_SIZE
        k_ptrs = k_ptr + (page * stride_kp + slot * stride_kt)[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=owned[:, None] & (offs_d < DIM)[None, :], other=0.0)
        s = tl.dot(q, _widen(k, q.dtype, PDL).T, input_precision=PRECISION)
        if row_scale is not None:
            s *= row_scale[:, None]
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee")
            factor = 1.0
        keep = window_keep(rows // GROUPS + offset, cols, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        v_ptrs = v_ptr + (page * stride_vp + slot * stride_vt)[:, None] + offs_dv[None, :]
        v = tl.load(v_ptrs, mask=owned[:, None] & (offs_dv < DIM_V)[None, :], other=0.0)
        acc = tl.dot(p.to(q.dtype), _widen(v, q.dtype, PDL), acc * alpha[:, None], input_precision=PRECISION)

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
    do_not_specialize=["batch", "units", "tiles_per_head", "unit_rows", "parts", "min_blocks", "max_q", "window_left",
                       "stride_lh", "blocks_per_seq"]
)  # fmt: skip
def _combine(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, used_k_ptr, cu_q_ptr, batch, units, tiles_per_head, unit_rows, parts,
    min_blocks, max_q, window_left, stride_lh, blocks_per_seq, stride_ot, stride_oh,
    GROUPS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, BALANCED: tl.constexpr, HAS_LEFT: tl.constexpr, PDL: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of BLOCK_ROWS rows of one sequence: weights exp(lse - max lse), BLOCK_PARTS pieces at a time.

    The lengths may be read before the wait: `_decode`, which let us start, had by then waited for whoever wrote them.
    """
    seq = tl.program_id(0) // blocks_per_seq
    q_len = tl.load(cu_q_ptr + seq + 1) - tl.load(cu_q_ptr + seq)
    if BALANCED:
        index, pieces = _balanced_pieces(
            used_k_ptr, cu_q_ptr, batch, parts, min_blocks, max_q, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
        )
        first_piece = tl.sum(tl.where(index < seq, pieces, 0), 0)
        num_parts = tl.sum(tl.where(index == seq, pieces, 0), 0)
    else:
        _, _, blocks = _visible_blocks(q_len, tl.load(used_k_ptr + seq), window_left, HAS_LEFT, BLOCK_N)
        first_piece = seq * parts
        num_parts = tl.minimum(tl.maximum(blocks // min_blocks, 1), parts)
    row0 = tl.load(cu_q_ptr + seq)
    _wait_for_previous_kernel(PDL)
    if (num_parts <= 1) | (q_len > max_q):
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
    token = row0.to(tl.int64) + rows // GROUPS
    head = (unit // tiles_per_head).to(tl.int64) * GROUPS + rows % GROUPS
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_dv[None, :]
    tl.store(out_ptrs, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (offs_dv < DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


def launch_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, window_size: tuple[int, int], softcap: float,
    sinks: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, num_splits: int, out: Tensor | None,
    return_lse: bool, lse: Tensor | None = None, tiles: DecodeTiles | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Arguments as in `fa_serve.attention_paged`. One launch, and a second one if any sequence may be cut in pieces.

    Sequences with more than `max_seqlen_q` queries are left alone: their rows of out and lse stay as they are.
    `lse` is written if given, `tiles` overrides the choice, for tuning.
    """
    total_q, num_heads, dim = q.shape
    _, page_size, num_kv_heads, dim_v = v_cache.shape
    batch, groups, max_seqlen_q = seqused_k.shape[0], num_heads // num_kv_heads, max(max_seqlen_q, 1)
    arch = spec.arch_of(q.device)
    if tiles is None:
        tiles = decode_tiles(
            arch, _num_sms(q.device), q.element_size(), k_cache.element_size(), dim, dim_v, num_heads, num_kv_heads, batch,
            max_seqlen_q, max_seqlen_k, num_splits,
        )  # fmt: skip
    q = q if q.stride(2) == 1 else q.contiguous()
    result = q.new_empty(total_q, num_heads, dim_v) if out is None or out.stride(2) != 1 else out
    if return_lse and lse is None:
        lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device)
    if batch == 0:
        return result if out is None else out, lse

    tiles_per_head = -(-groups * max_seqlen_q // tiles.block_m)
    units, unit_rows = num_kv_heads * tiles_per_head, min(tiles.block_m, groups * max_seqlen_q)
    pieces = batch + tiles.parts if tiles.balanced else batch * tiles.parts
    part_out = part_lse = None
    if tiles.balanced or tiles.parts > 1:
        part_out = torch.empty(pieces * units * unit_rows, dim_v, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(pieces * units * unit_rows, dtype=torch.float32, device=q.device)
    (left, right), block_dv, pdl = window_size, padded_dim(dim_v), arch >= 90
    plan = (batch, units, tiles_per_head, unit_rows, tiles.parts, tiles.min_blocks, max_seqlen_q, left,
            0 if lse is None else lse.stride(0))  # fmt: skip
    out_strides = result.stride()[:2]
    # GROUPS, DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N, BATCH_BLOCK, BALANCED, HAS_LEFT, PDL: the same for both kernels
    shape = (groups, dim_v, block_dv, tiles.block_m, tiles.block_n, batch_block(batch) if tiles.balanced else 1,
             tiles.balanced, left >= 0, pdl)  # fmt: skip
    programmatic = {"launch_pdl": True} if pdl else {}
    launch(
        _decode, pieces * units,
        (q, k_cache, v_cache, result, lse, part_out, part_lse, block_table, seqused_k, cu_seqlens_q, sinks, k_descale,
         v_descale),
        (*plan, right, block_table.stride(0), float(softmax_scale), float(softcap)),
        (*shape, dim, padded_dim(dim), page_size, right >= 0 and max_seqlen_q > 1, softcap != 0.0, tiles.prefetch,
         "ieee" if q.dtype == torch.float32 else "tf32"),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **programmatic},
        (*out_strides, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
    )  # fmt: skip
    if part_out is not None:
        block_parts, block_rows = _combine_block(tiles, block_dv, batch * units * unit_rows)
        blocks_per_seq = -(-units * unit_rows // block_rows)
        launch(
            _combine, batch * blocks_per_seq,
            (part_out, part_lse, result, lse, seqused_k, cu_seqlens_q), (*plan, blocks_per_seq),
            (*out_strides, *shape, block_parts, block_rows), {"num_warps": 4, **programmatic},
        )  # fmt: skip
    if out is not None and result is not out:
        return out.copy_(result), lse
    return result, lse


def _combine_block(tiles: DecodeTiles, block_dv: int, rows: int) -> tuple[int, int]:
    """BLOCK_PARTS and BLOCK_ROWS: of few values each, so that changing shapes compile few kernels.

    The order in which pieces are added follows from both, so with fixed pieces neither depends on the batch.
    """
    if tiles.balanced:
        return 16, 1 if rows <= 1024 else max(1, 512 // block_dv)
    return 16 if tiles.parts <= 16 else 32 if tiles.parts <= 32 else 64, 1


@cache
def _num_sms(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on ROCm) to fill; a few on the CPU, for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
