"""Tiles of the kernels of linear attention, which depend only on the `Recurrence`. This module imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.linear_attention.problem import Recurrence

MIN_COLUMNS = 64
"""The fewest columns of the matrices that `_prepare_pieces` multiplies by. With 16 or 32 columns and 4 warps, 16-bit inputs
gave wrong numbers or an illegal access on Hopper under Triton 3.6, for a reason that is not known. With 8 warps, or with 64
columns, they are right."""
OUTPUTS_IN_LOOP = 0.45
"""The loop over pieces computes the outputs only if it has at least this many programs per multiprocessor. 64 and 512 programs
on 132 multiprocessors were measured. Fewer leave multiprocessors idle, which a separate kernel after the loop would use."""
CHANNEL_OUTPUTS_IN_LOOP = 2
"""The same for gates by channel, for which fewer programs were not measured."""


class FewRowsTile(NamedTuple):
    """block_v columns of the values, in a program of num_warps warps.

    block_t:       rows of a tile of the tail and of the step
    row_registers: the most registers of a thread on NVIDIA GPUs, in a step with one row per sequence; None leaves the number to
                   the compiler
    registers:     the same, in a step in which sequences may have several rows
    """

    block_v: int
    block_t: int
    num_warps: int
    row_registers: int | None = None
    registers: int | None = None


class PiecesTile(NamedTuple):
    """block_v:           columns of the values in a program of the loop over pieces
    stages:            pieces whose operands are loaded at a time, in that loop
    prepare_warps:     warps of a program that prepares a piece
    pass_warps:        warps of a program of the loop
    output_warps:      warps of a program that computes outputs
    outputs_in_loop:   whether the loop computes the outputs, instead of a kernel after it
    prepare_registers: the most registers of a thread that prepares, on NVIDIA GPUs; None leaves the number to the compiler
    slabs:             parts of the table of pieces: the loop over the pieces of one part runs at the same time as the other
                       kernels of the other parts
    """

    block_v: int
    stages: int
    prepare_warps: int
    pass_warps: int
    output_warps: int
    outputs_in_loop: bool
    prepare_registers: int | None = None
    slabs: int = 1

    @property
    def filled_columns(self) -> int:
        """The columns of the values are padded to a multiple of this."""
        return max(self.block_v, MIN_COLUMNS)


def few_rows_tile(recurrence: Recurrence) -> FewRowsTile:
    """With 4 warps on NVIDIA GPUs, a thread keeps 64 numbers of the state. Their loads are in flight while the rest is read.

    With 128 registers a thread, four programs fit on a multiprocessor and have 128 KiB of states in flight; with 168, three
    fit. For one row of each of 64 sequences an H200 needs the same time with both, and for 256 sequences 4% less with 128,
    although the delta rule then spills 128 bytes. Gates by channel would spill 248 bytes, and so would steps of several rows.
    """
    dim = power_of_2(max(recurrence.dim, 16))
    block_v = max(16, min(power_of_2(recurrence.dim_v), 8192 // dim))
    if block_v * dim < 8192:
        return FewRowsTile(block_v, 16, 4)
    return FewRowsTile(block_v, 16, 4, row_registers=168 if recurrence.by_channel else 128, registers=168)


def pieces_tile(recurrence: Recurrence) -> PiecesTile:
    """A program has 64 columns of the values, the fewest rows of a product of wgmma. More sequences mean more programs.

    With 4 warps, keys of 256 numbers and gates by channel would spill, and so would everything on NVIDIA GPUs without wgmma.
    Three stages of 16-bit keys of 128 numbers take 120 KiB of shared memory; two stages fit into 99 KiB. With up to 168
    registers a thread, three programs that prepare pieces fit on a multiprocessor of Hopper. They wait for memory and for their
    products most of the time, so the third program is worth some spilled numbers.

    On Hopper, the loop of the delta rule computes the outputs if it has enough programs per multiprocessor. The states before
    all pieces, and what their rows add, then do not go through memory. Eight sequences of 4,096 rows and 32 heads of 128 take
    an H200 1,225 us this way, and 1,628 us with a kernel after the loop; one sequence of 8,192 rows takes 389 and 474 us. In
    both forms one program fits on a multiprocessor. For other recurrences, three fit without outputs and one with them.
    """
    wide = recurrence.dim > 128 or recurrence.dtype.itemsize > 2
    fits_4_warps = not wide and not recurrence.by_channel and recurrence.arch in (0, 90)
    stages = 1
    if not wide and recurrence.arch:
        stages = 3 if recurrence.arch in (90, 100) else 2
    warps = 4 if fits_4_warps else 8
    block_v = 64
    fits_outputs = recurrence.kind == "delta" and recurrence.arch == 90 and stages == 3
    programs = recurrence.loops * -(-recurrence.dim_v // block_v)
    least = CHANNEL_OUTPUTS_IN_LOOP if recurrence.by_channel else OUTPUTS_IN_LOOP
    return PiecesTile(
        block_v=block_v,
        stages=stages,
        prepare_warps=warps,
        pass_warps=4 if not wide and recurrence.arch in (0, 90) else 8,
        output_warps=4,
        outputs_in_loop=fits_outputs and programs >= least * recurrence.num_sms,
        prepare_registers=168 if fits_4_warps and recurrence.arch == 90 else None,
    )


def without_tile(recurrence: Recurrence) -> None:
    """None: the kernel has only one form."""
