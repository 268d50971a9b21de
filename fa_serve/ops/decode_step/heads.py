"""Device functions of the persistent kernel: attention of one KV head of a sequence to one split of its keys.

Queries come as the projection leaves them: each task normalises and rotates those of its heads itself, which are few. Keys of
earlier steps are read from the pages of the cache, in equal splits. The keys of this step belong to the last split, which
normalises, rotates and multiplies them in registers and stores them in the cache. No other task may read them there: a step in
which a sequence reads pages that another one fills is computed layer by layer (hf/surgery/fuse/stack.py).
Splits leave outputs, maxima and sums in float32, and the last one of a KV head that arrives merges them in the order of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.backends.triton.primitives import LOG2E, online_softmax_update


@triton.jit
def _rotated(ptrs, columns, cos_ptrs, sin_ptrs, norm_ptr, keep, eps, offset, var: tl.constexpr):
    """[rows, dim]: heads of queries or keys, normalised and rotated, in the dtype of the projection.

    ptrs: of the heads [rows]; columns: [dim]; cos_ptrs, sin_ptrs: of the tables of their tokens [rows]
    """
    HALF: tl.constexpr = var.rotary_dim // 2
    rotates = columns < var.rotary_dim
    other = tl.where(columns < HALF, columns + HALF, columns - HALF)
    other = tl.where(rotates, other, columns)
    mask = keep[:, None] & (columns >= 0)[None, :]
    raw = tl.load(ptrs[:, None] + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    x = raw.to(tl.float32)
    y = tl.load(ptrs[:, None] + other[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if var.head_norms:
        factor = tl.rsqrt(tl.sum(x * x, 1) / var.dim + eps)[:, None]
        x *= factor * (tl.load(norm_ptr + columns).to(tl.float32) + offset)[None, :]
        y *= factor * (tl.load(norm_ptr + other).to(tl.float32) + offset)[None, :]
    if HALF > 0:
        angle = columns % HALF
        turned = mask & rotates[None, :]
        cos = tl.load(cos_ptrs[:, None] + angle[None, :], mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptrs[:, None] + angle[None, :], mask=turned, other=0.0).to(tl.float32)
        x = x * cos + tl.where(columns < HALF, -1.0, 1.0)[None, :] * y * sin
    return x.to(raw.dtype)


@triton.jit
def _old_keys(
    q, acc, row_max, row_sum, caches, table_ptr, head, begin, end, old_len, factor, strides, columns, var: tl.constexpr
):
    """Attend to the blocks of keys begin to end, of those that earlier steps have stored."""
    k_ptr, v_ptr = caches
    stride_page, stride_token, stride_head = strides
    offsets = tl.arange(0, var.block_keys)
    for block in tl.range(begin, end, num_stages=var.key_stages, disable_licm=True):
        keys = block * var.block_keys + offsets
        live = keys < old_len
        page = tl.load(table_ptr + keys // var.page_size, mask=live, other=0).to(tl.int64)
        places = page * stride_page + (keys % var.page_size).to(tl.int64) * stride_token + head * stride_head
        k = tl.load(k_ptr + places[:, None] + columns[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=var.precision)
        s = tl.where(live[None, :], s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
        v = tl.load(v_ptr + places[:, None] + columns[None, :], mask=live[:, None], other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=var.precision)
    return acc, row_max, row_sum


@triton.jit
def _new_keys(
    q,
    acc,
    row_max,
    row_sum,
    qkv_ptr,
    caches,
    angles,
    slot_ptr,
    k_norm_ptr,
    row0,
    q_len,
    kv_len,
    head,
    factor,
    norms,
    strides,
    columns,
    var: tl.constexpr,
):
    """Attend to the keys of this step, causally, and store them and their values in the cache."""
    k_ptr, v_ptr = caches
    cos_ptr, sin_ptr, stride_cos = angles
    eps, offset = norms
    stride_page, stride_token, stride_head = strides
    ROW: tl.constexpr = (var.num_heads + 2 * var.num_kv_heads) * var.dim
    news = tl.arange(0, var.block_new)
    live = news < q_len
    tokens = (row0 + news).to(tl.int64)
    k_ptrs = qkv_ptr + tokens * ROW + (var.num_heads + head) * var.dim
    k = _rotated(
        k_ptrs, columns, cos_ptr + tokens * stride_cos, sin_ptr + tokens * stride_cos, k_norm_ptr, live, eps, offset, var
    )
    v_ptrs = k_ptrs + var.num_kv_heads * var.dim
    v = tl.load(v_ptrs[:, None] + columns[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
    slots = tl.load(slot_ptr + tokens, mask=live, other=-1)
    places = slots // var.page_size * stride_page + slots % var.page_size * stride_token + head * stride_head
    stored = (live & (slots >= 0))[:, None]
    tl.store(k_ptr + places[:, None] + columns[None, :], k.to(k_ptr.dtype.element_ty), mask=stored)
    tl.store(v_ptr + places[:, None] + columns[None, :], v.to(v_ptr.dtype.element_ty), mask=stored)
    s = tl.dot(q, tl.trans(k), input_precision=var.precision)
    queries = tl.arange(0, var.block_m) // var.groups
    # a sequence without keys is padding, whose rows are 0
    seen = live[None, :] & (news[None, :] <= queries[:, None]) & (kv_len - q_len + news >= 0)[None, :]
    s = tl.where(seen, s, float("-inf"))
    p, row_max, row_sum, alpha = online_softmax_update(s, factor, row_max, row_sum)
    acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=var.precision)
    return acc, row_max, row_sum


@triton.jit
def _merge_splits(parts_ptr, splits, rows, columns, places, keep, out_ptr, var: tl.constexpr):
    """Merge the splits of a KV head [rows, dim] in the order of the keys, and store the outputs."""
    SPLIT: tl.constexpr = var.rows_m * var.dim
    stats_ptr = parts_ptr + var.max_splits * SPLIT
    all_splits = tl.arange(0, var.max_splits)
    live = (all_splits < splits)[:, None] & (rows >= 0)[None, :]
    spots = all_splits[:, None] * var.rows_m + rows[None, :]
    maxima = tl.load(stats_ptr + spots, mask=live, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(stats_ptr + var.max_splits * var.rows_m + spots, mask=live, other=0.0, cache_modifier=".cg")
    largest = tl.max(maxima, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(sums * tl.exp2(maxima - safe[None, :]), 0)
    ROWS: tl.constexpr = var.rows_m
    DIM: tl.constexpr = var.dim
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for first in tl.range(0, splits, var.merged_splits, num_stages=1, disable_licm=True):
        some = first + tl.arange(0, var.merged_splits)
        weights = tl.load(
            stats_ptr + some[:, None] * var.rows_m + rows[None, :],
            mask=(some < splits)[:, None] & (rows >= 0)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        weights = tl.exp2(weights - safe[None, :])
        cells = some[:, None, None] * SPLIT + rows[None, :, None] * var.dim + columns[None, None, :]
        outs = tl.load(parts_ptr + cells, mask=(some < splits)[:, None, None] & (cells >= 0), other=0.0, cache_modifier=".cg")
        acc += tl.sum(outs * weights[:, :, None], 0)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a row without keys is 0
    tl.store(out_ptr + places[:, None] + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=keep[:, None])


@triton.jit
def attend_task(
    task,
    splits,
    qkv_ptr,
    out_ptr,
    parts_ptr,
    pairs_ptr,
    weights,
    caches,
    batch,
    angles,
    scale,
    norms,
    strides,
    var: tl.constexpr,
):
    """One split of one KV head of one sequence."""
    q_norm_ptr, k_norm_ptr = weights
    table_ptr, used_ptr, cu_q_ptr, slot_ptr, stride_table = batch
    cos_ptr, sin_ptr, stride_cos = angles
    eps, offset = norms
    ROW: tl.constexpr = (var.num_heads + 2 * var.num_kv_heads) * var.dim
    split = task % splits
    unit = task // splits
    head = (unit % var.num_kv_heads).to(tl.int64)
    seq = unit // var.num_kv_heads
    row0 = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - row0
    kv_len = tl.load(used_ptr + seq)
    old_len = tl.maximum(kv_len - q_len, 0)

    rows = tl.arange(0, var.block_m)
    columns = tl.arange(0, var.dim)
    tokens = (row0 + rows // var.groups).to(tl.int64)
    heads = head * var.groups + rows % var.groups
    live = rows < q_len * var.groups
    q_ptrs = qkv_ptr + tokens * ROW + heads * var.dim
    q = _rotated(
        q_ptrs, columns, cos_ptr + tokens * stride_cos, sin_ptr + tokens * stride_cos, q_norm_ptr, live, eps, offset, var
    )
    BLOCK_M: tl.constexpr = var.block_m
    DIM: tl.constexpr = var.dim
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    blocks = (old_len + var.block_keys - 1) // var.block_keys
    share = (blocks + splits - 1) // splits
    begin = tl.minimum(split * share, blocks)
    end = tl.minimum(begin + share, blocks)
    factor = scale * LOG2E
    of_sequence = table_ptr + seq.to(tl.int64) * stride_table
    acc, row_max, row_sum = _old_keys(
        q, acc, row_max, row_sum, caches, of_sequence, head, begin, end, old_len, factor, strides, columns, var
    )
    if split == splits - 1:
        acc, row_max, row_sum = _new_keys(
            q,
            acc,
            row_max,
            row_sum,
            qkv_ptr,
            caches,
            angles,
            slot_ptr,
            k_norm_ptr,
            row0,
            q_len,
            kv_len,
            head,
            factor,
            norms,
            strides,
            columns,
            var,
        )
    if splits == 1:
        out = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        places = (tokens * var.num_heads + heads) * var.dim
        tl.store(out_ptr + places[:, None] + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        SPLIT: tl.constexpr = var.rows_m * var.dim
        own_ptr = parts_ptr + unit.to(tl.int64) * (var.max_splits * (SPLIT + 2 * var.rows_m))
        inside = rows < var.rows_m
        cells = split * SPLIT + rows[:, None] * var.dim + columns[None, :]
        tl.store(own_ptr + cells, acc, mask=inside[:, None])
        stats_ptr = own_ptr + var.max_splits * SPLIT + split * var.rows_m + rows
        tl.store(stats_ptr, row_max, mask=inside)
        tl.store(stats_ptr + var.max_splits * var.rows_m, row_sum, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(pairs_ptr + unit, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.debug_barrier()
            # nobody adds to it before the next layer, whose programs have waited for this one
            tl.store(pairs_ptr + unit, 0)
            few = tl.arange(0, var.rows_m)
            of_few = (row0 + few // var.groups).to(tl.int64)
            places = (of_few * var.num_heads + head * var.groups + few % var.groups) * var.dim
            _merge_splits(own_ptr, splits, few, columns, places, few < q_len * var.groups, out_ptr, var)
