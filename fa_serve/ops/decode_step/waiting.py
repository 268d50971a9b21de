"""Device functions of the persistent kernel: how programs wait for each other, and requests for weights ahead of their use.

Each phase has one counter in global memory. A program adds 1 when all that it writes in a phase is written, and nobody resets a
counter: the phase of the n-th layer that this memory has seen is complete when its counter is n times the number of programs.
How many layers that were before a launch, each program reads in a separate word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.decode_step.layout import PHASE_STRIDE

_STRIDE = tl.constexpr(PHASE_STRIDE)


@triton.jit
def arrive(counters_ptr, phase: tl.constexpr):
    """Tell that all stores of this program up to here are done."""
    tl.debug_barrier()  # one thread adds for all
    tl.atomic_add(counters_ptr + phase * _STRIDE, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_phase(counters_ptr, phase: tl.constexpr, target):
    """Wait until a counter has reached a number. What other programs have stored before they arrived may be read then."""
    seen = target - 1
    while seen < target:
        # an atomic that adds nothing is a load with acquire semantics
        seen = tl.atomic_add(counters_ptr + phase * _STRIDE, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def request_ahead(ptr, numbers, var: tl.constexpr):
    """Request this many weights from ptr on into the L2 cache, at most `ahead_bytes`. Each warp requests one stretch."""
    if var.bulk and var.ahead_bytes > 0:
        item: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        total = tl.minimum(numbers * item, var.ahead_bytes)
        stretch = (total + 16 * var.num_warps - 1) // (16 * var.num_warps) * 16
        tl.inline_asm_elementwise(
            """{
                .reg .pred %first, %some;
                .reg .u32 %thread, %lane;
                .reg .s32 %begin, %size;
                .reg .s64 %address;
                mov.u32 %thread, %tid.x;
                and.b32 %lane, %thread, 31;
                setp.eq.u32 %first, %lane, 0;
                shr.u32 %thread, %thread, 5;
                mul.lo.s32 %begin, %thread, $3;
                sub.s32 %size, $2, %begin;
                min.s32 %size, %size, $3;
                and.b32 %size, %size, -16;
                setp.gt.and.s32 %some, %size, 0, %first;
                cvt.s64.s32 %address, %begin;
                add.s64 %address, %address, $1;
                @%some cp.async.bulk.prefetch.L2.global [%address], %size;
                mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [ptr.to(tl.int64), total, stretch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
