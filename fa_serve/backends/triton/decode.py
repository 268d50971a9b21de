"""Split-KV flash decoding: few queries, many keys, paged or dense (Dao et al. 2023, "Flash-Decoding").

One program holds the queries of one KV head, up to BLOCK_M packed (token, query head) rows, and walks one piece of the keys.
Pieces are cut on the device, from the lengths there, so one captured CUDA graph is right for every length:

- balanced (`num_splits == 0`): the key blocks of all sequences lie on one line, and the line is cut in `parts` equal shares,
  one wave of resident programs. A share may hold the end of one sequence, several whole ones and the beginning of another.
- fixed (`num_splits > 0`, or a batch of one): each sequence is cut in `parts` pieces by its own length. With `num_splits` given
  the tile, too, depends on nothing but heads and dtypes: a row's result is bitwise the same whatever else is in the batch.

A sequence that lies in one piece is written at once; the others leave (out, lse) per piece, which `_combine` merges. On Hopper
and later both kernels are launched programmatically: the next starts while this one drains, and waits for its results
(griddepcontrol).

Scores stand with keys as rows, so that 8 query rows fill the other side of a tensor core's tile (16 by 8). A float8 cache is
widened to float16, which holds every e4m3 number, in registers; queries of another type are scaled by a power of two per row,
so that they fit. Sequences with more than `max_seqlen_q` queries are skipped: in a mixed batch they are another kernel's. Left
out: long prompts (forward.py) and writing the cache (kv_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import Launch, multiprocessors
from fa_serve.backends.triton.pieces import combine_launch, sequence_lengths, share_of_line, store_rows, visible_blocks
from fa_serve.backends.triton.primitives import LOG2E, finish_softmax, softcap_scores, wait_for_previous_kernel
from fa_serve.backends.triton.tiles import batch_block, launch_options, padded_dim


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """block_m packed query rows by block_n keys.

    parts:      pieces per sequence, or, when balanced, equal shares of the whole batch's key blocks
    min_blocks: no piece is cut shorter than this many key blocks
    registers:  most per thread, 0 for the compiler's choice: what a segment needs once may spill, the inner loop does not
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    balanced: bool
    min_blocks: int = 1
    registers: int = 0


