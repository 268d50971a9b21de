"""The kernel of the one-shot all-reduce: each rank reads the parts of all ranks and adds them up, in one launch.

A program owns whole rows. It copies this rank's part of them into a buffer that the other ranks can read, and sets a flag for
its counterpart on every rank. It waits until all counterparts have set theirs, and reads all parts. The parts are added in the
order of ranks in float32, so every rank has the same bits. If asked for, the program then normalises the sum or multiplies it
by alpha, adds the residual stream, and normalises the result for the next layer.

**One barrier per call.** The buffer has two halves, which calls use in turn, so a rank writes to the same half again two calls
later. It gets there only after every rank has told it, in the call between, that it has begun that call. A rank that has begun
a call has ended the one before, so nobody still reads the half.

**Call numbers instead of resets.** A flag holds the number of the last call that its writer has begun. It only grows, so it is
never reset. The device counts the calls, so a CUDA graph can be replayed. If a rank is lost, the host ends the waits by writing
to words in this rank's own memory, which no other rank overwrites.

Programs wait for programs of other GPUs, so all programs of a call must run on a GPU at once: there are at most `per_processor`
for each multiprocessor. Left out: the kernel of large sums (pushed_sum.py), who makes the buffers, and which sums take this
kernel (peer_memory.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.collectives.peer_buffers import FLAG_BYTES, MAX_BYTES, MAX_PROGRAMS, Peers
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
from fa_serve.ops.collectives.pushed_sum import plan_pushed_sum
from fa_serve.ops.ops_backend import Norm


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
    x = tl.load(x_ptr + place, mask=keep)  # in flight while the call is counted

    call = count_call(calls_ptr, program, programs)
    half = FIRST_BYTE + (call % 2) * HALF_BYTES
    part_ptr = tl.multiple_of((own_address + half).to(pointer), 16)
    tl.store(part_ptr + place, x, mask=keep)
    for first in range((program + programs) * TILE_ROWS, rows, programs * TILE_ROWS):
        index = first + tl.arange(0, TILE_ROWS)
        keep = (index < rows)[:, None] & inside[None, :]
        place = index[:, None] * WIDTH + cols[None, :]
        tl.store(part_ptr + place, tl.load(x_ptr + place, mask=keep), mask=keep)
    if EARLY and after_ptr is not None:
        after = norm_weight(after_ptr, cols, inside, after_offset)
    if EARLY and before_ptr is not None:
        before = norm_weight(before_ptr, cols, inside, before_offset)

    # one fence for all flags: with a release store for each, a store would wait until the flag before it has reached its GPU
    fence_before_flags(PTX)
    for rank in tl.static_range(RANKS):
        flag_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)) + program * RANKS + RANK
        write_flag(flag_ptr, call, PTX)
    wait_for_flags(tl.load(addresses_ptr + RANK), calls_ptr + 1, call, program, RANKS, PADDED)

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
                after = norm_weight(after_ptr, cols, inside, after_offset)
            total = rms(total, after, after_eps, WIDTH)
        else:
            total *= alpha
        wide = index[:, None].to(tl.int64)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + wide * stride_r + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        result = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide * stride_out + cols[None, :], result, mask=keep)
        if before_ptr is not None:
            if not EARLY:
                before = norm_weight(before_ptr, cols, inside, before_offset)
            normed = rms(result.to(tl.float32), before, before_eps, WIDTH)
            tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=keep)


_NO_NORM = (None, 0.0, 0.0)


def launch_all_reduce(
    x: Tensor,
    peers: Peers,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    after: Norm | None = None,
    before: Norm | None = None,
    alpha: float = 1.0,
    pushed: bool = False,
) -> Tensor | None:
    """Write residual + alpha * sum to `out`, or residual + the sum normalised with `after`. One launch.

    Returns `out` normalised with `before`, if it is given. Every rank calls it with the same shapes, in the same order.

    x:             (rows, width), this rank's part, contiguous; at most MAX_WIDTH columns and, unless pushed, MAX_BYTES bytes
    out, residual: (rows, width) of the same dtype, rows contiguous; they may be x or each other
    pushed:        whether to use the kernel of large sums, which takes two ranks
    """
    after_weight, after_eps, after_offset = after or _NO_NORM
    before_weight, before_eps, before_offset = before or _NO_NORM
    normed = None if before is None else torch.empty_like(x)
    key = (
        "pushed_sum" if pushed else "one_shot_all_reduce",
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
        plan = plan_pushed_sum if pushed else _plan_one_shot
        run = PLANS.add(key, plan(x, peers, out, residual, numbers))
    run((x, residual, after_weight, before_weight, out, normed, peers.addresses, peers.calls))
    return normed


def _plan_one_shot(x: Tensor, peers: Peers, out: Tensor, residual: Tensor | None, numbers: tuple[float, ...]) -> Launch:
    rows, width = x.shape
    block = power_of_2(width)
    row_bytes = block * x.element_size()
    most = min(peers.processors * per_processor(row_bytes), MAX_PROGRAMS)
    tile_rows = min(power_of_2(-(-rows // most)), max(1, TILE_BYTES // row_bytes))
    programs = min(-(-rows // tile_rows), most)
    stride_r = 0 if residual is None else residual.stride(0)
    arch = spec.arch_of(x.device)
    pdl = spec.has_programmatic_launch(arch)
    # the weights of norms are loaded before the wait, unless the rows need the registers
    early = block <= 8192
    sizes = (peers.rank, peers.size, power_of_2(peers.size + 1), width, block, tile_rows, FLAG_BYTES, MAX_BYTES)
    return Launch(
        _one_shot_all_reduce,
        programs,
        varying=numbers,
        strides=(rows, stride_r, out.stride(0)),
        fixed=(*sizes, early, arch >= 70, pdl),
        options=sum_options(arch, tile_rows * block, row_bytes),
    )
