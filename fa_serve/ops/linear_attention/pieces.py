"""The kernels for chunks of prompts, in pieces of up to 64 rows, of recurrences whose state is a matrix.

Three launches, of which the first is for gates by channel alone:

1. `_sum_gates` sums the log gates from the first row of each piece on.
2. `_prepare_pieces`, a program for each piece and head: everything that does not need the state. The products of queries and
   keys, and for the delta rule the inverse of the triangular system and its products with values and keys.
3. `_pass_states`, a program for each sequence, head and block of columns of the values: it keeps the state in registers, goes
   through the pieces of the sequence in their order and computes the outputs. The state after a piece is stored where the
   table of pieces says so.

docs/kernels/linear-attention.md derives the forms. Left out: sequences with few rows (few_rows.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.few_rows import with_contiguous_heads
from fa_serve.ops.linear_attention.primitives import normalised_rows, time_step
from fa_serve.ops.linear_attention.problem import PIECE_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.tiles import MIN_COLUMNS, PiecesTile


@triton.jit
def _sum_gates(g_ptr, sums_ptr, chunk_ptr, stride_g, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """sums (total, HEADS, DIM): the log gates from the first row of the piece to each row. A program for a piece and a head."""
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
    """-> log gates by head and weights [64] of rows; 0 where they are not `live`. Without a weight there are none (zeros)."""
    weights = tl.zeros([64], tl.float32)
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

    Blocks of 16 x 16 on the diagonal by substitution, all four at once; those below them by products. With D the diagonal
    blocks of 1 + low, and M = D^-1 (1 + low) - 1, whose fourth power is 0: (1 + M)^-1 = (1 - M) (1 + M^2).
    """
    i = tl.arange(0, 64)
    same = (i // 16)[:, None] == (i // 16)[None, :]
    r = tl.arange(0, 16)
    diagonal = tl.sum(tl.reshape(tl.where(same, low, 0.0), [4, 16, 4, 16]), 2)  # [4, 16, 16]
    inverse = tl.zeros([4, 16, 16], tl.float32) + (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    for step in range(1, 16):
        this = (r == step)[None, :, None]
        factors = tl.sum(tl.where(this, diagonal, 0.0), 1)  # [4, 16]: the row of this step
        found = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where(this, found[:, None, :], 0.0)
    b = tl.arange(0, 4)
    apart = (b[:, None] == b[None, :]).to(tl.float32)
    block_inverse = tl.reshape(inverse[:, :, None, :] * apart[:, None, :, None], [64, 64])
    m = tl.dot(block_inverse, tl.where(same, 0.0, low), input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    outer = block_inverse + tl.dot(square, block_inverse, input_precision=PRECISION)
    return outer - tl.dot(m, outer, input_precision=PRECISION)


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
    tail_g_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    chunk_ptr,
    attn_ptr,
    w_ptr,
    u_ptr,
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
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """attn (total, HEADS, 64): products of the row's query with the keys of its piece, through the gates. For the delta rule
    w (total, HEADS, DIM) and u (total, HEADS, DIM_V): what the row adds is u - w S. It writes keys and gates to the tail."""
    DELTA: tl.constexpr = g_ptr is not None
    piece = tl.program_id(0) // HEADS
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
    plain = tl.load(k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=keep, other=0.0)
    keys = normalised_rows(plain, NORMALISE)
    queries = tl.load(q_ptr + row[:, None] * stride_q + key_head * DIM + c[None, :], mask=keep, other=0.0)
    queries = normalised_rows(queries, NORMALISE) * scale
    kind = plain.dtype

    if BY_CHANNEL:
        weights = tl.load(weight_ptr + row * stride_w + head, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + (row * HEADS + head)[:, None] * DIM + c[None, :], mask=keep, other=0.0)
        alike = tl.zeros([64, 64], tl.float32)
        attn = tl.zeros([64, 64], tl.float32)
        for block in range(1, 4):
            # rows of this block with rows of the blocks before it: through the first row of the block
            middle = tl.sum(tl.where((i == block * 16)[:, None], sums, 0.0), 0)[None, :]
            to_row = tl.where((i // 16 == block)[:, None], tl.exp(tl.minimum(sums - middle, 0.0)), 0.0)
            from_row = tl.where((i < block * 16)[:, None], keys * tl.exp(tl.minimum(middle - sums, 0.0)), 0.0)
            from_row = tl.trans(from_row.to(kind))
            alike += tl.dot((keys * to_row).to(kind), from_row, input_precision=PRECISION)
            attn += tl.dot((queries * to_row).to(kind), from_row, input_precision=PRECISION)
        for offset in range(16):
            # each row with one row of its block
            other = i // 16 * 16 + offset
            at = (begin + other).to(tl.int64)
            there = (other < rows)[:, None] & in_c[None, :]
            key = tl.load(k_ptr + at[:, None] * stride_k + key_head * DIM + c[None, :], mask=there, other=0.0)
            sum_there = tl.load(sums_ptr + (at * HEADS + head)[:, None] * DIM + c[None, :], mask=there, other=0.0)
            faded = normalised_rows(key, NORMALISE) * tl.exp(tl.minimum(sums - sum_there, 0.0))
            column = other[:, None] == i[None, :]
            alike = tl.where(column, tl.sum(keys * faded, 1)[:, None], alike)
            attn = tl.where(column, tl.sum(queries * faded, 1)[:, None], attn)
        faded_keys = keys * tl.exp(sums)
    else:
        gates, weights = _row_gates(
            g_ptr, weight_ptr, a_ptr, bias_ptr, row, live, head, limit_low, limit_high, stride_g, stride_w, SOFTPLUS
        )
        sums = tl.cumsum(gates, 0)
        between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        attn = tl.dot(queries.to(kind), tl.trans(keys.to(kind)), input_precision=PRECISION) * between
        alike = attn
        if DELTA:
            alike = tl.dot(keys.to(kind), tl.trans(keys.to(kind)), input_precision=PRECISION) * between
        faded_keys = keys * tl.exp(sums)[:, None]

    attn = tl.where(i[:, None] >= i[None, :], attn, 0.0)
    places = (row * HEADS + head)[:, None]
    tl.store(attn_ptr + places * 64 + i[None, :], attn.to(kind), mask=live[:, None])
    if DELTA:
        low = tl.where(i[:, None] > i[None, :], alike * weights[:, None], 0.0)
        inverse = (_unit_triangular_inverse(low, PRECISION) * weights[None, :]).to(kind)
        w = tl.dot(inverse, faded_keys.to(kind), input_precision=PRECISION)
        tl.store(w_ptr + places * DIM + c[None, :], w.to(kind), mask=keep)
        for first in range(0, DIM_V, BLOCK_V):
            x = first + tl.arange(0, BLOCK_V)
            here = live[:, None] & (x < DIM_V)[None, :]
            values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0)
            u = tl.dot(inverse, values.to(kind), input_precision=PRECISION)
            tl.store(u_ptr + places * DIM_V + x[None, :], u.to(kind), mask=here)

    if tail_k_ptr is not None:
        seq = tl.load(chunk_ptr + 4 * piece + 2)
        end = tl.load(seqused_ptr + seq)
        position = end - tl.load(cu_ptr + seq + 1) + begin + i
        last = live & (position >= end - RING)
        ring = tl.load(slot_ptr + seq).to(tl.int64) * RING + position % RING
        if head % (HEADS // KEY_HEADS) == 0:
            place = tail_k_ptr + (ring * KEY_HEADS + key_head)[:, None] * DIM + c[None, :]
            tl.store(place, plain, mask=last[:, None] & in_c[None, :])
        if tail_g_ptr is not None:
            if BY_CHANNEL:
                g = tl.load(g_ptr + row[:, None] * stride_g + head * DIM + c[None, :], mask=keep, other=0.0).to(tl.float32)
                channels = tail_g_ptr + (ring * HEADS + head)[:, None] * DIM + c[None, :]
                tl.store(channels, g, mask=last[:, None] & in_c[None, :])
            else:
                kept = gates if DELTA else weights
                tl.store(tail_g_ptr + ring * HEADS + head, kept, mask=last)


@triton.jit(do_not_specialize=["num_chunks"])
def _pass_states(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    a_ptr,
    bias_ptr,
    d_ptr,
    sums_ptr,
    attn_ptr,
    w_ptr,
    u_ptr,
    read_ptr,
    write_ptr,
    tail_u_ptr,
    source_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    chunk_ptr,
    out_ptr,
    num_chunks,
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
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The outputs of all pieces, the states that are kept, and v or u of the tail."""
    DELTA: tl.constexpr = g_ptr is not None
    COLUMNS: tl.constexpr = (DIM_V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = (program // COLUMNS) % HEADS
    seq = program // (COLUMNS * HEADS)
    key_head = head // (HEADS // KEY_HEADS)

    # the pieces of the sequence stand together in the table
    begin = tl.load(cu_ptr + seq)
    behind = tl.load(cu_ptr + seq + 1)
    first_piece = 0
    count = 0
    entry = tl.arange(0, 128)
    for low in range(0, num_chunks, 128):
        listed = low + entry < num_chunks
        first_row = tl.load(chunk_ptr + 4 * (low + entry), mask=listed, other=0)
        filled = tl.load(chunk_ptr + 4 * (low + entry) + 1, mask=listed, other=0) > 0
        first_piece += tl.sum((filled & (first_row < begin)).to(tl.int32), 0)
        count += tl.sum((filled & (first_row >= begin) & (first_row < behind)).to(tl.int32), 0)
    if count == 0:
        return
    end = tl.load(seqused_ptr + seq)

    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    x = (program % COLUMNS) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_c = c < DIM
    in_x = x < DIM_V
    square = head * (DIM * DIM_V) + c[:, None] * DIM_V + x[None, :]
    in_square = in_c[:, None] & in_x[None, :]
    source = tl.load(source_ptr + seq).to(tl.int64)
    page = read_ptr + source * (HEADS * DIM * DIM_V)
    state = tl.load(page + square, mask=in_square & (source >= 0), other=0.0).to(tl.float32)  # [BLOCK_K, BLOCK_V]

    for piece in range(first_piece, first_piece + count):
        first = tl.load(chunk_ptr + 4 * piece)
        rows = tl.load(chunk_ptr + 4 * piece + 1)
        live = i < rows
        keep = live[:, None] & in_c[None, :]
        here = live[:, None] & in_x[None, :]
        row = (first + i).to(tl.int64)
        places = (row * HEADS + head)[:, None]
        plain = tl.load(k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=keep, other=0.0)
        kind = plain.dtype
        keys = normalised_rows(plain, NORMALISE)
        queries = tl.load(q_ptr + row[:, None] * stride_q + key_head * DIM + c[None, :], mask=keep, other=0.0)
        queries = normalised_rows(queries, NORMALISE) * scale
        values = tl.zeros([64, BLOCK_V], tl.float32)
        if d_ptr is not None or not DELTA:
            values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0).to(tl.float32)
        rounded = state.to(kind)

        if BY_CHANNEL:
            sums = tl.load(sums_ptr + (row * HEADS + head)[:, None] * DIM + c[None, :], mask=keep, other=0.0)
            whole = tl.load(sums_ptr + ((first + rows - 1).to(tl.int64) * HEADS + head) * DIM + c, mask=in_c, other=0.0)
            queries *= tl.exp(sums)
            keys *= tl.exp(tl.minimum(whole[None, :] - sums, 0.0))
            state *= tl.exp(whole)[:, None]
        else:
            gates, weights = _row_gates(
                g_ptr, weight_ptr, a_ptr, bias_ptr, row, live, head, limit_low, limit_high, stride_g, stride_w, SOFTPLUS
            )
            sums = tl.cumsum(gates, 0)
            whole = tl.sum(gates, 0)
            queries *= tl.exp(sums)[:, None]
            keys *= tl.exp(tl.minimum(whole - sums, 0.0))[:, None]
            state *= tl.exp(whole)

        if DELTA:
            w = tl.load(w_ptr + places * DIM + c[None, :], mask=keep, other=0.0)
            u = tl.load(u_ptr + places * DIM_V + x[None, :], mask=here, other=0.0).to(tl.float32)
            u -= tl.dot(w, rounded, input_precision=PRECISION)
        else:
            u = values
            if weight_ptr is not None:
                u = values * weights[:, None]
        attn = tl.load(attn_ptr + places * 64 + i[None, :], mask=live[:, None], other=0.0)
        y = tl.dot(queries.to(kind), rounded, input_precision=PRECISION)
        y = tl.dot(attn, u.to(kind), y, input_precision=PRECISION)
        if d_ptr is not None:
            y += tl.load(d_ptr + head).to(tl.float32) * values
        tl.store(out_ptr + places * DIM_V + x[None, :], y.to(out_ptr.dtype.element_ty), mask=here)
        state = tl.dot(tl.trans(keys.to(kind)), u.to(kind), state, input_precision=PRECISION)

        if tail_u_ptr is not None:
            position = end - behind + first + i
            ring = tl.load(slot_ptr + seq).to(tl.int64) * RING + position % RING
            last = here & (position >= end - RING)[:, None]
            kept = u if DELTA else values
            place = tail_u_ptr + (ring * HEADS + head)[:, None] * DIM_V + x[None, :]
            tl.store(place, kept.to(tail_u_ptr.dtype.element_ty), mask=last)
        target = tl.load(chunk_ptr + 4 * piece + 3).to(tl.int64)
        if target >= 0:
            tl.store(write_ptr + target * (HEADS * DIM * DIM_V) + square, state, mask=in_square)


def launch_pieces(inputs: MatrixInputs, access: StateAccess, out: Tensor, tile: PiecesTile) -> None:
    """Compute the rows of all pieces of `access.batch.chunks`, and write them to `out`, which is like v and contiguous."""
    q, k, v, g = (x if x is None else with_contiguous_heads(x) for x in inputs[:4])
    weight = None if inputs.weight is None else with_unit_stride(inputs.weight)
    assert q is not None
    assert k is not None
    assert v is not None
    batch = access.batch
    tail_k, tail_u, tail_g = (*access.tails, None, None, None)[:3]
    total, heads, dim_v = v.shape
    dim = k.shape[2]
    sums = w = u = None
    if g is not None:
        w = v.new_empty(total, heads, dim)
        u = v.new_empty(total, heads, dim_v)
        if g.dim() == 3:
            sums = torch.empty_like(w, dtype=torch.float32)
    attn = v.new_empty(total, heads, PIECE_ROWS)
    strides = tuple(0 if x is None else x.stride(0) for x in (q, k, v, g, weight))
    ring = 1 if tail_k is None else tail_k.shape[1]
    gates = (g, weight, inputs.a, inputs.steps.bias)
    rows = (batch.cu_seqlens, batch.seqused_k, batch.chunks)
    prepare = (q, k, v, *gates, sums, tail_k, tail_g, batch.slots, *rows, attn, w, u)
    around = (access.read, access.write, tail_u, batch.sources, batch.slots, *rows)
    passing = (q, k, v, *gates, inputs.d, sums, attn, w, u, *around, out)
    key = (
        "pieces",
        len(batch.sources),
        len(batch.chunks),
        k.shape[1:],
        v.shape[1:],
        strides,
        ring,
        (inputs.softmax_scale, inputs.use_qk_l2norm, inputs.steps.softplus, inputs.steps.limit),
        tile,
        tuple([None if x is None else x.dtype for x in passing]),
        v.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(inputs, len(batch.sources), len(batch.chunks), ring, strides, tile))
    run((g, sums, batch.chunks), prepare, passing)


def _plan(inputs: MatrixInputs, num_seqs: int, num_chunks: int, ring: int, strides: tuple[int, ...], tile: PiecesTile) -> Any:
    key_heads, dim = inputs.k.shape[1:]
    heads, dim_v = inputs.v.shape[1:]
    by_channel = inputs.g is not None and inputs.g.dim() == 3
    block_k = power_of_2(max(dim, MIN_COLUMNS))
    is_nvidia = spec.arch_of(inputs.v.device) > 0
    precision = "tf32" if is_nvidia and inputs.v.dtype != torch.float32 else "ieee"
    sizes = (heads, key_heads, dim, dim_v, ring, by_channel, inputs.use_qk_l2norm, inputs.steps.softplus)
    low, high = inputs.steps.limit
    numbers = (float(inputs.softmax_scale), float(low), float(high))
    sum_gates = None
    if by_channel:
        sum_gates = Launch(
            _sum_gates,
            num_chunks * heads,
            varying=(),
            strides=strides[3:4],
            fixed=(heads, dim, block_k),
            options={"num_warps": 4},
        )
    prepare = Launch(
        _prepare_pieces,
        num_chunks * heads,
        varying=numbers,
        strides=strides,
        fixed=(*sizes, block_k, MIN_COLUMNS, precision),
        options={"num_warps": tile.num_warps},
    )
    pass_states = Launch(
        _pass_states,
        num_seqs * heads * -(-dim_v // tile.block_v),
        varying=(num_chunks, *numbers),
        strides=strides,
        fixed=(*sizes, block_k, tile.block_v, precision),
        options={"num_warps": tile.num_warps, "num_stages": 1},
    )

    def run(of_gates: Any, of_prepare: Any, of_passing: Any) -> None:
        if sum_gates is not None:
            sum_gates(of_gates)
        prepare(of_prepare)
        pass_states(of_passing)

    return run
