"""The kernel for a few rows of a sequence after a state page and a tail, for recurrences whose state is a matrix.

A program computes some columns of the values of one head of one sequence, one row after the other. It reads these columns of
the state once and keeps them in registers. Each row reads the tail again. A decode step has one row per sequence, so it reads
nothing twice, and the tail occupies no registers once it has been summed. More programs therefore fit on a multiprocessor, and
their states keep the memory busy. The products of a row with the state (S^T k and S^T q) and its sums over the tail end in one
reduction over the threads that hold a column. docs/kernels/linear-attention.md has the equations.

The tail is read in tiles of BLOCK_T rows, from the last tile back to the first; in the last tile, only the rows that exist are
read. What a row adds depends only on its position after the state page, so its bits do not depend on how many steps computed
the rows before it. The state is written only if a page fills. It is then computed by the recurrence itself, row by row.

Sequences with more rows than FEW_ROWS and sequences that are padding are skipped. This is decided on the device, so that one
CUDA graph of the launch serves every step. Left out: chunks of prompts (pieces.py).
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
from fa_serve.ops.linear_attention.primitives import clear_padding
from fa_serve.ops.linear_attention.problem import FEW_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.tails import (
    add_tile,
    compare_key_and_query,
    finish_row,
    gates_and_weights,
    pass_rows,
    read_tile,
)
from fa_serve.ops.linear_attention.tiles import FewRowsTile


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _compute_few_rows(
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
    ONE_ROW: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows t are counted from the position of the state: first the rows of the tail, then the rows of the step.

    g_ptr:        log gates of the delta rule; None: the log gates are a, or a * weight
    weight_ptr:   beta of the delta rule, else dt or None
    tail_u_ptr:   u of the delta rule, else v. The delta rule needs it without a tail too, for u of the step's rows
    tail_g_ptr:   g of the delta rule, else dt or None
    stride_*:     from row to row; heads and their elements are contiguous
    ONE_ROW:      each sequence has one row, after a tail
    """
    DELTA: tl.constexpr = g_ptr is not None
    COLUMNS: tl.constexpr = (DIM_V + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % COLUMNS
    head = (tl.program_id(0) // COLUMNS) % HEADS
    seq = tl.program_id(0) // (COLUMNS * HEADS)
    key_head = head // (HEADS // KEY_HEADS)

    # the values that the host has sent: independent loads, so one round trip to memory
    begin = tl.load(cu_ptr + seq)
    stop = tl.load(cu_ptr + seq + 1)
    end = tl.load(seqused_ptr + seq)
    source = tl.load(source_ptr + seq).to(tl.int64)
    target = tl.load(target_ptr + seq).to(tl.int64)
    slot = tl.load(slot_ptr + seq).to(tl.int64)
    rows = stop - begin
    live = (rows > 0) & (rows <= MOST) & (end > 0)
    first = end - rows
    start = first // PAGE * PAGE
    tail = first - start

    # Load the state early, so that it is in flight while the rest is read and computed. It may be loaded before gdc_wait,
    # because the kernel just before this one never writes states.
    c = tl.arange(0, BLOCK_K)
    x = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_c = c < DIM
    in_x = x < DIM_V
    square = c[:, None] * DIM_V + x[None, :]
    in_square = in_c[:, None] & in_x[None, :]
    page = read_ptr + (source * HEADS + head) * (DIM * DIM_V)
    state = tl.load(page + square, mask=in_square & live & (source >= 0), other=0.0)  # [BLOCK_K, BLOCK_V]
    first_row = begin.to(tl.int64)
    q_ptr += first_row * stride_q + key_head * DIM
    k_ptr += first_row * stride_k + key_head * DIM
    v_ptr += first_row * stride_v + head * DIM_V
    out_row_ptr = out_ptr + (first_row * HEADS + head) * DIM_V
    if tail_k_ptr is not None:
        tail_k_ptr += (slot * RING * KEY_HEADS + key_head) * DIM
    if tail_u_ptr is not None:
        tail_u_ptr += (slot * RING * HEADS + head) * DIM_V
    GATES: tl.constexpr = DIM if BY_CHANNEL else 1
    if tail_g_ptr is not None:
        tail_g_ptr += (slot * RING * HEADS + head) * GATES
    if DELTA:
        g_ptr += first_row * stride_g + head * GATES
    if weight_ptr is not None:
        weight_ptr += first_row * stride_w + head
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    a = 0.0
    if not DELTA:
        a = tl.load(a_ptr + head).to(tl.float32)
    # If the tail before a single row fits into one tile, it is loaded early as well.
    HELD: tl.constexpr = ONE_ROW and PAGE <= BLOCK_T + 1
    if HELD:
        keys, u, gates, weights = read_tile(
            0,
            tl.where(live, tail, 0),
            tail,
            start,
            c,
            x,
            in_c,
            in_x,
            a,
            bias,
            k_ptr,
            v_ptr,
            g_ptr,
            weight_ptr,
            tail_k_ptr,
            tail_u_ptr,
            tail_g_ptr,
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
            ONE_ROW,
            BLOCK_T,
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
    clear_padding(out_ptr + head * DIM_V + x, in_x, begin, stop, end, seq == num_seqs - 1, total, HEADS * DIM_V)
    if not live:
        return

    count = rows
    if ONE_ROW:
        count = 1
    for j in range(count):
        r = tail + j
        own = (start + r) % RING
        raw_key = tl.load(k_ptr + j * stride_k + c, mask=in_c, other=0.0)
        key = raw_key.to(tl.float32)  # [BLOCK_K]
        query = tl.load(q_ptr + j * stride_q + c, mask=in_c, other=0.0).to(tl.float32)
        raw_value = tl.load(v_ptr + j * stride_v + x, mask=in_x, other=0.0)
        value = raw_value.to(tl.float32)  # [BLOCK_V]
        beta = 1.0
        if BY_CHANNEL:
            gate = tl.load(g_ptr + j * stride_g + c, mask=in_c, other=0.0).to(tl.float32)
            kept = gate
        else:
            gate, kept = gates_and_weights(
                False,
                True,
                0,
                j,
                a,
                bias,
                g_ptr,
                weight_ptr,
                tail_g_ptr,
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
            beta = tl.load(weight_ptr + j * stride_w).to(tl.float32)
        key, query, alike = compare_key_and_query(key, query, scale, NORMALISE)
        part_of_known = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        part_of_out = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        after = gate  # sum of the log gates after the tile, up to row r
        tiles = (r + BLOCK_T - 1) // BLOCK_T
        if ONE_ROW:
            tiles = (PAGE - 1 + BLOCK_T - 1) // BLOCK_T  # a constant: rows that the tail lacks are read as 0
        for i in range(tiles):
            low = (tiles - 1 - i) * BLOCK_T
            if not HELD:
                keys, u, gates, weights = read_tile(
                    low,
                    r,
                    tail,
                    start,
                    c,
                    x,
                    in_c,
                    in_x,
                    a,
                    bias,
                    k_ptr,
                    v_ptr,
                    g_ptr,
                    weight_ptr,
                    tail_k_ptr,
                    tail_u_ptr,
                    tail_g_ptr,
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
                    ONE_ROW,
                    BLOCK_T,
                )
            part_of_known, part_of_out, after = add_tile(
                part_of_known, part_of_out, after, keys, u, gates, weights, key, query, DELTA, BY_CHANNEL, NORMALISE
            )
        y, u_of_row = finish_row(state, part_of_known, part_of_out, after, key, query, value, alike, beta, kept, DELTA, BLOCK_T)
        if tail_u_ptr is not None:
            tl.store(tail_u_ptr + own * (HEADS * DIM_V) + x, u_of_row if DELTA else raw_value, mask=in_x)
        if d_ptr is not None:
            y += tl.load(d_ptr + head).to(tl.float32) * value
        tl.store(out_row_ptr + j * (HEADS * DIM_V) + x, y.to(out_ptr.dtype.element_ty), mask=in_x)
        # store the row in the tail: no other program reads the rows of the ring that are written here
        if tail_k_ptr is not None and block == 0:
            if head % (HEADS // KEY_HEADS) == 0:
                tl.store(tail_k_ptr + own * (KEY_HEADS * DIM) + c, raw_key, mask=in_c)
            if tail_g_ptr is not None:
                if BY_CHANNEL:
                    tl.store(tail_g_ptr + own * (HEADS * DIM) + c, kept, mask=in_c)
                else:
                    tl.store(tail_g_ptr + own * HEADS, kept)
        if DELTA and j + 1 < rows:
            tl.debug_barrier()  # the next row reads u, in other threads

    position = end // PAGE * PAGE
    if (target >= 0) & (position > start):
        if DELTA:
            tl.debug_barrier()
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
            k_ptr,
            v_ptr,
            g_ptr,
            weight_ptr,
            tail_k_ptr,
            tail_u_ptr,
            tail_g_ptr,
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


def launch_few_rows(inputs: MatrixInputs, access: StateAccess, out: Tensor, tile: FewRowsTile) -> None:
    """Compute the rows of all sequences with at most FEW_ROWS rows, and write them to `out`, a contiguous tensor like v."""
    q, k, v, g = (x if x is None else with_contiguous_heads(x) for x in inputs[:4])
    weight = None if inputs.weight is None else with_unit_stride(inputs.weight)
    assert q is not None
    assert k is not None
    assert v is not None
    batch = access.batch
    tail_k, tail_u, tail_g = (*access.tails, None, None, None)[:3]
    ring = 1 if tail_k is None else tail_k.shape[1]
    if g is not None and tail_u is None:
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
    one_row = batch.most_rows == 1 and tail_k is not None
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
    pdl = spec.has_programmatic_launch(arch)
    registers = tile.row_registers if one_row else tile.registers
    fixed: tuple[Any, ...] = (
        heads,
        key_heads,
        dim,
        dim_v,
        page_size,
        ring,
        1 if one_row else FEW_ROWS,
        one_row,
        by_channel,
        inputs.use_qk_l2norm,
        inputs.steps.softplus,
        tile.block_t,
        power_of_2(max(dim, 16)),
        tile.block_v,
        pdl,
    )
    low, high = inputs.steps.limit
    return Launch(
        _compute_few_rows,
        num_seqs * heads * -(-dim_v // tile.block_v),
        varying=(num_seqs, float(inputs.softmax_scale), float(low), float(high)),
        strides=strides,
        fixed=fixed,
        options=launch_options(pdl, tile.num_warps) | ({"maxnreg": registers} if arch and registers else {}),
    )


def with_contiguous_heads(x: Tensor) -> Tensor:
    """Rows (total, ...) whose heads and elements are contiguous: x itself, or a copy."""
    return x if x[0].is_contiguous() else x.contiguous()
