"""The kernel of the one-shot all-reduce: each rank reads the parts of all ranks and adds them up, in one launch.

A program owns whole rows. It copies this rank's part of them into a buffer that the other ranks can read, tells its counterpart
on every rank, waits until all counterparts have told it, and reads all parts. They are added in the order of ranks in float32,
so every rank has the same bits. Then the sum is normalised, multiplied or added to the residual stream, and the result is
normalised for the next layer, as far as it is asked for.

**One barrier for a call.** The buffer has two halves, which calls use in turn. A rank writes to a half again in its second
call from now. It gets there only after all ranks have told it that they have begun their next call, and so have ended this one.

**Numbers of calls instead of resets.** A flag holds the number of the last call that its writer has begun, which only grows.
The device counts the calls, so a CUDA graph can be replayed. If a rank is lost, the host ends the wait by a word of this rank's
own memory, which no other rank overwrites.

Programs wait for programs of other GPUs, so all of them must fit on a GPU at once: there are at most `per_processor` for each
multiprocessor. Left out: who makes the buffers, and which sums take this way (one_shot.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import Launch, launch_options, power_of_2
from fa_serve.backends.plan import PLANS
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.ops.one_shot import FLAG_BYTES, MAX_BYTES, MAX_PROGRAMS, Peers
from fa_serve.ops.ops_backend import Norm

_TILE_BYTES = 8192
"""What a program adds up at once, unless a row is longer."""
_CALL = tl.constexpr(2 * MAX_PROGRAMS)
"""What a call adds to the count, more than there are programs."""


@triton.jit
def _tell_and_wait(
    addresses_ptr,
    passed_ptr,
    call,
    program,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Tell the same program of every rank that this part is written, and wait until all of them have told this one."""
    tl.debug_barrier()  # one thread tells for all
    if PTX:
        # one fence for all flags: each release would wait until the flag before it has reached its GPU
        tl.inline_asm_elementwise(
            """{
                .reg .pred %first;
                .reg .u32 %thread;
                mov.u32 %thread, %tid.x;
                setp.eq.u32 %first, %thread, 0;
                @%first fence.acq_rel.sys;
                mov.u32 $0, 0;
            }""",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for rank in tl.static_range(RANKS):
        flag_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)) + program * RANKS + RANK
        if PTX:
            # a plain store, because atomics on the memory of another GPU need more than peer access
            tl.inline_asm_elementwise(
                """{
                    .reg .pred %first;
                    .reg .u32 %thread;
                    mov.u32 %thread, %tid.x;
                    setp.eq.u32 %first, %thread, 0;
                    @%first st.relaxed.sys.global.u64 [$1], $2;
                    mov.u32 $0, 0;
                }""",
                "=r,l,l",
                [flag_ptr, call],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.atomic_xchg(flag_ptr, call, sem="release", scope="sys")
    # one flag of each rank and, in the lane behind them, the word that ends the wait if a rank is lost
    lanes = tl.arange(0, PADDED)
    flags = tl.load(addresses_ptr + RANK) + 8 * (program * RANKS + lanes)
    words_ptr = tl.where(lanes < RANKS, flags, (passed_ptr + program).to(tl.int64)).to(tl.pointer_type(tl.int64))
    least = call - 1
    while least < call:
        # an atomic that adds nothing is a load with acquire semantics
        seen = tl.atomic_add(words_ptr, 0, mask=lanes <= RANKS, sem="acquire", scope="sys")
        least = tl.min(tl.where(lanes < RANKS, seen, call), 0)
        least = tl.maximum(least, tl.max(tl.where(lanes == RANKS, seen, 0), 0))
    tl.debug_barrier()


@triton.jit
def _weight(weight_ptr, cols, inside, offset):
    return tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset


@triton.jit
def _rms(x, weight, eps, WIDTH: tl.constexpr):
    """Rows [rows, BLOCK] in float32, which are 0 beyond WIDTH, normalised."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight[None, :]


@triton.jit
def _one_shot_all_reduce(
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
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIRST_BYTE: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pointer: tl.constexpr = tl.pointer_type(x_ptr.dtype.element_ty)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    index = program * TILE_ROWS + tl.arange(0, TILE_ROWS)
    keep = (index < rows)[:, None] & inside[None, :]
    place = index[:, None] * WIDTH + cols[None, :]
    own_address = tl.load(addresses_ptr + RANK)
    x = tl.load(x_ptr + place, mask=keep)  # on its way while calls are counted

    # the shares of all programs add up to _CALL, so each finds the number of the calls before, in any order
    share = tl.where(program == 0, _CALL + 1 - programs, 1).to(tl.int64)
    call = tl.atomic_add(calls_ptr, share, sem="relaxed") // _CALL + 1
    half = FIRST_BYTE + (call % 2) * HALF_BYTES
    part_ptr = tl.multiple_of((own_address + half).to(pointer), 16)
    tl.store(part_ptr + place, x, mask=keep)
    for first in range((program + programs) * TILE_ROWS, rows, programs * TILE_ROWS):
        index = first + tl.arange(0, TILE_ROWS)
        keep = (index < rows)[:, None] & inside[None, :]
        place = index[:, None] * WIDTH + cols[None, :]
        tl.store(part_ptr + place, tl.load(x_ptr + place, mask=keep), mask=keep)
    if EARLY and after_ptr is not None:
        after = _weight(after_ptr, cols, inside, after_offset)
    if EARLY and before_ptr is not None:
        before = _weight(before_ptr, cols, inside, before_offset)

    _tell_and_wait(addresses_ptr, calls_ptr + 1, call, program, RANK, RANKS, PADDED, PTX)

    for first in range(program * TILE_ROWS, rows, programs * TILE_ROWS):
        index = first + tl.arange(0, TILE_ROWS)
        keep = (index < rows)[:, None] & inside[None, :]
        place = index[:, None] * WIDTH + cols[None, :]
        total = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            part_ptr = tl.multiple_of((tl.load(addresses_ptr + rank) + half).to(pointer), 16)
            # not from L1, which does not see what other GPUs write
            total += tl.load(part_ptr + place, mask=keep, other=0.0, cache_modifier=".cg").to(tl.float32)
        if after_ptr is not None:
            if not EARLY:
                after = _weight(after_ptr, cols, inside, after_offset)
            total = _rms(total, after, after_eps, WIDTH)
        else:
            total *= alpha
        wide = index[:, None].to(tl.int64)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + wide * stride_r + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        result = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide * stride_out + cols[None, :], result, mask=keep)
        if before_ptr is not None:
            if not EARLY:
                before = _weight(before_ptr, cols, inside, before_offset)
            normed = _rms(result.to(tl.float32), before, before_eps, WIDTH)
            tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=keep)


_NO_NORM = (None, 0.0, 0.0)


def launch_one_shot(
    x: Tensor,
    peers: Peers,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    after: Norm | None = None,
    before: Norm | None = None,
    alpha: float = 1.0,
) -> Tensor | None:
    """Write residual + alpha * sum to `out`, or residual + the sum normalised with `after`. One launch.

    Returns `out` normalised with `before`, if it is given. Every rank calls it with the same shapes, in the same order.

    x:             (rows, width), this rank's part, contiguous, at most MAX_BYTES and MAX_WIDTH
    out, residual: (rows, width) of the same dtype, rows contiguous; they may be x or each other
    """
    after_weight, after_eps, after_offset = after or _NO_NORM
    before_weight, before_eps, before_offset = before or _NO_NORM
    normed = None if before is None else torch.empty_like(x)
    key = (
        "one_shot_all_reduce",
        x.shape,
        x.dtype,
        None if residual is None else residual.stride(0),
        out.stride(0),
        None if after is None else (after.weight.dtype, after_eps, after_offset),
        None if before is None else (before.weight.dtype, before_eps, before_offset),
        alpha,
        peers.rank,
        peers.size,
        peers.processors,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        numbers = (float(alpha), after_eps, after_offset, before_eps, before_offset)
        run = PLANS.add(key, _plan(x, peers, out, residual, numbers))
    run((x, residual, after_weight, before_weight, out, normed, peers.addresses, peers.calls))
    return normed


def per_processor(row_bytes: int) -> int:
    """How many programs with rows of up to so many bytes, a power of two, fit on a multiprocessor at once."""
    return 2 if row_bytes <= _TILE_BYTES else 1


def _plan(x: Tensor, peers: Peers, out: Tensor, residual: Tensor | None, numbers: tuple[float, ...]) -> Launch:
    rows, width = x.shape
    block = power_of_2(width)
    row_bytes = block * x.element_size()
    most = min(peers.processors * per_processor(row_bytes), MAX_PROGRAMS)
    tile_rows = min(power_of_2(-(-rows // most)), max(1, _TILE_BYTES // row_bytes))
    programs = min(-(-rows // tile_rows), most)
    stride_r = 0 if residual is None else residual.stride(0)
    arch = spec.arch_of(x.device)
    pdl = arch >= 90
    num_warps = min(16, max(1, tile_rows * block // 256))
    options = launch_options(pdl, num_warps)
    if arch >= 70 and num_warps == 16:
        options["maxnreg"] = 128 // per_processor(row_bytes)  # with which the programs share the 65,536 registers
    # weights are loaded before the wait, unless the registers are needed for the rows
    early = block <= 8192
    sizes = (peers.rank, peers.size, power_of_2(peers.size + 1), width, block, tile_rows, FLAG_BYTES, MAX_BYTES)
    return Launch(
        _one_shot_all_reduce,
        programs,
        varying=numbers,
        strides=(rows, stride_r, out.stride(0)),
        fixed=(*sizes, early, arch >= 70, pdl),
        options=options,
    )
