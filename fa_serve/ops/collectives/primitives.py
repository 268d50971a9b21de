"""Device functions of the kernels that add up the parts of several ranks: flags between GPUs, the count of calls, and norms.

A kernel writes what another rank will read, executes a fence, and writes a number to a flag in the memory of that rank, which
waits for the number. Numbers only grow, so no flag is ever reset. Left out: which memory is written, and in which order
(one_shot.py, pushed_sum.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fa_serve.launching.launch import launch_options
from fa_serve.ops.collectives.peer_buffers import MAX_PROGRAMS
from fa_serve.spec import has_programmatic_launch

TILE_BYTES = 8192
"""How many bytes a program adds up at once, unless a row is longer."""
_CALL = tl.constexpr(2 * MAX_PROGRAMS)
"""What the programs of a call together add to the count. It is larger than the number of programs."""


def per_processor(row_bytes: int) -> int:
    """How many programs with rows of up to `row_bytes`, a power of two, fit on a multiprocessor at once."""
    return 2 if row_bytes <= TILE_BYTES else 1


def sum_options(arch: int, numbers: int, row_bytes: int) -> dict[str, Any]:
    """The launch options of a program that adds up `numbers` at once, such that `per_processor` programs fit."""
    num_warps = min(16, max(1, numbers // 256))
    options = launch_options(has_programmatic_launch(arch), num_warps)
    if arch >= 70 and num_warps == 16:
        options["maxnreg"] = 128 // per_processor(row_bytes)  # so that the programs fit into the 65,536 registers
    return options


@triton.jit
def count_call(calls_ptr, program, programs):
    """The number of this call, from 1. Every program of a call counts once and gets the same number."""
    # the shares of a call's programs add up to _CALL, so in whatever order they count, each finds the number of earlier calls
    share = tl.where(program == 0, _CALL + 1 - programs, 1).to(tl.int64)
    return tl.atomic_add(calls_ptr, share, sem="relaxed") // _CALL + 1


@triton.jit
def fence_before_flags(PTX: tl.constexpr):
    """Order all reads and writes of this program so far before the flags that it writes next, as every GPU sees them."""
    tl.debug_barrier()  # one thread writes the flags for all
    if PTX:
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


@triton.jit
def write_flag(flag_ptr, number, PTX: tl.constexpr):
    """Write a number to a flag, which may be on another GPU. `fence_before_flags` comes first."""
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
            [flag_ptr, number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(flag_ptr, number, sem="release", scope="sys")


@triton.jit
def wait_for_flags(address, passed_ptr, number, program, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Wait until the COUNT flags of this program have reached a number.

    address:    address of the flags of all programs, in this rank's memory
    passed_ptr: the words of all programs; the host ends the wait through them if a rank is lost
    PADDED:     a power of two above COUNT
    """
    # the flags and, in the lane after them, the word
    lanes = tl.arange(0, PADDED)
    flags = address + 8 * (program * COUNT + lanes)
    words_ptr = tl.where(lanes < COUNT, flags, (passed_ptr + program).to(tl.int64)).to(tl.pointer_type(tl.int64))
    least = number - 1
    while least < number:
        # an atomic that adds nothing is a load with acquire semantics
        seen = tl.atomic_add(words_ptr, 0, mask=lanes <= COUNT, sem="acquire", scope="sys")
        least = tl.min(tl.where(lanes < COUNT, seen, number), 0)
        least = tl.maximum(least, tl.max(tl.where(lanes == COUNT, seen, 0), 0))
    tl.debug_barrier()


@triton.jit
def norm_weight(weight_ptr, cols, inside, offset):
    return tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset


@triton.jit
def rms(x, weight, eps, WIDTH: tl.constexpr):
    """Rows [rows, BLOCK] in float32, which are 0 beyond WIDTH, normalised."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight[None, :]
