"""The kernel for few rows of a sequence behind a state page and a tail, of recurrences whose state is a matrix.

A program computes some columns of the values of one head of one sequence. It reads these columns of the state once and keeps
them in registers, with the rows of the tail and those of the step, and computes the rows one after the other. It writes the
state only if a page fills. docs/kernels/linear-attention.md has the equations.

Sequences with more rows than FEW_ROWS are skipped, and so are those of padding: what a step contains is decided on the device,
so that a CUDA graph of the launch serves every step. Left out: chunks of prompts (pieces.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, launch_options, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.primitives import clear_padding, normalised_row, normalised_rows, time_step
from fa_serve.ops.linear_attention.problem import FEW_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.reread_rows import _reread_rows
from fa_serve.ops.linear_attention.tiles import FewRowsTile


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _matrix_rows(
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
    MOST: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows t of a block are those of the tail, from the position of the state on, and behind them those of the step.

    g_ptr:        log gates of the delta rule; None: they are a, or a * weight
    weight_ptr:   beta of the delta rule, else dt or None
    tail_u_ptr:   u of the delta rule, else v
    tail_g_ptr:   g of the delta rule, else dt or None
    stride_*:     from row to row; heads and their elements are contiguous
    """
    DELTA: tl.constexpr = g_ptr is not None
    COLUMNS: tl.constexpr = (DIM_V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    block = program % COLUMNS
    head = (program // COLUMNS) % HEADS
    seq = program // (COLUMNS * HEADS)
    key_head = head // (HEADS // KEY_HEADS)

    c = tl.arange(0, BLOCK_K)
    x = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_c = c < DIM
    in_x = x < DIM_V
    begin = tl.load(cu_ptr + seq)
    behind = tl.load(cu_ptr + seq + 1)
    rows = behind - begin
    end = tl.load(seqused_ptr + seq)
    clear_padding(out_ptr + head * DIM_V + x, in_x, begin, behind, end, seq == num_seqs - 1, total, HEADS * DIM_V)
    if (rows == 0) | (rows > MOST) | (end == 0):
        return
    first = end - rows
    start = first // PAGE * PAGE
    tail = first - start
    slot = 0
    if tail_k_ptr is not None:
        slot = tl.load(slot_ptr + seq).to(tl.int64)

    t = tl.arange(0, BLOCK_T)
    in_tail = t < tail
    in_rows = (t >= tail) & (t < tail + rows)
    ring = slot * RING + (start + t) % RING  # row of the tail
    row = (begin + t - tail).to(tl.int64)  # row of the step

    # the state, with its log gate so far
    source = tl.load(source_ptr + seq).to(tl.int64)
    square = head * (DIM * DIM_V) + c[:, None] * DIM_V + x[None, :]
    in_square = in_c[:, None] & in_x[None, :]
    page = read_ptr + source * (HEADS * DIM * DIM_V)
    state = tl.load(page + square, mask=in_square & (source >= 0), other=0.0).to(tl.float32)  # [BLOCK_K, BLOCK_V]

    # keys of the tail and of the step
    keys = tl.load(
        k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=in_rows[:, None] & in_c[None, :], other=0.0
    ).to(tl.float32)
    if tail_k_ptr is not None:
        old = tail_k_ptr + (ring * KEY_HEADS + key_head)[:, None] * DIM + c[None, :]
        keys += tl.load(old, mask=in_tail[:, None] & in_c[None, :], other=0.0).to(tl.float32)
    keys = normalised_rows(keys, NORMALISE)  # [BLOCK_T, BLOCK_K]

    # log gates of single rows, and u: of the tail, and of the step where it is known
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    values = tl.load(
        v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=in_rows[:, None] & in_x[None, :], other=0.0
    ).to(tl.float32)
    u = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    if tail_u_ptr is not None:
        old = tail_u_ptr + (ring * HEADS + head)[:, None] * DIM_V + x[None, :]
        u = tl.load(old, mask=in_tail[:, None] & in_x[None, :], other=0.0).to(tl.float32)
    weights = tl.zeros([BLOCK_T], tl.float32)
    if weight_ptr is not None:
        given = tl.load(weight_ptr + row * stride_w + head, mask=in_rows, other=0.0).to(tl.float32)
        weights = given if DELTA else tl.where(in_rows, time_step(given, bias, limit_low, limit_high, SOFTPLUS), 0.0)
    if DELTA:
        if BY_CHANNEL:
            gates = tl.load(
                g_ptr + row[:, None] * stride_g + head * DIM + c[None, :], mask=in_rows[:, None] & in_c[None, :], other=0.0
            ).to(tl.float32)
            if tail_g_ptr is not None:
                old = tail_g_ptr + (ring * HEADS + head)[:, None] * DIM + c[None, :]
                gates += tl.load(old, mask=in_tail[:, None] & in_c[None, :], other=0.0)
        else:
            gates = tl.load(g_ptr + row * stride_g + head, mask=in_rows, other=0.0).to(tl.float32)
            if tail_g_ptr is not None:
                gates += tl.load(tail_g_ptr + ring * HEADS + head, mask=in_tail, other=0.0)
    else:
        a = tl.load(a_ptr + head).to(tl.float32)
        if weight_ptr is None:
            gates = tl.where(in_tail | in_rows, a, 0.0)
            u += values
        else:
            if tail_g_ptr is not None:
                weights += tl.load(tail_g_ptr + ring * HEADS + head, mask=in_tail, other=0.0)
            gates = a * weights
            u = (u + values) * weights[:, None]

    for j in range(rows):
        # Sums are over all rows of the block, in one order: the bits of a row do not depend on which rows before it belong to
        # the tail and which to the step.
        r = tail + j
        this = t == r
        at = (begin + j).to(tl.int64)
        query = tl.load(q_ptr + at * stride_q + key_head * DIM + c, mask=in_c, other=0.0)
        query = normalised_row(query, NORMALISE) * scale  # [BLOCK_K]
        if BY_CHANNEL:
            seen = tl.where((t <= r)[:, None], gates, 0.0)
            faded = keys * tl.exp(tl.cumsum(seen, 0, reverse=True) - seen)
            of_state = tl.exp(tl.sum(seen, 0))[:, None] * state
        else:
            seen = tl.where(t <= r, gates, 0.0)
            faded = keys * tl.exp(tl.cumsum(seen, 0, reverse=True) - seen)[:, None]
            of_state = tl.exp(tl.sum(seen, 0)) * state
        if DELTA:
            key = tl.sum(tl.where(this[:, None], keys, 0.0), 0)  # [BLOCK_K]
            known = tl.sum(of_state * key[:, None], 0)
            alike = tl.where(t < r, tl.sum(faded * key[None, :], 1), 0.0)
            known += tl.sum(alike[:, None] * u, 0)  # [BLOCK_V]
            value = tl.sum(tl.where(this[:, None], values, 0.0), 0)
            beta = tl.sum(tl.where(this, weights, 0.0), 0)
            u = tl.where(this[:, None], (beta * (value - known))[None, :], u)
        alike = tl.where(t <= r, tl.sum(faded * query[None, :], 1), 0.0)
        y = tl.sum(of_state * query[:, None], 0) + tl.sum(alike[:, None] * u, 0)
        if d_ptr is not None:
            value = tl.sum(tl.where(this[:, None], values, 0.0), 0)
            y += tl.load(d_ptr + head).to(tl.float32) * value
        tl.store(out_ptr + (at * HEADS + head) * DIM_V + x, y.to(out_ptr.dtype.element_ty), mask=in_x)

    if tail_k_ptr is not None:
        # rows of the step: no program reads the rows of the ring that are written here
        if (block == 0) & (head % (HEADS // KEY_HEADS) == 0):
            plain = tl.load(
                k_ptr + row[:, None] * stride_k + key_head * DIM + c[None, :], mask=in_rows[:, None] & in_c[None, :], other=0.0
            )
            place = tail_k_ptr + (ring * KEY_HEADS + key_head)[:, None] * DIM + c[None, :]
            tl.store(place, plain, mask=in_rows[:, None] & in_c[None, :])
        new = tail_u_ptr + (ring * HEADS + head)[:, None] * DIM_V + x[None, :]
        kept = u if DELTA else values
        tl.store(new, kept.to(tail_u_ptr.dtype.element_ty), mask=in_rows[:, None] & in_x[None, :])
        if tail_g_ptr is not None and block == 0:
            if BY_CHANNEL:
                channels = tail_g_ptr + (ring * HEADS + head)[:, None] * DIM + c[None, :]
                tl.store(channels, gates, mask=in_rows[:, None] & in_c[None, :])
            else:
                kept_gates = gates if DELTA else weights
                tl.store(tail_g_ptr + ring * HEADS + head, kept_gates, mask=in_rows)

    target = tl.load(target_ptr + seq).to(tl.int64)
    position = end // PAGE * PAGE
    if (target >= 0) & (position > start):
        full = position - start
        counted = t < full
        if BY_CHANNEL:
            counted_gates = tl.where(counted[:, None], gates, 0.0)
            faded = keys * tl.exp(tl.cumsum(counted_gates, 0, reverse=True) - counted_gates)
            state *= tl.exp(tl.sum(counted_gates, 0))[:, None]
        else:
            counted_gates = tl.where(counted, gates, 0.0)
            faded = keys * tl.exp(tl.cumsum(counted_gates, 0, reverse=True) - counted_gates)[:, None]
            state *= tl.exp(tl.sum(counted_gates, 0))
        faded = tl.where(counted[:, None], faded, 0.0)
        state += tl.dot(tl.trans(faded), u, input_precision=PRECISION)
        tl.store(write_ptr + target * (HEADS * DIM * DIM_V) + square, state, mask=in_square)


def launch_few_rows(inputs: MatrixInputs, access: StateAccess, out: Tensor, tile: FewRowsTile) -> None:
    """Compute the rows of all sequences with at most FEW_ROWS rows, and write them to `out`, which is like v and contiguous."""
    q, k, v, g = (x if x is None else with_contiguous_heads(x) for x in inputs[:4])
    weight = None if inputs.weight is None else with_unit_stride(inputs.weight)
    assert q is not None
    assert k is not None
    assert v is not None
    batch = access.batch
    tail_k, tail_u, tail_g = (*access.tails, None, None, None)[:3]
    ring = 1 if tail_k is None else tail_k.shape[1]
    if tile.rereads and g is not None and tail_u is None:
        ring = FEW_ROWS
        tail_u = torch.empty(len(batch.sources), ring, *v.shape[1:], dtype=torch.float32, device=v.device)
    tensors = (
        q,
        k,
        v,
        g,
        weight,
        inputs.a,
        inputs.steps.bias,
        inputs.d,
        access.read,
        access.write,
        tail_k,
        tail_u,
        tail_g,
        batch.sources,
        batch.targets,
        batch.slots,
        batch.cu_seqlens,
        batch.seqused_k,
        out,
    )
    strides = tuple(0 if x is None else x.stride(0) for x in (q, k, v, g, weight))
    one_row = tile.rereads and batch.most_rows == 1 and tail_k is not None
    key = (
        "few_rows",
        one_row,
        len(batch.sources),
        k.shape[1:],
        v.shape[1:],
        strides,
        (batch.page_size, ring, g is not None and g.dim() == 3),
        (inputs.softmax_scale, inputs.use_qk_l2norm, inputs.steps.softplus, inputs.steps.limit),
        tile,
        tuple([None if x is None else x.dtype for x in tensors]),
        v.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(inputs, len(batch.sources), batch.page_size, ring, strides, tile, one_row))
    run(tensors, len(v))


def _plan(
    inputs: MatrixInputs,
    num_seqs: int,
    page_size: int,
    ring: int,
    strides: tuple[int, ...],
    tile: FewRowsTile,
    one_row: bool,
) -> Launch:
    key_heads, dim = inputs.k.shape[1:]
    heads, dim_v = inputs.v.shape[1:]
    by_channel = inputs.g is not None and inputs.g.dim() == 3
    arch = spec.arch_of(inputs.v.device)
    pdl = tile.rereads and spec.has_programmatic_launch(arch)
    fixed: tuple[Any, ...] = (
        heads,
        key_heads,
        dim,
        dim_v,
        page_size,
        ring,
        1 if one_row else FEW_ROWS,
        by_channel,
        inputs.use_qk_l2norm,
        inputs.steps.softplus,
        tile.block_t,
        power_of_2(max(dim, 16)),
        tile.block_v,
        *((one_row, pdl) if tile.rereads else ("tf32x3" if arch else "ieee",)),
    )
    low, high = inputs.steps.limit
    return Launch(
        _reread_rows if tile.rereads else _matrix_rows,
        num_seqs * heads * -(-dim_v // tile.block_v),
        varying=(num_seqs, float(inputs.softmax_scale), float(low), float(high)),
        strides=strides,
        fixed=fixed,
        options=launch_options(pdl, tile.num_warps) | ({"maxnreg": tile.registers} if arch and tile.registers else {}),
    )


def with_contiguous_heads(x: Tensor) -> Tensor:
    """Rows (total, ...) whose heads and elements are contiguous: x itself, or a copy."""
    return x if x[0].is_contiguous() else x.contiguous()
