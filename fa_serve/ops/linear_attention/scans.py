"""The kernel of recurrences whose states are vectors of channels: the selective scan and RG-LRU.

A program computes all rows of one sequence for some channels, in blocks of 16 positions that begin at multiples of 16. It reads
the state page, goes through the tail and the rows of the step as one sequence, and keeps the state in registers. Within a
block, a parallel scan computes all states. The end of a page is the end of a block, so a state that must be stored is in
registers there. Few rows, chunks and the functional form share this kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.primitives import clear_padding, silu, time_step
from fa_serve.ops.linear_attention.problem import FEW_ROWS, ScanInputs, StateAccess

SCAN_BLOCK = 16
"""Positions of a block."""


@triton.jit
def _then(decay, added, later_decay, later_added):
    """Two steps h -> decay * h + added, combined into one."""
    return decay * later_decay, later_decay * added + later_added


@triton.jit(do_not_specialize=["total", "num_seqs", "num_chunks"])
def _scan_channels(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    bias_ptr,
    read_ptr,
    write_ptr,
    tail_x_ptr,
    tail_dt_ptr,
    tail_b_ptr,
    source_ptr,
    target_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    chunk_ptr,
    out_ptr,
    total,
    num_seqs,
    num_chunks,
    limit_low,
    limit_high,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_z,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    FUNCTIONAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes all rows of one sequence for some channels.

    a_ptr:      a of the selective scan; None for RG-LRU, whose log gates are at dt_ptr. Its state has one number per channel
    FUNCTIONAL: the state after the last row goes to the target, whatever its position
    """
    SELECTIVE: tl.constexpr = a_ptr is not None
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    seq = tl.program_id(0) // COLUMNS
    column = tl.program_id(0) % COLUMNS
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < CHANNELS
    begin = tl.load(cu_ptr + seq)
    stop = tl.load(cu_ptr + seq + 1)
    rows = stop - begin
    end = tl.load(seqused_ptr + seq)
    clear_padding(out_ptr + c, in_c, begin, stop, end, seq == num_seqs - 1, total, CHANNELS)
    if (rows == 0) | (end == 0):
        return
    first = end - rows
    start = first // PAGE * PAGE
    source = tl.load(source_ptr + seq).to(tl.int64)
    target = tl.load(target_ptr + seq).to(tl.int64)
    slot = tl.zeros([], tl.int64)
    if tail_x_ptr is not None:
        slot = tl.load(slot_ptr + seq).to(tl.int64)

    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    in_n = n < SIZE
    square = c[:, None] * SIZE + n[None, :]
    in_square = in_c[:, None] & in_n[None, :]
    state = tl.load(read_ptr + source * (CHANNELS * SIZE) + square, mask=in_square & (source >= 0), other=0.0).to(tl.float32)
    a = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    bias = tl.zeros([BLOCK_C], tl.float32)
    if SELECTIVE:
        a += tl.load(a_ptr + square, mask=in_square, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)

    for low in range(start, end, BLOCK_T):
        position = low + t
        in_rows = (position >= first) & (position < end)
        row = (begin + position - first).to(tl.int64)[:, None]
        here = in_rows[:, None] & in_c[None, :]
        x = tl.load(x_ptr + row * stride_x + c[None, :], mask=here, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_C]
        dt = tl.load(dt_ptr + row * stride_dt + c[None, :], mask=here, other=0.0).to(tl.float32)
        if SELECTIVE:
            dt = tl.where(here, time_step(dt, bias[None, :], limit_low, limit_high, SOFTPLUS), 0.0)
            b = tl.load(b_ptr + row * stride_b + n[None, :], mask=in_rows[:, None] & in_n[None, :], other=0.0).to(tl.float32)
        of_row = x
        if tail_x_ptr is not None:
            ring = (slot * RING + position % RING)[:, None]
            kept = here & (position >= end - RING)[:, None]
            tl.store(tail_x_ptr + ring * CHANNELS + c[None, :], x.to(tail_x_ptr.dtype.element_ty), mask=kept)
            tl.store(tail_dt_ptr + ring * CHANNELS + c[None, :], dt, mask=kept)
            in_tail = (position < first)[:, None]
            x += tl.load(tail_x_ptr + ring * CHANNELS + c[None, :], mask=in_tail & in_c[None, :], other=0.0).to(tl.float32)
            dt += tl.load(tail_dt_ptr + ring * CHANNELS + c[None, :], mask=in_tail & in_c[None, :], other=0.0)
            if SELECTIVE:
                place = tail_b_ptr + ring * SIZE + n[None, :]
                if column == 0:
                    shared = in_rows[:, None] & (position >= end - RING)[:, None] & in_n[None, :]
                    tl.store(place, b.to(tail_b_ptr.dtype.element_ty), mask=shared)
                b += tl.load(place, mask=in_tail & in_n[None, :], other=0.0).to(tl.float32)

        # rows past the last one change nothing: their dt (or log gate) and x are 0
        if SELECTIVE:
            decay = tl.exp(dt[:, :, None] * a[None, :, :])  # [BLOCK_T, BLOCK_C, BLOCK_N]
            added = (dt * x)[:, :, None] * b[:, None, :]
        else:
            decay = tl.exp(dt)[:, :, None]
            added = x[:, :, None]
        decay, added = tl.associative_scan((decay, added), 0, _then)
        states = decay * state[None, :, :] + added
        if SELECTIVE:
            of_c = tl.load(c_ptr + row * stride_c + n[None, :], mask=in_rows[:, None] & in_n[None, :], other=0.0)
            y = tl.sum(states * of_c.to(tl.float32)[:, None, :], 2)
            if d_ptr is not None:
                y += tl.load(d_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :] * of_row
            if z_ptr is not None:
                y *= silu(tl.load(z_ptr + row * stride_z + c[None, :], mask=here, other=0.0).to(tl.float32))
        else:
            y = tl.sum(states, 2)
        tl.store(out_ptr + row * CHANNELS + c[None, :], y.to(out_ptr.dtype.element_ty), mask=here)
        state = tl.sum(tl.where((t == BLOCK_T - 1)[:, None, None], states, 0.0), 0)

        if not FUNCTIONAL:
            block_stop = low + BLOCK_T
            page = tl.full([], -1, tl.int64)
            if (rows <= MOST) & (block_stop == end // PAGE * PAGE):
                page = target
            if (rows > MOST) & (block_stop % PAGE == 0) & (block_stop <= end):
                entry = tl.arange(0, 128)
                for chunk in range(0, num_chunks, 128):
                    listed = chunk + entry < num_chunks
                    at = chunk_ptr + 4 * (chunk + entry)
                    last = tl.load(at, mask=listed, other=0) + tl.load(at + 1, mask=listed, other=0)
                    same = listed & (tl.load(at + 1, mask=listed, other=0) > 0) & (last == begin + block_stop - first)
                    page = tl.maximum(page, tl.max(tl.where(same, tl.load(at + 3, mask=listed, other=-1), -1), 0).to(tl.int64))
            if page >= 0:
                tl.store(write_ptr + page * (CHANNELS * SIZE) + square, state, mask=in_square)
    if FUNCTIONAL:
        tl.store(write_ptr + target * (CHANNELS * SIZE) + square, state, mask=in_square)


def launch_scan(inputs: ScanInputs, access: StateAccess, functional: bool) -> Tensor:
    """The outputs of packed rows (total, channels).

    functional: the final state of each sequence goes to its page in `targets`
    """
    x, dt = (with_unit_stride(y) for y in (inputs.x, inputs.dt))
    b, c, z = (y if y is None else with_unit_stride(y) for y in (inputs.b, inputs.c, inputs.z))
    a = None if inputs.a is None else inputs.a.contiguous()
    total, channels = x.shape
    batch = access.batch
    out = x.new_empty(total, channels)
    around = (access.read, access.write, *(*access.tails, None, None, None)[:3])
    steps = (batch.sources, batch.targets, batch.slots, batch.cu_seqlens, batch.seqused_k, batch.chunks)
    tensors = (x, dt, a, b, c, inputs.d, z, inputs.steps.bias, *around, *steps, out)
    ring = access.tails[0].shape[1] if access.tails else 1
    size = 1 if a is None else a.shape[1]
    strides = tuple(0 if y is None else y.stride(0) for y in (x, dt, b, c, z))
    low, high = inputs.steps.limit
    key = (
        "scan",
        len(batch.sources),
        len(batch.chunks),
        (channels, size, batch.page_size, ring, functional),
        (inputs.steps.softplus, low, high),
        strides,
        tuple([None if y is None else y.dtype for y in tensors]),
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        block_n = power_of_2(size)
        block_c = min(power_of_2(channels), max(1, 256 // block_n))
        launch = Launch(
            _scan_channels,
            len(batch.sources) * -(-channels // block_c),
            varying=(len(batch.sources), len(batch.chunks), float(low), float(high)),
            strides=strides,
            fixed=(
                channels,
                size,
                batch.page_size,
                ring,
                FEW_ROWS,
                inputs.steps.softplus,
                functional,
                SCAN_BLOCK,
                block_c,
                block_n,
            ),
            options={"num_warps": 4},
        )
        run = PLANS.add(key, launch)
    run(tensors, total)
    return out
