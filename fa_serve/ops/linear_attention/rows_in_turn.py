"""The kernel for one row of each sequence whose programs stay: each computes columns of several heads, one after the other.

The state and the tail of the next head are on their way to shared memory while a head is computed. A program of few_rows.py
waits for its state, computes and ends, so that the memory waits while the programs of a multiprocessor compute. Left out: rows
of a step behind a tail of more than one tile, and several rows, which few_rows.py computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.linear_attention.primitives import clear_padding
from fa_serve.ops.linear_attention.tails import (
    add_tile,
    compare_key_and_query,
    finish_row,
    gates_and_weights,
    pass_rows,
    read_tile,
)

IN_TURN_STAGES = 3
"""Heads of a program: one is computed while the next is on its way, and behind it the one after it."""
START = 2
"""To start a program and fill its loads takes about as long as so many heads."""


def programs_of_sequence(num_seqs: int, blocks: int, slots: int) -> int:
    """Programs that compute the `blocks` of a sequence, so that all, `slots` at a time, end first; the fewest of those."""

    def time(programs: int) -> int:
        return -(-num_seqs * programs // slots) * (-(-blocks // programs) + START)

    return min(range(1, blocks + 1), key=time)


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _compute_rows_in_turn(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    a_ptr,
    bias_ptr,
    d_ptr,
    read_ptr,
    write_ptr,
    tail_k_ptr,
    tail_u_ptr,
    tail_g_ptr,
    source_ptr,
    target_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    out_ptr,
    total,
    num_seqs,
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
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The arguments are those of `_compute_few_rows`.

    PROGRAMS: of a sequence
    STAGES:   heads that are on their way or computed
    """
    DELTA: tl.constexpr = g_ptr is not None
    COLUMNS: tl.constexpr = (DIM_V + BLOCK_V - 1) // BLOCK_V
    GATES: tl.constexpr = DIM if BY_CHANNEL else 1
    seq = tl.program_id(0) // PROGRAMS
    part = tl.program_id(0) % PROGRAMS
    begin = tl.load(cu_ptr + seq)
    behind = tl.load(cu_ptr + seq + 1)
    end = tl.load(seqused_ptr + seq)
    source = tl.load(source_ptr + seq).to(tl.int64)
    target = tl.load(target_ptr + seq).to(tl.int64)
    slot = tl.load(slot_ptr + seq).to(tl.int64)
    live = (behind - begin == 1) & (end > 0)
    first = end - 1
    start = first // PAGE * PAGE
    tail = first - start
    own = first % RING
    row = begin.to(tl.int64)
    c = tl.arange(0, BLOCK_K)
    of_block = tl.arange(0, BLOCK_V)
    in_c = c < DIM
    low = part * (HEADS * COLUMNS) // PROGRAMS
    high = (part + 1) * (HEADS * COLUMNS) // PROGRAMS
    if PDL:
        tl.extra.cuda.gdc_wait()
    for n in range(low, high):
        x = n % COLUMNS * BLOCK_V + of_block
        cells = out_ptr + n // COLUMNS * DIM_V + x
        clear_padding(cells, x < DIM_V, begin, behind, end, seq == num_seqs - 1, total, HEADS * DIM_V)
    if not live:
        return

    for n in tl.range(low, high, num_stages=STAGES):
        head = n // COLUMNS
        key_head = head // (HEADS // KEY_HEADS)
        x = n % COLUMNS * BLOCK_V + of_block
        in_x = x < DIM_V
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + head).to(tl.float32)
        a = 0.0
        if not DELTA:
            a = tl.load(a_ptr + head).to(tl.float32)
        head_k_ptr = k_ptr + row * stride_k + key_head * DIM
        head_v_ptr = v_ptr + row * stride_v + head * DIM_V
        head_g_ptr = g_ptr
        if DELTA:
            head_g_ptr = g_ptr + row * stride_g + head * GATES
        head_weight_ptr = weight_ptr
        if weight_ptr is not None:
            head_weight_ptr = weight_ptr + row * stride_w + head
        ring_k_ptr = tail_k_ptr + (slot * RING * KEY_HEADS + key_head) * DIM
        ring_u_ptr = tail_u_ptr + (slot * RING * HEADS + head) * DIM_V
        ring_g_ptr = tail_g_ptr
        if tail_g_ptr is not None:
            ring_g_ptr = tail_g_ptr + (slot * RING * HEADS + head) * GATES
        square = c[:, None] * DIM_V + x[None, :]
        in_square = in_c[:, None] & in_x[None, :]
        page = read_ptr + (source * HEADS + head) * (DIM * DIM_V)
        state = tl.load(page + square, mask=in_square & (source >= 0), other=0.0)  # [BLOCK_K, BLOCK_V]
        keys, u, gates, weights = read_tile(
            0,
            tail,
            tail,
            start,
            c,
            x,
            in_c,
            in_x,
            a,
            bias,
            head_k_ptr,
            head_v_ptr,
            head_g_ptr,
            head_weight_ptr,
            ring_k_ptr,
            ring_u_ptr,
            ring_g_ptr,
            stride_k,
            stride_v,
            stride_g,
            stride_w,
            limit_low,
            limit_high,
            HEADS,
            KEY_HEADS,
            DIM,
            DIM_V,
            RING,
            BY_CHANNEL,
            SOFTPLUS,
            True,
            BLOCK_T,
        )
        raw_key = tl.load(head_k_ptr + c, mask=in_c, other=0.0)
        query = tl.load(q_ptr + row * stride_q + key_head * DIM + c, mask=in_c, other=0.0).to(tl.float32)
        raw_value = tl.load(head_v_ptr + x, mask=in_x, other=0.0)
        value = raw_value.to(tl.float32)
        beta = 1.0
        if BY_CHANNEL:
            gate = tl.load(head_g_ptr + c, mask=in_c, other=0.0).to(tl.float32)
            kept = gate
        else:
            gate, kept = gates_and_weights(
                False,
                True,
                0,
                0,
                a,
                bias,
                head_g_ptr,
                head_weight_ptr,
                ring_g_ptr,
                stride_g,
                stride_w,
                limit_low,
                limit_high,
                HEADS,
                SOFTPLUS,
                False,
                True,
            )
        if DELTA:
            beta = tl.load(head_weight_ptr).to(tl.float32)
        key, query, alike = compare_key_and_query(raw_key.to(tl.float32), query, scale, NORMALISE)
        known = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        y = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        known, y, after = add_tile(known, y, gate, keys, u, gates, weights, key, query, DELTA, BY_CHANNEL, NORMALISE)
        y, u_of_row = finish_row(state, known, y, after, key, query, value, alike, beta, kept, DELTA, BLOCK_T)
        if d_ptr is not None:
            y += tl.load(d_ptr + head).to(tl.float32) * value
        tl.store(out_ptr + (row * HEADS + head) * DIM_V + x, y.to(out_ptr.dtype.element_ty), mask=in_x)
        tl.store(ring_u_ptr + own * (HEADS * DIM_V) + x, u_of_row if DELTA else raw_value, mask=in_x)
        first_of_keys = (n % COLUMNS == 0) & (head % (HEADS // KEY_HEADS) == 0)
        tl.store(ring_k_ptr + own * (KEY_HEADS * DIM) + c, raw_key, mask=in_c & first_of_keys)
        if tail_g_ptr is not None:
            if BY_CHANNEL:
                tl.store(ring_g_ptr + own * (HEADS * DIM) + c, kept, mask=in_c & (n % COLUMNS == 0))
            else:
                tl.store(ring_g_ptr + own * HEADS, kept, mask=n % COLUMNS == 0)

    position = end // PAGE * PAGE
    if (target >= 0) & (position > start):
        tl.debug_barrier()  # other threads read u
        for n in range(low, high):
            head = n // COLUMNS
            key_head = head // (HEADS // KEY_HEADS)
            x = n % COLUMNS * BLOCK_V + of_block
            in_x = x < DIM_V
            bias = 0.0
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + head).to(tl.float32)
            a = 0.0
            if not DELTA:
                a = tl.load(a_ptr + head).to(tl.float32)
            head_k_ptr = k_ptr + row * stride_k + key_head * DIM
            head_v_ptr = v_ptr + row * stride_v + head * DIM_V
            head_g_ptr = g_ptr
            if DELTA:
                head_g_ptr = g_ptr + row * stride_g + head * GATES
            head_weight_ptr = weight_ptr
            if weight_ptr is not None:
                head_weight_ptr = weight_ptr + row * stride_w + head
            ring_k_ptr = tail_k_ptr + (slot * RING * KEY_HEADS + key_head) * DIM
            ring_u_ptr = tail_u_ptr + (slot * RING * HEADS + head) * DIM_V
            ring_g_ptr = tail_g_ptr
            if tail_g_ptr is not None:
                ring_g_ptr = tail_g_ptr + (slot * RING * HEADS + head) * GATES
            square = c[:, None] * DIM_V + x[None, :]
            in_square = in_c[:, None] & in_x[None, :]
            page = read_ptr + (source * HEADS + head) * (DIM * DIM_V)
            state = tl.load(page + square, mask=in_square & (source >= 0), other=0.0)  # [BLOCK_K, BLOCK_V]
            state = pass_rows(
                state,
                position - start,
                tail,
                start,
                c,
                x,
                in_c,
                in_x,
                a,
                bias,
                head_k_ptr,
                head_v_ptr,
                head_g_ptr,
                head_weight_ptr,
                ring_k_ptr,
                ring_u_ptr,
                ring_g_ptr,
                stride_k,
                stride_v,
                stride_g,
                stride_w,
                limit_low,
                limit_high,
                HEADS,
                KEY_HEADS,
                DIM,
                DIM_V,
                RING,
                BY_CHANNEL,
                NORMALISE,
                SOFTPLUS,
            )
            tl.store(write_ptr + (target * HEADS + head) * (DIM * DIM_V) + square, state, mask=in_square)
