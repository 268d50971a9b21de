"""The gradients of the gated delta rule with gates by head, in pieces of up to 64 rows.

The forward's operands and the states before pieces are computed again (pieces.py). Then three launches:

1. `_prepare_gradients`, a program for each piece, head and block of columns, computes what the loop needs from the gradients of
   the outputs.
2. `_pass_gradients` goes through the pieces of a sequence backwards, with the gradient of the state in registers. For each
   piece it stores the gradient of the state after the piece, and the gradient of u.
3. `_finish_gradients`, a program for each piece and head, computes the gradients of the inputs.

docs/kernels/linear-attention.md derives them. Gates by channel use the first two launches as well (channel_gradients.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, mma_sync_on_sm100, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.few_rows import with_contiguous_heads
from fa_serve.ops.linear_attention.pieces import pieces_of_sequence, prepare_and_pass
from fa_serve.ops.linear_attention.primitives import L2NORM_EPS
from fa_serve.ops.linear_attention.problem import PIECE_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.tiles import MIN_COLUMNS, PiecesTile


@triton.jit
def _prepare_gradients(
    dout_ptr,
    attn_ptr,
    decays_ptr,
    chunk_ptr,
    du_ptr,
    dy_ptr,
    stride_d,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """du (pieces, HEADS, columns, 64): the part of u's gradient that comes from the outputs of the piece.
    dy (pieces, HEADS, columns, 64): gradients of the outputs, decayed from the beginning of the piece; with gates by channel
    they are not decayed, because the queries are."""
    block = tl.program_id(0) % COLUMNS
    head = (tl.program_id(0) // COLUMNS) % HEADS
    piece = (tl.program_id(0) // (COLUMNS * HEADS)).to(tl.int64)
    first = tl.load(chunk_ptr + 4 * piece)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if rows == 0:
        return
    i = tl.arange(0, 64)
    of_block = tl.arange(0, BLOCK_V)
    x = block * BLOCK_V + of_block
    of_head = piece * HEADS + head
    row = (first + i).to(tl.int64)
    here = (i < rows)[:, None] & (x < DIM_V)[None, :]
    attn = tl.load(attn_ptr + of_head * 4096 + i[:, None] * 64 + i[None, :])
    d = tl.load(dout_ptr + row[:, None] * stride_d + head * DIM_V + x[None, :], mask=here, other=0.0).to(attn.dtype)
    place = (of_head * COLUMNS + block) * (BLOCK_V * 64) + of_block[:, None] * 64 + i[None, :]
    tl.store(du_ptr + place, tl.dot(tl.trans(d), attn, input_precision=PRECISION).to(attn.dtype))
    if BY_CHANNEL:
        tl.store(dy_ptr + place, tl.trans(d))
    else:
        decayed = tl.trans(d).to(tl.float32) * tl.load(decays_ptr + of_head * 128 + i)[None, :]
        tl.store(dy_ptr + place, decayed.to(attn.dtype))


@triton.jit(do_not_specialize=["num_chunks"])
def _pass_gradients(
    keys_ptr,
    queries_ptr,
    w_ptr,
    decays_ptr,
    dy_ptr,
    du_ptr,
    dstates_ptr,
    dfinal_ptr,
    dbegin_ptr,
    cu_ptr,
    chunk_ptr,
    num_chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dstates (pieces, HEADS, columns, BLOCK_K): gradients of the states after the pieces. du is completed in place.
    dfinal, dbegin (num_seqs, HEADS, DIM, DIM_V): gradients of the final and of the initial states."""
    program = tl.program_id(0)
    block = program % COLUMNS
    head = (program // COLUMNS) % HEADS
    seq = program // (COLUMNS * HEADS)
    key_head = head // (HEADS // KEY_HEADS)
    first_piece, count = pieces_of_sequence(chunk_ptr, tl.load(cu_ptr + seq), tl.load(cu_ptr + seq + 1), num_chunks)
    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    of_block = tl.arange(0, BLOCK_V)
    x = block * BLOCK_V + of_block
    square = (seq * HEADS + head).to(tl.int64) * (DIM * DIM_V) + c[None, :] * DIM_V + x[:, None]
    in_square = (c < DIM)[None, :] & (x < DIM_V)[:, None]
    d = tl.load(dfinal_ptr + square, mask=in_square, other=0.0).to(tl.float32)  # [BLOCK_V, BLOCK_K]
    rows_of_keys = i[:, None] * BLOCK_K + c[None, :]
    rows_of_u = of_block[:, None] * 64 + i[None, :]
    for n in tl.range(0, count, num_stages=STAGES):
        piece = (first_piece + count - 1 - n).to(tl.int64)
        of_head = piece * HEADS + head
        of_key_head = (piece * KEY_HEADS + key_head) * (64 * BLOCK_K)
        of_columns = of_head * COLUMNS + block
        keys = tl.load(keys_ptr + of_key_head + rows_of_keys)
        kind = keys.dtype
        rounded = d.to(kind)
        tl.store(dstates_ptr + of_columns * (BLOCK_V * BLOCK_K) + of_block[:, None] * BLOCK_K + c[None, :], rounded)
        du = tl.dot(rounded, tl.trans(keys), input_precision=PRECISION)
        if not BY_CHANNEL:
            du *= tl.load(decays_ptr + of_head * 128 + 64 + i)[None, :]
        du += tl.load(du_ptr + of_columns * (BLOCK_V * 64) + rows_of_u).to(tl.float32)
        tl.store(du_ptr + of_columns * (BLOCK_V * 64) + rows_of_u, du.to(kind))
        if BY_CHANNEL:
            d *= tl.load(decays_ptr + of_head * BLOCK_K + c)[None, :]
        else:
            d *= tl.load(decays_ptr + of_head * 128 + 63)
        dy = tl.load(dy_ptr + of_columns * (BLOCK_V * 64) + rows_of_u)
        queries = tl.load(queries_ptr + of_key_head + rows_of_keys)
        d = tl.dot(dy, queries, d, input_precision=PRECISION)
        w = tl.load(w_ptr + of_head * (64 * BLOCK_K) + rows_of_keys)
        d = tl.dot((-du).to(kind), w, d, input_precision=PRECISION)
    tl.store(dbegin_ptr + square, d, mask=in_square)


@triton.jit
def _before_norm(raw_ptr, place, keep, d, NORMALISE: tl.constexpr):
    """The gradient of rows whose normalised form has the gradient d."""
    if NORMALISE:
        raw = tl.load(raw_ptr + place, mask=keep, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(raw * raw, 1) + L2NORM_EPS)[:, None]
        unit = raw * factor
        d = factor * (d - unit * tl.sum(unit * d, 1)[:, None])
    return d


@triton.jit
def _finish_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    chunk_ptr,
    keys_ptr,
    queries_ptr,
    attn_ptr,
    u_ptr,
    decays_ptr,
    states_ptr,
    inverse_ptr,
    du_ptr,
    dstates_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_b,
    stride_d,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, dk (total, HEADS, DIM) float32, for each head of the values; dv (total, HEADS, DIM_V); dg, dbeta (total, HEADS)."""
    head = tl.program_id(0) % HEADS
    piece = (tl.program_id(0) // HEADS).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunk_ptr + 4 * piece)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if rows == 0:
        return
    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    live = i < rows
    row = (first + i).to(tl.int64)
    of_head = piece * HEADS + head
    of_pair = of_head * 4096 + i[:, None] * 64 + i[None, :]
    inverse = tl.load(inverse_ptr + of_pair)
    kind = inverse.dtype
    beta = tl.load(beta_ptr + row * stride_b + head, mask=live, other=0.0).to(tl.float32)
    sums = tl.cumsum(tl.load(g_ptr + row * stride_g + head, mask=live, other=0.0).to(tl.float32), 0)

    dattn = tl.zeros([64, 64], tl.float32)
    dlow = tl.zeros([64, 64], tl.float32)
    dq = tl.zeros([64, BLOCK_K], tl.float32)
    dw = tl.zeros([64, BLOCK_K], tl.float32)
    dk = tl.zeros([64, BLOCK_K], tl.float32)
    dbeta = tl.zeros([64], tl.float32)
    dwhole = 0.0
    for block in range(COLUMNS):
        of_block = tl.arange(0, BLOCK_V)
        x = block * BLOCK_V + of_block
        here = live[:, None] & (x < DIM_V)[None, :]
        of_columns = of_head * COLUMNS + block
        rows_of_u = of_columns * (BLOCK_V * 64) + of_block[:, None] * 64 + i[None, :]
        rows_of_state = of_columns * (BLOCK_V * BLOCK_K) + of_block[:, None] * BLOCK_K + c[None, :]
        d = tl.load(dout_ptr + row[:, None] * stride_d + head * DIM_V + x[None, :], mask=here, other=0.0).to(kind)
        u = tl.load(u_ptr + rows_of_u)  # [BLOCK_V, 64]
        du = tl.load(du_ptr + rows_of_u)
        state = tl.load(states_ptr + rows_of_state)  # [BLOCK_V, BLOCK_K]
        dstate = tl.load(dstates_ptr + rows_of_state)
        dattn = tl.dot(d, u, dattn, input_precision=PRECISION)
        dq = tl.dot(d, state, dq, input_precision=PRECISION)
        solved = tl.dot(tl.trans(inverse), tl.trans(du), input_precision=PRECISION)  # [64, BLOCK_V]: gradient of beta v
        dlow = tl.dot(solved.to(kind), u, dlow, input_precision=PRECISION)
        dw = tl.dot(solved.to(kind), state, dw, input_precision=PRECISION)
        dk = tl.dot(tl.trans(u), dstate, dk, input_precision=PRECISION)
        dwhole += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0).to(tl.float32)
        dbeta += tl.sum(solved * values, 1)
        place = (row * HEADS + head)[:, None] * DIM_V + x[None, :]
        tl.store(dv_ptr + place, (solved * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=here)

    of_key_head = (piece * KEY_HEADS + key_head) * (64 * BLOCK_K) + i[:, None] * BLOCK_K + c[None, :]
    keys = tl.load(keys_ptr + of_key_head)
    queries = tl.load(queries_ptr + of_key_head)
    between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    to_row = tl.load(decays_ptr + of_head * 128 + i)
    to_end = tl.load(decays_ptr + of_head * 128 + 64 + i)
    # gradients through the state before the piece, the state after it, and w
    dq *= to_row[:, None]
    dsums = tl.sum(dq * queries.to(tl.float32), 1)
    dk *= to_end[:, None]
    kept = tl.sum(dk * keys.to(tl.float32), 1)
    dsums -= kept
    dw *= -to_row[:, None]
    of_w = tl.sum(dw * keys.to(tl.float32), 1)
    dbeta += of_w
    dsums += beta * of_w
    dk += dw * beta[:, None]
    # gradients through the products of queries and keys
    dattn = tl.where(i[:, None] >= i[None, :], dattn, 0.0)
    pairs = dattn * tl.load(attn_ptr + of_pair).to(tl.float32)
    dattn = (dattn * between).to(kind)
    dq = tl.dot(dattn, keys, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dattn), queries, dk, input_precision=PRECISION)
    # gradients through the triangular system
    dlow = tl.where(i[:, None] > i[None, :], -dlow * between, 0.0)
    alike = dlow * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    dbeta += tl.sum(alike, 1)
    pairs += alike * beta[:, None]
    dlow = (dlow * beta[:, None]).to(kind)
    dk = tl.dot(dlow, keys, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dlow), keys, dk, input_precision=PRECISION)
    dsums += tl.sum(pairs, 1) - tl.sum(pairs, 0)
    whole = tl.sum(tl.where(i == 63, to_row, 0.0), 0)
    dsums += tl.where(i == rows - 1, tl.sum(kept, 0) + whole * dwhole, 0.0)
    tl.store(dg_ptr + row * HEADS + head, tl.cumsum(dsums, 0, reverse=True).to(dg_ptr.dtype.element_ty), mask=live)
    tl.store(dbeta_ptr + row * HEADS + head, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
    keep = live[:, None] & (c < DIM)[None, :]
    place = (row * HEADS + head)[:, None] * DIM + c[None, :]
    dq = _before_norm(q_ptr, row[:, None] * stride_q + key_head * DIM + c[None, :], keep, dq * scale, NORMALISE)
    tl.store(dq_ptr + place, dq, mask=keep)
    dk = _before_norm(k_ptr, row[:, None] * stride_k + key_head * DIM + c[None, :], keep, dk, NORMALISE)
    tl.store(dk_ptr + place, dk, mask=keep)


def delta_rule_gradients(
    inputs: MatrixInputs, access: StateAccess, dout: Tensor, dfinal: Tensor, tile: PiecesTile
) -> tuple[Tensor, ...]:
    """Gradients of the initial states, q, k, v, g and beta.

    inputs: inputs of the delta rule with gates by head
    access: as for the forward: the initial states are read, and the final states are written once more
    dout:   (total, heads, dim_v)
    dfinal: (num_seqs, heads, dim, dim_v)
    """
    tile = tile._replace(outputs_in_loop=False)
    q, k, v, g, dout = (with_contiguous_heads(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g, dout) if x is not None)
    assert inputs.weight is not None
    beta = with_unit_stride(inputs.weight)
    batch = access.batch
    total, heads = v.shape[:2]
    pieces = len(batch.chunks)
    inverse = k.new_empty(pieces, heads, PIECE_ROWS, PIECE_ROWS)
    operands = prepare_and_pass(inputs, access, v, tile, inverse)
    assert operands.states is not None
    du = torch.empty_like(operands.u)
    dy = torch.empty_like(operands.u)
    dstates = torch.empty_like(operands.states)
    dfinal = dfinal.contiguous()
    dbegin = torch.empty_like(dfinal)
    dq, dk = k.new_zeros(2, total, heads, k.shape[2], dtype=torch.float32)
    dv = v.new_zeros(v.shape)
    dg = torch.zeros_like(g, memory_format=torch.contiguous_format)
    dbeta = torch.zeros_like(beta, memory_format=torch.contiguous_format)
    of_prepare = (dout, operands.attn, operands.decays, batch.chunks, du, dy)
    passed = (operands.keys, operands.queries, operands.w, operands.decays, dy, du, dstates, dfinal, dbegin)
    needed = (*operands[:3], *operands[4:], inverse, du, dstates)
    of_finish = (q, k, v, g, beta, dout, batch.chunks, *needed, dq, dk, dv, dg, dbeta)
    strides = tuple([x.stride(0) for x in (q, k, v, g, beta, dout)])
    dtypes = tuple([x.dtype for x in of_finish if x is not None])
    facts = (len(batch.sources), pieces, k.shape[1:], v.shape[1:], inputs.softmax_scale, inputs.use_qk_l2norm)
    key = ("delta_rule_gradients", *facts, strides, dtypes, tile, v.get_device())
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(inputs, len(batch.sources), pieces, strides, tile))
    run(of_prepare, (*passed, batch.cu_seqlens, batch.chunks), of_finish)
    group = heads // k.shape[1]
    dq, dk = (x.unflatten(1, (-1, group)).sum(2).to(y.dtype) for x, y in ((dq, q), (dk, k)))
    return dbegin, dq, dk, dv, dg, dbeta


def _plan(inputs: MatrixInputs, num_seqs: int, pieces: int, strides: tuple[int, ...], tile: PiecesTile) -> Any:
    key_heads, dim = inputs.k.shape[1:]
    heads, dim_v = inputs.v.shape[1:]
    block_k = power_of_2(max(dim, MIN_COLUMNS))
    blocks = -(-dim_v // tile.filled_columns) * tile.filled_columns // tile.block_v
    arch = spec.arch_of(inputs.v.device)
    precision = "tf32" if arch and inputs.v.dtype != torch.float32 else "ieee"
    prepare = Launch(
        _prepare_gradients,
        pieces * heads * blocks,
        varying=(),
        strides=strides[5:],
        fixed=(heads, dim_v, False, blocks, tile.block_v, precision),
        options={"num_warps": 4},
    )
    passing = Launch(
        _pass_gradients,
        num_seqs * heads * blocks,
        varying=(pieces,),
        fixed=(heads, key_heads, dim, dim_v, False, block_k, blocks, tile.block_v, min(tile.stages, 2), precision),
        options={"num_warps": tile.pass_warps},
    )
    finish = Launch(
        _finish_gradients,
        pieces * heads,
        varying=(float(inputs.softmax_scale),),
        strides=strides,
        fixed=(heads, key_heads, dim, dim_v, inputs.use_qk_l2norm, block_k, blocks, tile.block_v, precision),
        options={"num_warps": 8, "num_stages": 2, **mma_sync_on_sm100(arch)},
    )

    def run(of_prepare: Any, of_passing: Any, of_finish: Any) -> None:
        prepare(of_prepare)
        passing(of_passing)
        finish(of_finish)

    return run
