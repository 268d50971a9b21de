"""The gradients of the gated delta rule with gates by channel (Kimi delta attention), in pieces of up to 64 rows.

The forward's operands and the states before pieces are computed again (pieces.py), and the backward loop over the pieces is the
one for gates by head (pieces_backward.py). Then two launches follow, with a program for each piece and head:

1. `_gradients_of_values` computes everything that is a sum over the columns of the values, such as the gradients of the
   products of rows with rows, and the gradients of the values.
2. `_gradients_of_channels` computes the gradients of queries, keys and gates, some channels at a time. For rows of different
   blocks of 16, the decay between them is split at the first row of the later block. Rows of the same block are paired one by
   one. All exponents are therefore at most 0, as in the forward.

docs/kernels/linear-attention.md derives them.
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
from fa_serve.ops.linear_attention.pieces import prepare_and_pass
from fa_serve.ops.linear_attention.pieces_backward import _pass_gradients, _prepare_gradients
from fa_serve.ops.linear_attention.prepare import _sum_gates
from fa_serve.ops.linear_attention.primitives import L2NORM_EPS
from fa_serve.ops.linear_attention.problem import PIECE_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.tiles import MIN_COLUMNS, PiecesTile

BLOCK_CHANNELS = 32
"""Channels that a program has in registers at a time: about ten matrices of 64 rows by this many columns."""


@triton.jit
def _gradients_of_values(
    v_ptr,
    beta_ptr,
    dout_ptr,
    chunk_ptr,
    u_ptr,
    states_ptr,
    inverse_ptr,
    du_ptr,
    dstates_ptr,
    dattn_ptr,
    dlow_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    dwhole_ptr,
    dv_ptr,
    dbeta_ptr,
    stride_v,
    stride_b,
    stride_d,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores gradients:

    dattn, dlow: (pieces, HEADS, 64, 64): of the products of queries and keys, and of the triangular system before its rows are
                 multiplied by beta
    dq, dk, dw:  (total, HEADS, DIM) float32: of the queries decayed from the beginning of the piece, of the keys decayed to its
                 end, and of the rows of w before beta
    dwhole:      (pieces, HEADS, BLOCK_K) float32: of the decay over the piece
    dv:          (total, HEADS, DIM_V)
    dbeta:       (total, HEADS) float32: only the part through the values
    """
    head = tl.program_id(0) % HEADS
    piece = (tl.program_id(0) // HEADS).to(tl.int64)
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
    dattn = tl.zeros([64, 64], tl.float32)
    dlow = tl.zeros([64, 64], tl.float32)
    dq = tl.zeros([64, BLOCK_K], tl.float32)
    dw = tl.zeros([64, BLOCK_K], tl.float32)
    dk = tl.zeros([64, BLOCK_K], tl.float32)
    dbeta = tl.zeros([64], tl.float32)
    dwhole = tl.zeros([BLOCK_K], tl.float32)
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
        dwhole += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
        values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0).to(tl.float32)
        dbeta += tl.sum(solved * values, 1)
        place = (row * HEADS + head)[:, None] * DIM_V + x[None, :]
        tl.store(dv_ptr + place, (solved * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=here)
    tl.store(dattn_ptr + of_pair, tl.where(i[:, None] >= i[None, :], dattn, 0.0).to(kind))
    tl.store(dlow_ptr + of_pair, tl.where(i[:, None] > i[None, :], -dlow, 0.0).to(kind))
    tl.store(dwhole_ptr + of_head * BLOCK_K + c, dwhole)
    tl.store(dbeta_ptr + row * HEADS + head, dbeta, mask=live)
    keep = live[:, None] & (c < DIM)[None, :]
    of_rows = (row * HEADS + head)[:, None] * DIM + c[None, :]
    tl.store(dq_ptr + of_rows, dq, mask=keep)
    tl.store(dk_ptr + of_rows, dk, mask=keep)
    tl.store(dw_ptr + of_rows, -dw, mask=keep)


@triton.jit
def _gradients_of_channels(
    q_ptr,
    k_ptr,
    beta_ptr,
    sums_ptr,
    chunk_ptr,
    dattn_ptr,
    dlow_ptr,
    dw_ptr,
    dwhole_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    stride_b,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Completes dq, dk and dbeta in place, and writes dg (total, HEADS, DIM).

    q, k: (total, KEY_HEADS, DIM) float32, contiguous, already normalised if the call asks for it
    sums: (total, HEADS, DIM) float32: the log gates from the first row of the piece to each row
    """
    head = tl.program_id(0) % HEADS
    piece = (tl.program_id(0) // HEADS).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunk_ptr + 4 * piece)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if rows == 0:
        return
    i = tl.arange(0, 64)
    live = i < rows
    row = (first + i).to(tl.int64)
    of_head = piece * HEADS + head
    of_pair = of_head * 4096 + i[:, None] * 64 + i[None, :]
    dattn = tl.load(dattn_ptr + of_pair)
    dlow = tl.load(dlow_ptr + of_pair)
    kind = dattn.dtype
    beta = tl.load(beta_ptr + row * stride_b + head, mask=live, other=0.0).to(tl.float32)
    weighed = (dlow.to(tl.float32) * beta[:, None]).to(kind)
    dbeta = tl.load(dbeta_ptr + row * HEADS + head, mask=live, other=0.0)
    for low in range(0, DIM, BLOCK_C):
        c = low + tl.arange(0, BLOCK_C)
        in_c = (c < DIM)[None, :]
        keep = live[:, None] & in_c
        of_keys = (row * KEY_HEADS + key_head)[:, None] * DIM + c[None, :]
        of_rows = (row * HEADS + head)[:, None] * DIM + c[None, :]
        keys = tl.load(k_ptr + of_keys, mask=keep, other=0.0)
        queries = tl.load(q_ptr + of_keys, mask=keep, other=0.0) * scale
        sums = tl.load(sums_ptr + of_rows, mask=keep, other=0.0)
        of_last = ((first + rows - 1).to(tl.int64) * HEADS + head) * DIM + c
        whole = tl.load(sums_ptr + of_last, mask=c < DIM, other=0.0)
        # gradients through the state before the piece, w, and the state after the piece
        to_row = tl.exp(sums)
        dq = tl.load(dq_ptr + of_rows, mask=keep, other=0.0) * to_row
        dleft = tl.load(dw_ptr + of_rows, mask=keep, other=0.0) * to_row  # of keys in their role as the later row, before beta
        dright = tl.load(dk_ptr + of_rows, mask=keep, other=0.0)
        dright *= tl.exp(tl.minimum(whole[None, :] - sums, 0.0))  # of keys in their role as the earlier row
        dlast = tl.sum(dright * keys, 0)
        dlast += tl.exp(whole) * tl.load(dwhole_ptr + of_head * BLOCK_K + c, mask=c < DIM, other=0.0)
        for block in range(1, 4):
            # rows of this block with rows of earlier blocks: the decay is split at the first row of the block
            middle = tl.sum(tl.where((i == block * 16)[:, None], sums, 0.0), 0)[None, :]
            from_middle = tl.where((i // 16 == block)[:, None], tl.exp(tl.minimum(sums - middle, 0.0)), 0.0)
            to_middle = tl.where((i < block * 16)[:, None], tl.exp(tl.minimum(middle - sums, 0.0)), 0.0)
            before = (keys * to_middle).to(kind)
            dq += from_middle * tl.dot(dattn, before, input_precision=PRECISION)
            dleft += from_middle * tl.dot(dlow, before, input_precision=PRECISION)
            seen = tl.dot(tl.trans(dattn), (queries * from_middle).to(kind), input_precision=PRECISION)
            seen = tl.dot(tl.trans(weighed), (keys * from_middle).to(kind), seen, input_precision=PRECISION)
            dright += to_middle * seen
        for offset in range(16):
            # each row with one row in its own block, which may be earlier or later
            other = i // 16 * 16 + offset
            at = (first + other).to(tl.int64)
            there = (other < rows)[:, None] & in_c
            of_other_keys = (at * KEY_HEADS + key_head)[:, None] * DIM + c[None, :]
            key = tl.load(k_ptr + of_other_keys, mask=there, other=0.0)
            query = tl.load(q_ptr + of_other_keys, mask=there, other=0.0) * scale
            sum_there = tl.load(sums_ptr + (at * HEADS + head)[:, None] * DIM + c[None, :], mask=there, other=0.0)
            columns = other[:, None] == i[None, :]
            earlier = key * tl.exp(tl.minimum(sums - sum_there, 0.0))
            dq += earlier * tl.sum(tl.where(columns, dattn.to(tl.float32), 0.0), 1)[:, None]
            dleft += earlier * tl.sum(tl.where(columns, dlow.to(tl.float32), 0.0), 1)[:, None]
            lines = i[:, None] == other[None, :]
            of_query = tl.sum(tl.where(lines, dattn.to(tl.float32), 0.0), 0)[:, None]
            of_key = tl.sum(tl.where(lines, weighed.to(tl.float32), 0.0), 0)[:, None]
            dright += (query * of_query + key * of_key) * tl.exp(tl.minimum(sum_there - sums, 0.0))
        dbeta += tl.sum(keys * dleft, 1)
        dleft *= beta[:, None]
        dsums = queries * dq + keys * (dleft - dright)
        dsums += tl.where((i == rows - 1)[:, None], dlast[None, :], 0.0)
        tl.store(dg_ptr + of_rows, tl.cumsum(dsums, 0, reverse=True).to(dg_ptr.dtype.element_ty), mask=keep)
        tl.store(dq_ptr + of_rows, dq * scale, mask=keep)
        tl.store(dk_ptr + of_rows, dleft + dright, mask=keep)
    tl.store(dbeta_ptr + row * HEADS + head, dbeta, mask=live)


def channel_gradients(
    inputs: MatrixInputs, access: StateAccess, dout: Tensor, dfinal: Tensor, tile: PiecesTile
) -> tuple[Tensor, ...]:
    """Gradients of the initial states, q, k, v, g and beta: `delta_rule_gradients` for gates by channel."""
    tile = tile._replace(outputs_in_loop=False)
    assert inputs.g is not None
    assert inputs.weight is not None
    v, g, dout = (with_contiguous_heads(x) for x in (inputs.v, inputs.g, dout))
    q, k = (_normalised(x) if inputs.use_qk_l2norm else x.float() for x in (inputs.q, inputs.k))
    q, k = q.contiguous(), k.contiguous()
    beta = with_unit_stride(inputs.weight)
    batch = access.batch
    total, heads = v.shape[:2]
    dim = k.shape[2]
    pieces = len(batch.chunks)
    inverse = inputs.k.new_empty(pieces, heads, PIECE_ROWS, PIECE_ROWS)
    operands = prepare_and_pass(inputs, access, v, tile, inverse)
    assert operands.states is not None
    du = torch.empty_like(operands.u)
    dy = torch.empty_like(operands.u)
    dstates = torch.empty_like(operands.states)
    dfinal = dfinal.contiguous()
    dbegin = torch.empty_like(dfinal)
    dattn = torch.empty_like(inverse)
    dlow = torch.empty_like(inverse)
    sums, dw = q.new_empty(2, total, heads, dim)
    dq, dk = q.new_zeros(2, total, heads, dim)
    dwhole = torch.empty_like(operands.decays)
    dv = v.new_zeros(v.shape)
    dg = torch.zeros_like(g, memory_format=torch.contiguous_format)
    dbeta = q.new_zeros(total, heads)
    of_prepare = (dout, operands.attn, operands.decays, batch.chunks, du, dy)
    passed = (operands.keys, operands.queries, operands.w, operands.decays, dy, du, dstates, dfinal, dbegin)
    given = (v, beta, dout, batch.chunks, operands.u, operands.states, inverse, du, dstates)
    of_values = (*given, dattn, dlow, dq, dk, dw, dwhole, dv, dbeta)
    of_channels = (q, k, beta, sums, batch.chunks, dattn, dlow, dw, dwhole, dq, dk, dg, dbeta)
    strides = tuple([x.stride(0) for x in (v, g, beta, dout)])
    dtypes = tuple([x.dtype for x in (*of_values, g)])
    key = ("channel_gradients", len(batch.sources), pieces, k.shape[1:], v.shape[1:], inputs.softmax_scale, strides, dtypes)
    key += (tile, v.get_device())
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(inputs, len(batch.sources), pieces, strides, tile))
    run((g, sums, batch.chunks), of_prepare, (*passed, batch.cu_seqlens, batch.chunks), of_values, of_channels)
    group = heads // k.shape[1]
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    if inputs.use_qk_l2norm:
        dq = _before_normalised(inputs.q, q, dq)
        dk = _before_normalised(inputs.k, k, dk)
    return dbegin, dq.to(inputs.q.dtype), dk.to(inputs.k.dtype), dv, dg, dbeta.to(beta.dtype)


def _length_factor(x: Tensor) -> Tensor:
    """The factor that scales rows (..., dim) to length 1: float32 (..., 1)."""
    wide = x.float()
    factor: Tensor = (wide.square().sum(-1, keepdim=True) + L2NORM_EPS.value).rsqrt()
    return factor


def _normalised(x: Tensor) -> Tensor:
    return x.float() * _length_factor(x)


def _before_normalised(x: Tensor, unit: Tensor, d: Tensor) -> Tensor:
    """The gradient of rows x. `unit` is their normalised form, and d is the gradient of `unit`."""
    before: Tensor = _length_factor(x) * (d - unit * (unit * d).sum(-1, keepdim=True))
    return before


def _plan(inputs: MatrixInputs, num_seqs: int, pieces: int, strides: tuple[int, ...], tile: PiecesTile) -> Any:
    key_heads, dim = inputs.k.shape[1:]
    heads, dim_v = inputs.v.shape[1:]
    block_k = power_of_2(max(dim, MIN_COLUMNS))
    blocks = -(-dim_v // tile.filled_columns) * tile.filled_columns // tile.block_v
    is_nvidia = spec.arch_of(inputs.v.device) > 0
    precision = "tf32" if is_nvidia and inputs.v.dtype != torch.float32 else "ieee"
    of_v, of_g, of_beta, of_dout = strides
    launches = (
        Launch(
            _sum_gates,
            pieces * heads,
            varying=(),
            strides=(of_g,),
            fixed=(heads, dim, block_k),
            options={"num_warps": 4},
        ),
        Launch(
            _prepare_gradients,
            pieces * heads * blocks,
            varying=(),
            strides=(of_dout,),
            fixed=(heads, dim_v, True, blocks, tile.block_v, precision),
            options={"num_warps": 4},
        ),
        Launch(
            _pass_gradients,
            num_seqs * heads * blocks,
            varying=(pieces,),
            fixed=(heads, heads, dim, dim_v, True, block_k, blocks, tile.block_v, min(tile.stages, 2), precision),
            options={"num_warps": tile.pass_warps},
        ),
        Launch(
            _gradients_of_values,
            pieces * heads,
            varying=(),
            strides=(of_v, of_beta, of_dout),
            fixed=(heads, dim, dim_v, block_k, blocks, tile.block_v, precision),
            options={"num_warps": 8, "num_stages": 2},
        ),
        Launch(
            _gradients_of_channels,
            pieces * heads,
            varying=(float(inputs.softmax_scale),),
            strides=(of_beta,),
            fixed=(heads, key_heads, dim, block_k, min(block_k, BLOCK_CHANNELS), precision),
            options={"num_warps": 8, "num_stages": 1},
        ),
    )

    def run(*tensors: Any) -> None:
        for launch, given in zip(launches, tensors, strict=True):
            launch(given)

    return run
