"""The kernels that prepare pieces of up to 64 rows: they compute what does not need the state, for all pieces at once.

1. `_sum_gates`, only for gates by channel, sums the log gates from the first row of each piece to each of its rows.
2. `_prepare_pieces`, a program for each piece and head, computes the products of queries and keys, and for the delta rule the
   inverse of the triangular system and its products with values and keys. It stores the operands of the products that need the
   state, in the dtype of the rows and without gaps, so that the kernels that follow (pieces.py) only load and multiply.

docs/kernels/linear-attention.md derives the forms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.linear_attention.primitives import normalised_rows, time_step


@triton.jit
def _sum_gates(g_ptr, sums_ptr, chunk_ptr, stride_g, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """sums (total, HEADS, DIM): the sum of the log gates from the first row of the piece to each row. A program has one piece
    and one head."""
    piece = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    row = (tl.load(chunk_ptr + 4 * piece) + i).to(tl.int64)
    keep = (i < tl.load(chunk_ptr + 4 * piece + 1))[:, None] & (c < DIM)[None, :]
    g = tl.load(g_ptr + row[:, None] * stride_g + head * DIM + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(sums_ptr + (row * HEADS + head)[:, None] * DIM + c[None, :], tl.cumsum(g, 0), mask=keep)


@triton.jit
def _row_gates(g_ptr, weight_ptr, a_ptr, bias_ptr, row, live, head, low, high, stride_g, stride_w, SOFTPLUS: tl.constexpr):
    """-> log gates by head and weights, [64] each; 0 for rows that are not `live`. Lightning attention has weights of 1."""
    weights = live.to(tl.float32)
    if g_ptr is not None:
        gates = tl.load(g_ptr + row * stride_g + head, mask=live, other=0.0).to(tl.float32)
        weights = tl.load(weight_ptr + row * stride_w + head, mask=live, other=0.0).to(tl.float32)
    else:
        a = tl.load(a_ptr + head).to(tl.float32)
        if weight_ptr is None:
            gates = tl.where(live, a, 0.0)
        else:
            bias = 0.0
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + head).to(tl.float32)
            given = tl.load(weight_ptr + row * stride_w + head, mask=live, other=0.0)
            weights = tl.where(live, time_step(given, bias, low, high, SOFTPLUS), 0.0)
            gates = a * weights
    return gates, weights


@triton.jit
def _unit_triangular_inverse(low, PRECISION: tl.constexpr):
    """The inverse of 1 + low, [64, 64], where `low` is strictly lower triangular.

    The blocks of 8 x 8 on the diagonal are inverted by substitution, all eight at once. Let D be the inverse of the diagonal
    blocks of 1 + low, and M = 1 - D (1 + low). The inverse X satisfies X = D + M X, which is iterated from X = D: one product
    with M gives the inverses of the blocks of 16 x 16, and with these as D three more products give the whole inverse.
    """
    i = tl.arange(0, 64)
    in_8 = (i // 8)[:, None] == (i // 8)[None, :]
    in_16 = (i // 16)[:, None] == (i // 16)[None, :]
    blocks = tl.sum(tl.reshape(tl.where(in_8, low, 0.0), [8, 8, 8, 8]), 2)  # [block, row, column]
    # Rows are divided so that a warp holds whole blocks: its lanes are 4 rows x 8 columns, and no step waits for a barrier.
    below = tl.permute(tl.reshape(blocks, [8, 2, 4, 8]), (1, 0, 2, 3))  # [2, block, 4, column]
    row = (tl.arange(0, 2) * 4)[:, None, None, None] + tl.arange(0, 4)[None, None, :, None]
    column = tl.arange(0, 8)[None, None, None, :]
    for step in range(7):
        # In place: columns before `step` already hold the inverse below its diagonal, the others still hold `low`.
        factors = tl.sum(tl.where(column == step, below, 0.0), 3)
        known = tl.sum(tl.sum(tl.where(row == step, below, 0.0), 2), 0)
        known = known[None, :, None, :] + tl.where(column == step, 2.0, 0.0)  # x - 2 x = -x: column `step` changes sign
        below -= factors[:, :, :, None] * known
    b = tl.arange(0, 8)
    apart = (b[:, None] == b[None, :]).to(tl.float32)
    blocks = tl.reshape(tl.permute(below, (1, 0, 2, 3)), [8, 8, 8])
    inverse = tl.reshape(blocks[:, :, None, :] * apart[:, None, :, None], [64, 64])
    inverse += (i[:, None] == i[None, :]).to(tl.float32)
    m = tl.dot(inverse, tl.where(in_16 & (in_8 == 0), -low, 0.0), input_precision=PRECISION)
    inverse = tl.dot(m, inverse, inverse, input_precision=PRECISION)
    m = tl.dot(inverse, tl.where(in_16, 0.0, -low), input_precision=PRECISION)
    found = tl.dot(m, inverse, inverse, input_precision=PRECISION)
    found = tl.dot(m, found, inverse, input_precision=PRECISION)
    return tl.dot(m, found, inverse, input_precision=PRECISION)


@triton.jit
def _prepare_pieces(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    a_ptr,
    bias_ptr,
    sums_ptr,
    tail_k_ptr,
    tail_v_ptr,
    tail_g_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    chunk_ptr,
    keys_ptr,
    queries_ptr,
    attn_ptr,
    w_ptr,
    u_ptr,
    decays_ptr,
    inverse_ptr,
    scale,
    limit_low,
    limit_high,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_w,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RING: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores the operands of a piece (see `PieceOperands`) and its rows of the tail, except u of the delta rule.

    COLUMNS: number of blocks of BLOCK_V columns of the values
    """
    DELTA: tl.constexpr = g_ptr is not None
    piece = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    begin = tl.load(chunk_ptr + 4 * piece)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if rows == 0:
        return
    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    live = i < rows
    in_c = c < DIM
    keep = live[:, None] & in_c[None, :]
    row = (begin + i).to(tl.int64)
    keys = tl.load(k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=keep, other=0.0)
    kind = keys.dtype
    keys = normalised_rows(keys, NORMALISE)
    queries = tl.load(q_ptr + row[:, None] * stride_q + key_head * DIM + c[None, :], mask=keep, other=0.0)
    queries = normalised_rows(queries, NORMALISE) * scale
    of_head = piece * HEADS + head
    rows_of_keys = i[:, None] * BLOCK_K + c[None, :]

    if BY_CHANNEL:
        weights = tl.load(weight_ptr + row * stride_w + head, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + (row * HEADS + head)[:, None] * DIM + c[None, :], mask=keep, other=0.0)
        alike = tl.zeros([64, 64], tl.float32)
        attn = tl.zeros([64, 64], tl.float32)
        for block in range(1, 4):
            # Rows of this block with rows of earlier blocks. Their decay is split at the first row of the block, so that both
            # exponents are at most 0.
            middle = tl.sum(tl.where((i == block * 16)[:, None], sums, 0.0), 0)[None, :]
            to_row = tl.where((i // 16 == block)[:, None], tl.exp(tl.minimum(sums - middle, 0.0)), 0.0)
            from_row = tl.where((i < block * 16)[:, None], keys * tl.exp(tl.minimum(middle - sums, 0.0)), 0.0)
            from_row = tl.trans(from_row.to(kind))
            alike += tl.dot((keys * to_row).to(kind), from_row, input_precision=PRECISION)
            attn += tl.dot((queries * to_row).to(kind), from_row, input_precision=PRECISION)
        for offset in range(16):
            # each row with one row in its own block
            other = i // 16 * 16 + offset
            at = (begin + other).to(tl.int64)
            there = (other < rows)[:, None] & in_c[None, :]
            key = tl.load(k_ptr + at[:, None] * stride_k + key_head * DIM + c[None, :], mask=there, other=0.0)
            sum_there = tl.load(sums_ptr + (at * HEADS + head)[:, None] * DIM + c[None, :], mask=there, other=0.0)
            decayed = normalised_rows(key, NORMALISE) * tl.exp(tl.minimum(sums - sum_there, 0.0))
            column = other[:, None] == i[None, :]
            alike = tl.where(column, tl.sum(keys * decayed, 1)[:, None], alike)
            attn = tl.where(column, tl.sum(queries * decayed, 1)[:, None], attn)
        from_begin = (keys * tl.exp(sums)).to(kind)
        whole = tl.load(sums_ptr + ((begin + rows - 1).to(tl.int64) * HEADS + head) * DIM + c, mask=in_c, other=0.0)
        tl.store(decays_ptr + of_head * BLOCK_K + c, tl.exp(whole))
        to_end = keys * tl.exp(tl.minimum(whole[None, :] - sums, 0.0))
        tl.store(keys_ptr + of_head * (64 * BLOCK_K) + rows_of_keys, to_end.to(kind))
        tl.store(queries_ptr + of_head * (64 * BLOCK_K) + rows_of_keys, (queries * tl.exp(sums)).to(kind))
    else:
        of_key_head = (piece * KEY_HEADS + key_head) * (64 * BLOCK_K)
        is_first = head % (HEADS // KEY_HEADS) == 0
        from_begin = keys.to(kind)
        tl.store(keys_ptr + of_key_head + rows_of_keys, from_begin, mask=is_first)
        rounded = queries.to(kind)
        tl.store(queries_ptr + of_key_head + rows_of_keys, rounded, mask=is_first)
        gates, weights = _row_gates(
            g_ptr, weight_ptr, a_ptr, bias_ptr, row, live, head, limit_low, limit_high, stride_g, stride_w, SOFTPLUS
        )
        sums = tl.cumsum(gates, 0)
        between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        attn = tl.dot(rounded, tl.trans(from_begin), input_precision=PRECISION) * between
        alike = attn
        if DELTA:
            alike = tl.dot(from_begin, tl.trans(from_begin), input_precision=PRECISION) * between
        else:
            attn *= weights[None, :]
        to_row = tl.exp(sums)
        to_end = tl.exp(tl.minimum(tl.sum(gates, 0) - sums, 0.0))
        tl.store(decays_ptr + of_head * 128 + i, to_row)
        tl.store(decays_ptr + of_head * 128 + 64 + i, to_end if DELTA else to_end * weights)

    attn = tl.where(i[:, None] >= i[None, :], attn, 0.0)
    tl.store(attn_ptr + of_head * 4096 + i[:, None] * 64 + i[None, :], attn.to(kind))
    if DELTA:
        low = tl.where(i[:, None] > i[None, :], alike * weights[:, None], 0.0)
        solved = _unit_triangular_inverse(low, PRECISION)
        if inverse_ptr is not None:
            tl.store(inverse_ptr + of_head * 4096 + i[:, None] * 64 + i[None, :], solved.to(kind))
        solved *= weights[None, :]
        inverse = solved.to(kind)
        of_keys = inverse if BY_CHANNEL else (solved * to_row[None, :]).to(kind)
        w = tl.dot(of_keys, from_begin, input_precision=PRECISION)
        tl.store(w_ptr + of_head * (64 * BLOCK_K) + rows_of_keys, w.to(kind))
    for block in range(COLUMNS):
        x = block * BLOCK_V + tl.arange(0, BLOCK_V)
        here = live[:, None] & (x < DIM_V)[None, :]
        values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0)
        u = tl.trans(values)  # [BLOCK_V, 64]
        if DELTA:
            u = tl.dot(u, tl.trans(inverse), input_precision=PRECISION).to(kind)
        tl.store(u_ptr + of_head * (COLUMNS * BLOCK_V * 64) + x[:, None] * 64 + i[None, :], u)

    if tail_k_ptr is not None:
        seq = tl.load(chunk_ptr + 4 * piece + 2)
        end = tl.load(seqused_ptr + seq)
        first_position = end - tl.load(cu_ptr + seq + 1) + begin
        if first_position + rows > end - RING:
            position = first_position + i
            last = live & (position >= end - RING)
            last_keys = last[:, None] & in_c[None, :]
            ring = tl.load(slot_ptr + seq).to(tl.int64) * RING + position % RING
            if head % (HEADS // KEY_HEADS) == 0:
                plain = tl.load(k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=last_keys)
                tl.store(tail_k_ptr + (ring * KEY_HEADS + key_head)[:, None] * DIM + c[None, :], plain, mask=last_keys)
            if not DELTA:
                for tail_block in range(COLUMNS):
                    x_of_tail = tail_block * BLOCK_V + tl.arange(0, BLOCK_V)
                    last_values = last[:, None] & (x_of_tail < DIM_V)[None, :]
                    given = v_ptr + row[:, None] * stride_v + head * DIM_V + x_of_tail[None, :]
                    place = tail_v_ptr + (ring * HEADS + head)[:, None] * DIM_V + x_of_tail[None, :]
                    tl.store(place, tl.load(given, mask=last_values), mask=last_values)
            if tail_g_ptr is not None:
                if BY_CHANNEL:
                    g = tl.load(g_ptr + row[:, None] * stride_g + head * DIM + c[None, :], mask=last_keys)
                    tl.store(tail_g_ptr + (ring * HEADS + head)[:, None] * DIM + c[None, :], g.to(tl.float32), mask=last_keys)
                else:
                    tl.store(tail_g_ptr + ring * HEADS + head, gates if DELTA else weights, mask=last)
