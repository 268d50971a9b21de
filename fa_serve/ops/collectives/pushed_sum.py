"""The kernel of large sums over two ranks: each rank writes its parts into the other's memory while it adds earlier ones.

A program owns whole rows and takes them in parts of one tile. It writes a part of x straight into the other rank's buffer,
over NVLink and without a copy in its own memory, and sets a flag that its counterpart there waits for ("tell" below). It adds a
part two steps later, when the other rank's part has arrived, so that transfers in both directions overlap with the sums.

    write 0, tell 0, write 1, tell 1
    for n in 0, 1, ...:  wait n, write n + 2, read n, add and store n, tell n + 2

The parts are added in the order of ranks in float32 and rounded once, and what follows the sum is the same as in one shot. The
result therefore has the same bits on both ranks, and the same bits as one shot.

**Four slots.** A program has four slots in the other rank's buffer, so part n + 2 takes the slot of part n - 2. `tell n`
follows the read of part n - 2: it says that part n is written, and that part n - 2 has been read. A program writes part n + 2
after it has waited for the other rank's `tell n`, so the slot has been read by then.

**Two halves, which calls use in turn.** The last two parts of a call are read after its last flag, so no flag says that they
have been read. But a rank writes to the same half again two calls later at the earliest. By then it has completed the call in
between, of either kernel, in which it waited for a flag of the other rank. That rank had begun the call in between, and so had
completed the call before it with all its reads. This holds for the whole half, so slots may have another size in each call.

**No deadlock.** A program that waits for part n has already told part n + 1. So if two counterparts both wait, the flag for the
lower of their two parts has been written, and one of them goes on. All programs of both ranks run at once, as in one shot. If a
rank is lost, the host ends the waits in the same way.

x may be the residual or the result: part n of x is written to the other rank and read once more before part n of the result
is stored. A flag holds call * 2^20 + n, which only grows. Left out: who makes the buffers, and which sums take this kernel
(peer_memory.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, power_of_2
from fa_serve.ops.collectives.peer_buffers import MAX_PROGRAMS, PUSHED_BYTES, PUSHED_FIRST_BYTE, PUSHED_FLAGS, Peers
from fa_serve.ops.collectives.primitives import (
    TILE_BYTES,
    count_call,
    fence_before_flags,
    norm_weight,
    per_processor,
    rms,
    sum_options,
    wait_for_flags,
    write_flag,
)

_AHEAD = 2
"""How many parts are written before the first is read."""
_SLOTS = 2 * _AHEAD
"""How many parts of a program the other rank's buffer holds at once."""
_PARTS = tl.constexpr(1 << 20)
"""More parts than a program has in a call."""


@triton.jit
def _slot_ptr(slots, part, local, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, dtype: tl.constexpr):
    """The addresses of the numbers of a part in a rank's buffer.

    slots: address of the slots of this program
    local: the places of the numbers in a slot
    """
    first_ptr = (slots + (part % SLOTS) * SLOT_BYTES).to(tl.pointer_type(dtype))
    return tl.multiple_of(first_ptr, 16) + local