@lru_cache(maxsize=4096)
def decode_tiles(
    arch: int,
    num_sms: int,
    itemsize: int,
    kv_itemsize: int,
    head_dim: int,
    head_dim_v: int,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_splits: int,
) -> DecodeTiles:
    """A pure function of what the host knows. With `num_splits` given, batch and lengths have no say in it."""
    groups = num_heads // num_kv_heads
    rows = groups if num_splits else groups * max_seqlen_q
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    block_m = min(32, max(8, 1 << (rows - 1).bit_length()))  # 64 rows would spill
    # by their registers and shared memory, `resident` programs live on an SM
    block_n = 64
    num_warps = 4
    most_stages = 2
    registers = 168
    resident = 3  # three stages: 8 x 8192 73.4 us, two 72.4
    if kv_itemsize == 1:
        block_n = 128
        most_stages = 3  # half the bytes a key, so twice the keys in flight
    if width <= 64 and block_m == 8 and (num_splits or batch > 1):
        # 32 x 4096 with 64/8 heads 74.1 us, as wide heads have it 78.5; float8 51.0 and 52.6
        block_n, num_warps, most_stages, registers, resident = (128, 4, 2, 128, 4) if kv_itemsize > 1 else (128, 2, 2, 168, 6)
    elif width <= 64 and kv_itemsize > 1:
        block_n = 128
        most_stages = 3
        registers = 0
        resident = 2  # one sequence of 16384 14.8 us, as above 16.8
    if width > 128:
        block_n = 32
        most_stages = 4
        registers = 0
        resident = 2
    if itemsize == 4:
        # float32 products run on the FMA units, their operands live in registers
        block_n = 32 if width <= 128 else 16
        num_warps = 8
        most_stages = 4
        registers = 0
        resident = 2
    if block_m > 16 or arch not in (90, 100):
        block_n = min(block_n, 64)
        most_stages = 2 if block_m > 16 else 4
        registers = 0
        resident = 2
        num_warps = max(num_warps, 4)
    tile_bytes = block_n * (padded_dim(head_dim) + padded_dim(head_dim_v)) * kv_itemsize
    q_bytes = block_m * padded_dim(head_dim) * itemsize
    num_stages = min(most_stages, max(2, 1 + (_pipeline_bytes(arch) - q_bytes) // tile_bytes))
    tiles = DecodeTiles(block_m, block_n, num_warps, num_stages, num_splits, False, registers=registers)
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
    return replace(tiles, parts=wave, balanced=True, min_blocks=2)


def _pipeline_bytes(arch: int) -> int:
    """Shared memory for queries, and keys and values in flight, such that two programs fit on one SM."""
    if arch in (90, 100):
        return 100 << 10
    return 72 << 10 if arch == 80 else 40 << 10 if arch else 24 << 10


@triton.jit
def _widen(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """A tile of the cache in the type of the product."""
    if PTX and x.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return x.to(dtype)


@triton.jit
def _half(x, SELECT: tl.constexpr):
    """Of two float8 numbers in 16 bits, the first (SELECT 0x5410) or the second (0x7632) as float16.

    Transposed, 8-bit numbers would be read one by one from shared memory. In pairs of columns they are read as 16-bit ones are:
    a register then holds two keys of one pair, and a byte permutation puts the two keys of one column side by side.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b; "
        f"prmt.b32 $0, x, y, {SELECT}; }}",
        "=r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


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
def _read_pages(
    table_ptr,
    block,
    offs_n,
    first_key,
    kv_len,
    HAS_LEFT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The page of each key of a block, 0 where none is ours; one number where pages are whole blocks."""
    if PAGE_SIZE % BLOCK_N == 0:
        owned = (block * BLOCK_N < kv_len) & (block * BLOCK_N + BLOCK_N > first_key)
        index = block * BLOCK_N // PAGE_SIZE
    else:
        cols = block * BLOCK_N + offs_n
        owned = cols < kv_len
        if HAS_LEFT:
            owned = owned & (cols >= first_key)
        # the same number, said so that what changes from block to block is one sum for all keys
        index = block * (BLOCK_N // PAGE_SIZE) + offs_n // PAGE_SIZE if BLOCK_N % PAGE_SIZE == 0 else cols // PAGE_SIZE
    return tl.load(table_ptr + index, mask=owned, other=0)


@triton.jit
def _key_offsets(
    page,
    block,
    offs_n,
    stride_page,
    stride_token,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where the keys of a block lie in the cache, in 64 bits: caches pass 2^31 elements."""
    if PAGE_SIZE == 0:
        where = page * stride_page + tl.cast(block * BLOCK_N, tl.int64) * stride_token + offs_n * stride_token
    elif PAGE_SIZE % BLOCK_N == 0:
        slot = tl.cast(block * BLOCK_N % PAGE_SIZE, tl.int64)
        where = page.to(tl.int64) * stride_page + slot * stride_token + offs_n * stride_token
    else:
        if PTX:
            # one instruction; LLVM, once it has widened the stride ahead of the loop, takes five
            start = tl.inline_asm_elementwise(
                "mul.wide.s32 $0, $1, $2;", "=l,r,r", [page, stride_page], dtype=tl.int64, is_pure=True, pack=1
            )
            if ALIGNED:
                start = tl.multiple_of(start, [16] * len(page.shape))
        else:
            start = page.to(tl.int64) * stride_page
        if BLOCK_N % PAGE_SIZE == 0:
            where = start + offs_n % PAGE_SIZE * stride_token
        else:
            where = start + (block * BLOCK_N + offs_n) % PAGE_SIZE * stride_token
    return where


@triton.jit
def _softmax_step(s, factor, row_max, row_sum):
    """`primitives.online_softmax_update` with keys as rows: s [BLOCK_N, BLOCK_M], row_max and row_sum [BLOCK_M]."""
    new_max = tl.maximum(row_max, tl.max(s, 0) * factor)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * factor - safe_max[None, :])
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, row_sum * alpha + tl.sum(p, 0), alpha


@triton.jit
def _walk(
    q,
    row_scale,
    row_max,
    row_sum,
    span,
    k_ptr,
    v_ptr,
    table_ptr,
    mask_ptr,
    seq,
    positions,
    lengths,
    scaling,
    window,
    strides,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIKE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
):
    """The inner loop over key blocks. q: [BLOCK_D, BLOCK_M].

    -> out [BLOCK_M, BLOCK_DV], not yet divided, the largest score and the sum of exponentials [BLOCK_M].
    """
    begin, end = span
    first_key, kv_len = lengths
    scale, softcap = scaling
    window_left, window_right = window
    stride_kp, stride_kt, stride_vp, stride_vt, stride_mk = strides
    WIDTH: tl.constexpr = BLOCK_DV // 2 if PAIRS else BLOCK_DV
    HALVES: tl.constexpr = 2 if PAIRS else 1
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    second = acc
    if PAIRS:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    next_page = seq.to(tl.int64)
    if PAGE_SIZE > 0:
        next_page = _read_pages(table_ptr, begin, offs_n, first_key, kv_len, HAS_LEFT, PAGE_SIZE, BLOCK_N)
    if mask_ptr is not None:
        cols = begin * BLOCK_N + offs_n
        next_seen = tl.load(mask_ptr + cols * stride_mk, mask=cols < kv_len, other=0)
    for block in tl.range(begin, end):
        cols = block * BLOCK_N + offs_n
        # a page before the window may have gone to another sequence, and 0 * NaN is NaN: hidden keys are not read
        owned = cols < kv_len
        if HAS_LEFT:
            owned = owned & (cols >= first_key)
        if mask_ptr is not None:
            owned = owned & (next_seen != 0)
            next_seen = tl.load(mask_ptr + (cols + BLOCK_N) * stride_mk, mask=cols + BLOCK_N < kv_len, other=0)
        # a load that feeds an address one iteration later leaves K and V all the stages
        page = next_page
        if PAGE_SIZE > 0:
            next_page = _read_pages(table_ptr, block + 1, offs_n, first_key, kv_len, HAS_LEFT, PAGE_SIZE, BLOCK_N)
        k_offs = _key_offsets(page, block, offs_n, stride_kp, stride_kt, PAGE_SIZE, BLOCK_N, PTX, ALIGNED)
        v_offs = k_offs
        if not ALIKE:
            v_offs = _key_offsets(page, block, offs_n, stride_vp, stride_vt, PAGE_SIZE, BLOCK_N, PTX, ALIGNED)
        if PAIRS:
            v_offs = v_offs >> 1
        k = tl.load(k_ptr + k_offs[:, None] + offs_d[None, :], mask=owned[:, None] & (offs_d < DIM)[None, :], other=0.0)
        s = tl.dot(_widen(k, q.dtype, PTX), q, input_precision=PRECISION)
        if row_scale is not None:
            s *= row_scale[None, :]
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            s = softcap_scores(s, scale, softcap, PRECISION == "ieee")
            factor = 1.0
        keep = owned[:, None]
        if HAS_RIGHT:
            keep = keep & (cols[:, None] <= positions[None, :] + window_right)
        if HAS_LEFT:
            keep = keep & (cols[:, None] >= positions[None, :] - window_left)
        s = tl.where(keep, s, float("-inf"))
        p, row_max, row_sum, alpha = _softmax_step(s, factor, row_max, row_sum)
        p = p.to(q.dtype)
        # values are loaded as the product takes them, columns first: a transposition afterwards would cost a copy
        keep_v = owned[None, :] & (offs_v < DIM_V // HALVES)[:, None]
        v = tl.load(v_ptr + v_offs[None, :] + offs_v[:, None], mask=keep_v, other=0 if PAIRS else 0.0)
        if PAIRS:
            acc = tl.dot(_half(v, "0x5410"), p, acc * alpha[None, :], input_precision=PRECISION)
            second = tl.dot(_half(v, "0x7632"), p, second * alpha[None, :], input_precision=PRECISION)
        else:
            acc = tl.dot(_widen(v, q.dtype, PTX), p, acc * alpha[None, :], input_precision=PRECISION)

    out = tl.trans(acc)
    if PAIRS:
        out = tl.reshape(tl.join(out, tl.trans(second)), (BLOCK_M, BLOCK_DV))
    return out, row_max, row_sum


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
        "window_right",
        "stride_lh",
        "stride_table",
        "stride_mb",
        "stride_mk",
    ]
)
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    sinks_ptr,
    mask_ptr,
    k_descale_ptr,
    v_descale_ptr,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    parts,
    min_blocks,
    max_q,
    max_k,
    window_left,
    window_right,
    stride_lh,
    stride_table,
    stride_mb,
    stride_mk,
    scale,
    softcap,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BALANCED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIKE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    # the KV heads of one piece run side by side: in a (page, token, head, dim) cache they read one stretch of memory
    unit = tl.program_id(0) % units
    piece = tl.program_id(0) // units
    head_kv = unit // tiles_per_head
    row_first = unit % tiles_per_head * BLOCK_M
    if BALANCED:
        line_begin, line_end, first_seq, behind, seq_start, share = share_of_line(
            piece, cu_q_ptr, used_k_ptr, batch, parts, min_blocks, max_q, max_k, window_left, HAS_LEFT, BLOCK_N, BATCH_BLOCK
        )
    else:
        first_seq = piece // parts
        behind = first_seq + 1

    kv64 = head_kv.to(tl.int64)
    k_ptr += kv64 * stride_kh
    v_ptr += kv64 * stride_vh
    descale_v = 1.0
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + head_kv)
        descale_v = tl.load(v_descale_ptr + head_kv)
    offs_d = tl.arange(0, BLOCK_D)
    offs_m = tl.arange(0, BLOCK_M)
    rows = row_first + offs_m

    for index in tl.range(first_seq, behind, num_stages=1):
        seq = piece * 0 + index  # the interpreter's ranges count in plain integers
        row0, q_len, kv_len = sequence_lengths(seq, cu_q_ptr, used_k_ptr, max_q, max_k)
        first_key, first_block, blocks = visible_blocks(q_len, kv_len, window_left, HAS_LEFT, BLOCK_N)
        ours = (q_len > 0) & (q_len <= max_q)
        if BALANCED:
            blocks = tl.where(ours, tl.maximum(blocks, 1), 0)
            first_piece = seq_start // share
            part = piece - first_piece
            num_parts = (seq_start + blocks - 1) // share - first_piece + 1
            begin = tl.maximum(line_begin - seq_start, 0)
            end = tl.minimum(line_end - seq_start, blocks)
            # a piece has two places: for the sequence that it goes on with, and for the one that goes on behind it
            place = 2 * piece + (part == 0).to(tl.int32)
            seq_start += blocks
        else:
            part = piece % parts
            num_parts = tl.minimum(tl.maximum(blocks // min_blocks, 1), parts)
            begin = blocks * part // num_parts
            end = blocks * (part + 1) // num_parts
            place = piece
        if ours & (part < num_parts) & (row_first < q_len * GROUPS):
            live = rows < q_len * GROUPS
            # int64 before any product with a stride
            token = row0.to(tl.int64) + rows // GROUPS
            head = kv64 * GROUPS + rows % GROUPS
            q_ptrs = q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
            q = tl.load(q_ptrs, mask=live[:, None] & (offs_d < DIM)[None, :], other=0.0)
            row_scale = None
            if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
                q, row_scale = _fit_float16(q)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if sinks_ptr is not None:
                # a sink is one more key that has a score and no value: the first piece starts from it
                sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
                row_max = tl.where(part == 0, sink, row_max)
                row_sum = tl.where(part == 0, 1.0, row_sum)

            offset = kv_len - q_len
            begin += first_block
            end = tl.minimum(end + first_block, (kv_len + BLOCK_N - 1) // BLOCK_N)
            if HAS_RIGHT:
                last_token = tl.minimum(row_first + BLOCK_M - 1, q_len * GROUPS - 1) // GROUPS
                end = tl.minimum(end, (tl.maximum(last_token + offset + window_right + 1, 0) + BLOCK_N - 1) // BLOCK_N)
            acc, row_max, row_sum = _walk(
                tl.trans(q),
                row_scale,
                row_max,
                row_sum,
                (begin, end),
                k_ptr,
                v_ptr,
                None if table_ptr is None else table_ptr + seq.to(tl.int64) * stride_table,
                None if mask_ptr is None else mask_ptr + seq.to(tl.int64) * stride_mb,
                seq,
                rows // GROUPS + offset,
                (first_key, kv_len),
                (scale, softcap),
                (window_left, window_right),
                (stride_kp, stride_kt, stride_vp, stride_vt, stride_mk),
                DIM,
                DIM_V,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                PAGE_SIZE,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SOFTCAP,
                ALIKE,
                ALIGNED,
                PRECISION,
                PAIRS,
                PTX,
            )
            inverse, lse = finish_softmax(row_max, row_sum)
            out = acc * (inverse * descale_v)[:, None]
            whole = True
            if part_out_ptr is not None:
                whole = num_parts == 1
                if not whole:
                    at = (place.to(tl.int64) * units + unit) * unit_rows + offs_m
                    offs_dv = tl.arange(0, BLOCK_DV)
                    keep = live[:, None] & (offs_dv < DIM_V)[None, :]
                    tl.store(part_out_ptr + at[:, None] * DIM_V + offs_dv[None, :], out, mask=keep)
                    tl.store(part_lse_ptr + at, lse, mask=live)
            if whole:
                store_rows(
                    out_ptr, lse_ptr, out, lse, rows, live, row0, kv64, stride_ot, stride_oh, stride_lh, GROUPS, DIM_V, BLOCK_DV
                )


def launch_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    mask: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    memo: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as in `fa_serve.attention`: a dense cache is one of a page per sequence, and the host knows the lengths.

    mask: None, or a bool one over keys alone, (1 or batch, 1, 1, seqlen_k): keys that it hides are not read
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    result = q.new_empty(batch, seqlen_q, num_heads, v.shape[-1]) if out is None or not out.is_contiguous() else out
    _, lse = launch_decode(
        q.reshape(batch * seqlen_q, num_heads, head_dim),
        k,
        v,
        block_table=None,
        seqused_k=None,
        cu_seqlens_q=None,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=k.shape[1],
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        out=result.view(batch * seqlen_q, num_heads, v.shape[-1]),
        return_lse=return_lse,
        mask=mask,
        memo=memo,
    )
    lse = None if lse is None else lse.view(num_heads, batch, seqlen_q).transpose(0, 1)
    return (result if out is None or result is out else out.copy_(result)), lse


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    lse: Tensor | None = None,
    mask: Tensor | None = None,
    tiles: DecodeTiles | None = None,
    memo: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as in `fa_serve.attention_paged`, with None for all three index tensors as in `launch_dense`. One launch,
    and a second one if any sequence may be cut in pieces.

    Sequences with more than `max_seqlen_q` queries are left alone: their rows of out and lse stay as they are.
    `lse` is written if given, `tiles` overrides the choice, for tuning; `memo` as in `backends.Backend`.
    """
    q = q if q.stride(2) == 1 else q.contiguous()
    memo = {} if memo is None else memo
    fresh = out is None or out.stride(2) != 1
    if return_lse and lse is None:
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    plan = memo.get("decode") or memo.setdefault(
        "decode",
        _plan(
            q,
            k_cache,
            v_cache,
            None if fresh else out,
            lse,
            block_table,
            mask,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            window_size,
            softcap,
            num_splits,
            tiles,
        ),
    )
    result = q.new_empty(plan.shape) if fresh else out
    if plan.decode is not None:
        part_out = part_lse = None
        if plan.combine is not None:
            part_out, part_lse = (q.new_empty(shape, dtype=torch.float32) for shape in plan.parts)
        mask = mask if mask is None else mask.view(torch.uint8)
        plan.decode(
            (
                q,
                k_cache,
                v_cache,
                result,
                lse,
                part_out,
                part_lse,
                block_table,
                seqused_k,
                cu_seqlens_q,
                sinks,
                mask,
                k_descale,
                v_descale,
            )
        )
        if plan.combine is not None:
            plan.combine((result, lse, part_out, part_lse, seqused_k, cu_seqlens_q))
    if out is not None and result is not out:
        return out.copy_(result), lse
    return result, lse


class _Plan(NamedTuple):
    """What follows from shapes, strides and options: the launches, if there are any sequences, the shape of a contiguous output
    and of the two kinds of pieces."""

    shape: tuple[int, ...]
    decode: Launch | None = None
    combine: Launch | None = None
    parts: tuple[tuple[int, ...], ...] = ()


def _plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    table: Tensor | None,
    mask: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    num_splits: int,
    tiles: DecodeTiles | None,
) -> _Plan:
    """`out` is None for one that is contiguous."""
    total_q, num_heads, dim = q.shape
    pages, page_size, num_kv_heads, dim_v = v_cache.shape
    shape = (total_q, num_heads, dim_v)
    batch = pages
    dtype = q.dtype
    itemsize = k_cache.element_size()
    if table is not None:
        batch = table.shape[0]
    if batch == 0:
        return _Plan(shape)
    groups = num_heads // num_kv_heads
    max_seqlen_q = max(max_seqlen_q, 1)
    arch = spec.arch_of(q.device)
    if tiles is None:
        tiles = decode_tiles(
            arch,
            multiprocessors(q.device, 8),
            dtype.itemsize,
            itemsize,
            dim,
            dim_v,
            num_heads,
            num_kv_heads,
            batch,
            max_seqlen_q,
            max_seqlen_k,
            num_splits,
        )
    tiles_per_head = -(-groups * max_seqlen_q // tiles.block_m)
    units = num_kv_heads * tiles_per_head
    unit_rows = min(tiles.block_m, groups * max_seqlen_q)
    pieces = tiles.parts if tiles.balanced else batch * tiles.parts
    (left, right), pdl = window, arch >= 90
    k_strides = k_cache.stride()[:3]
    v_strides = v_cache.stride()[:3]
    out_strides = (num_heads * dim_v, dim_v) if out is None else out.stride()[:2]
    mask_strides = (0, 0) if mask is None else tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in (0, 3))
    lse_stride = 0 if lse is None else lse.stride(0)
    # whole 16-bit pairs, for the widening of float8 values
    pairs = (
        arch >= 89 and itemsize == 1 and dim_v % 2 == 0 and dtype.itemsize == 2 and not any(stride % 2 for stride in v_strides)
    )
    plan = (batch, units, tiles_per_head, unit_rows, tiles.parts, tiles.min_blocks, max_seqlen_q, max_seqlen_k, left)
    cut = (batch_block(batch) if tiles.balanced else 1, tiles.balanced, left >= 0)
    block_dv = padded_dim(dim_v)
    limit = {"maxnreg": tiles.registers} if tiles.registers and arch >= 80 else {}
    decode = Launch(
        _decode,
        pieces * units,
        (*plan, right, lse_stride, 0 if table is None else table.stride(0), *mask_strides, float(scale), float(softcap)),
        (
            groups,
            dim,
            dim_v,
            padded_dim(dim),
            block_dv,
            tiles.block_m,
            tiles.block_n,
            0 if table is None else page_size,
            *cut,
            right >= 0 and max_seqlen_q > 1,
            softcap != 0.0,
            k_strides == v_strides,
            all(stride % 16 == 0 for stride in (*k_strides[:2], *v_strides[:2])),
            "ieee" if dtype == torch.float32 else "tf32",
            pairs,
            arch >= 89,
            pdl,
        ),
        {**launch_options(pdl, tiles.num_warps), "num_stages": tiles.num_stages, **limit},
        (*out_strides, *q.stride()[:2], *k_strides, *v_strides),
    )
    if not tiles.balanced and tiles.parts == 1:
        return _Plan(shape, decode)
    fixed = (groups, dim_v, block_dv, tiles.block_m, tiles.block_n, *cut, pdl)
    places = (2 * pieces if tiles.balanced else pieces) * units * unit_rows
    return _Plan(shape, decode, combine_launch(plan, lse_stride, fixed, out_strides), ((places, dim_v), (places,)))
