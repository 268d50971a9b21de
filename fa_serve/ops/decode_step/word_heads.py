"""Device functions of the persistent kernel: attention of one token, whose numbers are words with tags (`words`).

A task is a KV head and a split of its keys. The first keys and values of a split depend on nothing that this layer
computes, and are loaded before its queries are waited for. Each split of a KV head then merges an equal part of the outputs of
all of them, in the order of keys, so that no split is the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.backends.triton.primitives import LOG2E, online_softmax_update
from fa_serve.ops.decode_step.words import poll_three, store_words


@triton.jit
def places_of_keys(block, end, old_len, pages_ptr, strides, head, var: tl.constexpr):
    """Offsets of a block of keys [block_keys] in the cache, and which of them there are."""
    stride_page, stride_token, stride_head = strides
    keys = block * var.block_keys + tl.arange(0, var.block_keys)
    live = (keys < old_len) & (block < end)
    page = tl.load(pages_ptr + keys // var.page_size, mask=live, other=0).to(tl.int64)
    return page * stride_page + (keys % var.page_size).to(tl.int64) * stride_token + head * stride_head, live


@triton.jit
def request_keys(cache_ptr, places, live, var: tl.constexpr):
    """Request a block of keys or values into the L2 cache, one line of 128 bytes for each thread."""
    if var.bulk:
        LINE: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (var.dim + LINE - 1) // LINE
        ptrs = cache_ptr + (places[:, None] + (tl.arange(0, LINES) * LINE)[None, :])
        keep = live[:, None] & (ptrs.to(tl.int64) != 0)
        tl.inline_asm_elementwise(
            """{
                .reg .pred %some;
                setp.ne.b32 %some, $2, 0;
                @%some prefetch.global.L2 [$1];
                mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [ptrs, keep.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def keys_of_places(cache_ptr, places, live, columns):
    return tl.load(cache_ptr + (places[:, None] + columns[None, :]), mask=live[:, None], other=0.0)


@triton.jit
def _other_columns(columns, var: tl.constexpr):
    """The columns that are rotated with these."""
    HALF: tl.constexpr = var.rotary_dim // 2
    return tl.where(columns < HALF, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, columns))


@triton.jit
def _turned(x, y, norm, other_norm, cos, sin, head_eps, var: tl.constexpr):
    """[rows, dim]: heads, normalised and rotated. y: the numbers that they are rotated with"""
    if var.head_norms:
        factor = tl.rsqrt(tl.sum(x * x, 1) / var.dim + head_eps)[:, None]
        x *= factor * norm[None, :]
        y *= factor * other_norm[None, :]
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _head_factors(norm_ptr, columns, offset, var: tl.constexpr):
    if var.head_norms:
        other = _other_columns(columns, var)
        return tl.load(norm_ptr + columns).to(tl.float32) + offset, tl.load(norm_ptr + other).to(tl.float32) + offset
    ones = tl.full([var.dim], 1.0, tl.float32)
    return ones, ones


@triton.jit
def attend_words(
    task,
    k,
    v,
    places,
    live,
    words,
    tag,
    weights,
    caches,
    batch,
    angles,
    scale,
    norms,
    strides,
    var: tl.constexpr,
):
    """One split of one KV head. k, v: of the first block of its keys, at `places`, which were loaded before."""
    qkv_ptr, attended_ptr, parts_ptr = words
    q_norm_ptr, k_norm_ptr = weights
    k_ptr, v_ptr = caches
    pages_ptr, slot_ptr, kv_len, begin, end = batch
    cos_ptr, sin_ptr = angles
    head_eps, head_offset = norms
    stride_page, stride_token, stride_head = strides
    DTYPE: tl.constexpr = k.dtype
    BLOCK_M: tl.constexpr = var.block_m
    DIM: tl.constexpr = var.dim
    HALF: tl.constexpr = var.rotary_dim // 2
    SPLITS: tl.constexpr = var.max_splits
    split = task % SPLITS
    head = task // SPLITS
    old_len = tl.maximum(kv_len - 1, 0)
    columns = tl.arange(0, DIM)
    rotates = columns < var.rotary_dim
    cos = tl.full([DIM], 1.0, tl.float32)
    sin = tl.zeros([DIM], tl.float32)
    if HALF > 0:
        angle = columns % HALF
        cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0).to(tl.float32) * tl.where(columns < HALF, -1.0, 1.0)
    norm, other_norm = _head_factors(q_norm_ptr, columns, head_offset, var)
    slot = tl.load(slot_ptr)

    ROWS: tl.constexpr = var.rows_m
    COPIES: tl.constexpr = BLOCK_M // ROWS
    rows = tl.arange(0, BLOCK_M)
    own = rows < var.groups
    few = tl.arange(0, ROWS)
    other = _other_columns(columns, var)
    heads_ptr = qkv_ptr + (head * var.groups + few)[:, None] * DIM
    some = (few < var.groups)[:, None] & (columns >= 0)[None, :]
    x, y, _ = poll_three(heads_ptr + columns[None, :], heads_ptr + other[None, :], heads_ptr + columns[None, :], tag, some, var)
    q = _turned(x, y, norm, other_norm, cos, sin, head_eps, var).to(DTYPE)
    # rows behind the heads are copies, whose outputs nobody stores
    q = tl.reshape(tl.broadcast_to(q[None, :, :], [COPIES, ROWS, DIM]), [BLOCK_M, DIM])
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    factor = scale * LOG2E
    for block in tl.range(begin, end, num_stages=1, disable_licm=True):
        s = tl.dot(q, tl.trans(k), input_precision=var.precision)
        s = tl.where(live[None, :], s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        acc = tl.dot(p.to(DTYPE), v, acc * alpha[:, None], input_precision=var.precision)
        if block + 1 < end:
            places, live = places_of_keys(block + 1, end, old_len, pages_ptr, strides, head.to(tl.int64), var)
            k = keys_of_places(k_ptr, places, live, columns)
            v = keys_of_places(v_ptr, places, live, columns)
    if split == SPLITS - 1:
        norm, other_norm = _head_factors(k_norm_ptr, columns, head_offset, var)
        new_ptr = qkv_ptr + (var.num_heads + head) * DIM
        all_of_one = (columns >= 0)[None, :]
        values_ptr = new_ptr + var.num_kv_heads * DIM
        new_x, new_y, new_v = poll_three(
            new_ptr + columns[None, :], new_ptr + other[None, :], values_ptr + columns[None, :], tag, all_of_one, var
        )
        new_k = _turned(new_x, new_y, norm, other_norm, cos, sin, head_eps, var).to(DTYPE)
        place = slot // var.page_size * stride_page + slot % var.page_size * stride_token + head * stride_head
        stored = (slot >= 0) & (columns >= 0)[None, :]
        tl.store(k_ptr + place + columns[None, :], new_k.to(k_ptr.dtype.element_ty), mask=stored)
        tl.store(v_ptr + place + columns[None, :], new_v.to(v_ptr.dtype.element_ty), mask=stored)
        s = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)[:, None]
        s = tl.where(kv_len > 0, s, float("-inf"))  # a sequence without keys is padding, whose rows are 0
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        acc = acc * alpha[:, None] + p.to(DTYPE).to(tl.float32) * new_v
    if SPLITS == 1:
        out = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        spots = (head * var.groups + rows)[:, None] * DIM + columns[None, :]
        store_words(attended_ptr + spots, out, tag, own[:, None], DTYPE)
    else:
        SPLIT: tl.constexpr = ROWS * (DIM + 2)
        own_ptr = parts_ptr + head * (SPLITS * SPLIT)
        part_ptr = own_ptr + split * SPLIT
        store_words(part_ptr + rows[:, None] * DIM + columns[None, :], acc, tag, own[:, None], tl.float32)
        store_words(part_ptr + ROWS * DIM + rows, row_max, tag, own, tl.float32)
        store_words(part_ptr + ROWS * (DIM + 1) + rows, row_sum, tag, own, tl.float32)
        # an equal part of the outputs, of all splits
        SHARE: tl.constexpr = (ROWS * DIM + SPLITS - 1) // SPLITS
        outputs = split * SHARE + tl.arange(0, SHARE)
        row = outputs // DIM
        keep = (row < var.groups)[:, None] & (tl.arange(0, SPLITS) >= 0)[None, :]
        some_ptrs = own_ptr + tl.arange(0, SPLITS)[None, :] * SPLIT
        stats_ptrs = some_ptrs + ROWS * DIM + row[:, None]
        outs, maxima, sums = poll_three(some_ptrs + outputs[:, None], stats_ptrs, stats_ptrs + ROWS, tag, keep, var)
        largest = tl.max(maxima, 1)
        weights = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
        total = tl.sum(sums * weights, 1)
        out = tl.sum(outs * weights, 1) / tl.where(total > 0.0, total, 1.0)
        store_words(attended_ptr + head * (var.groups * DIM) + outputs, out, tag, row < var.groups, DTYPE)