@triton.jit(do_not_specialize=["rows"])
def _pushed_sum(
    x_ptr,
    residual_ptr,
    after_ptr,
    before_ptr,
    out_ptr,
    normed_ptr,
    addresses_ptr,
    calls_ptr,
    alpha,
    after_eps,
    after_offset,
    before_eps,
    before_offset,
    rows,
    stride_r,
    stride_out,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    FIRST_FLAG: tl.constexpr,
    FIRST_BYTE: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    lines = tl.arange(0, TILE_ROWS)
    local = lines[:, None] * BLOCK + cols[None, :]
    parts = (tl.cdiv(rows, TILE_ROWS) - program + programs - 1) // programs

    call = count_call(calls_ptr, program, programs)
    number = call * _PARTS
    own_address = tl.load(addresses_ptr + RANK)
    other_address = tl.load(addresses_ptr + 1 - RANK)
    slots = FIRST_BYTE + (call % 2) * HALF_BYTES + program * (SLOTS * SLOT_BYTES)
    flag_ptr = (other_address + FIRST_FLAG).to(tl.pointer_type(tl.int64)) + program

    for part in tl.static_range(AHEAD):
        if part < parts:
            index = (part * programs + program).to(tl.int64) * TILE_ROWS + lines
            keep = (index < rows)[:, None] & inside[None, :]
            x = tl.load(x_ptr + index[:, None] * WIDTH + cols[None, :], mask=keep)
            tl.store(_slot_ptr(other_address + slots, part, local, SLOTS, SLOT_BYTES, dtype), x, mask=keep)
            fence_before_flags(PTX)
            write_flag(flag_ptr, number + part, PTX)
    if EARLY and after_ptr is not None:
        after = norm_weight(after_ptr, cols, inside, after_offset)
    if EARLY and before_ptr is not None:
        before = norm_weight(before_ptr, cols, inside, before_offset)

    for part in range(parts):
        index = (part * programs + program).to(tl.int64) * TILE_ROWS + lines
        keep = (index < rows)[:, None] & inside[None, :]
        place = index[:, None] * WIDTH
        # the rows of a part past the last one are outside the message, so they are masked
        next_index = index + AHEAD * programs * TILE_ROWS
        next_keep = (next_index < rows)[:, None] & inside[None, :]
        next_ptr = (x_ptr + next_index[:, None] * WIDTH) + cols[None, :]
        residual_place = index[:, None] * stride_r
        if EARLY:
            own = tl.load((x_ptr + place) + cols[None, :], mask=keep, other=0.0)
            following = tl.load(next_ptr, mask=next_keep)
            if residual_ptr is not None:
                residual = tl.load((residual_ptr + residual_place) + cols[None, :], mask=keep, other=0.0)
        wait_for_flags(own_address + FIRST_FLAG, calls_ptr + 1, number + part, program, 1, 2)
        if not EARLY:
            following = tl.load(next_ptr, mask=next_keep)
        tl.store(_slot_ptr(other_address + slots, part + AHEAD, local, SLOTS, SLOT_BYTES, dtype), following, mask=next_keep)
        if not EARLY:
            own = tl.load((x_ptr + place) + cols[None, :], mask=keep, other=0.0)
        # not from L1, which does not see what other GPUs write
        received_ptr = _slot_ptr(own_address + slots, part, local, SLOTS, SLOT_BYTES, dtype)
        received = tl.load(received_ptr, mask=keep, other=0.0, cache_modifier=".cg")
        total = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
        if RANK == 0:
            total += own.to(tl.float32)
            total += received.to(tl.float32)
        else:
            total += received.to(tl.float32)
            total += own.to(tl.float32)
        if after_ptr is not None:
            if not EARLY:
                after = norm_weight(after_ptr, cols, inside, after_offset)
            total = rms(total, after, after_eps, WIDTH)
        else:
            total *= alpha
        if residual_ptr is not None:
            if not EARLY:
                residual = tl.load((residual_ptr + residual_place) + cols[None, :], mask=keep, other=0.0)
            total += residual.to(tl.float32)
        result = total.to(out_ptr.dtype.element_ty)
        tl.store((out_ptr + index[:, None] * stride_out) + cols[None, :], result, mask=keep)
        if before_ptr is not None:
            if not EARLY:
                before = norm_weight(before_ptr, cols, inside, before_offset)
            normed = rms(result.to(tl.float32), before, before_eps, WIDTH)
            tl.store((normed_ptr + place) + cols[None, :], normed.to(normed_ptr.dtype.element_ty), mask=keep)
        if part + AHEAD < parts:
            fence_before_flags(PTX)
            write_flag(flag_ptr, number + part + AHEAD, PTX)


def plan_pushed_sum(x: Tensor, peers: Peers, out: Tensor, residual: Tensor | None, numbers: tuple[float, ...]) -> Launch:
    """The launch of `launch_all_reduce` with `pushed`. numbers: alpha, and eps and offset of both norms"""
    rows, width = x.shape
    block = power_of_2(width)
    row_bytes = block * x.element_size()
    tile_rows = max(1, TILE_BYTES // row_bytes)
    slot_bytes = tile_rows * row_bytes
    room = PUSHED_BYTES // (_SLOTS * slot_bytes)
    programs = min(-(-rows // tile_rows), peers.processors * per_processor(row_bytes), room, MAX_PROGRAMS)
    stride_r = 0 if residual is None else residual.stride(0)
    arch = spec.arch_of(x.device)
    pdl = spec.has_programmatic_launch(arch)
    # what does not come from the other rank is loaded before the wait, if there are enough registers for it
    early = row_bytes <= 2 * TILE_BYTES
    sizes = (peers.rank, width, block, tile_rows, _AHEAD, _SLOTS, slot_bytes)
    places = (PUSHED_FLAGS, PUSHED_FIRST_BYTE, PUSHED_BYTES)
    return Launch(
        _pushed_sum,
        programs,
        varying=(*numbers, rows),
        strides=(stride_r, out.stride(0)),
        fixed=(*sizes, *places, early, arch >= 70, pdl),
        options=sum_options(arch, tile_rows * block, row_bytes),
    )
