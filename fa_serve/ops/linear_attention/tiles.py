"""Tiles of the kernels of linear attention, which follow from a recurrence alone. This module imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.linear_attention.problem import Recurrence

MIN_COLUMNS = 64
"""The fewest columns of the matrices that `_prepare_pieces` multiplies by. With 16 or 32 columns and 4 warps, 16-bit inputs
gave wrong numbers or an illegal access on Hopper under Triton 3.6, for a reason that is not known. With 8 warps, or with 64
columns, they are right."""
OUTPUTS_IN_LOOP = 0.45
"""How many programs of the loop over pieces there are for each multiprocessor, at least, if they compute the outputs. 64 and
512 for 132 multiprocessors were measured. Fewer leave multiprocessors idle, which a kernel behind the loop would not."""
CHANNEL_OUTPUTS_IN_LOOP = 2
"""The same for gates by channel, of which few programs were not measured."""


class FewRowsTile(NamedTuple):
    """block_v columns of the values, in a program of num_warps warps.

    block_t:       rows of a tile of the tail and of the step
    row_registers: the most that a thread may have on NVIDIA GPUs, in a step of one row of each sequence; None is the
                   compiler's choice
    registers:     the same in a step of several rows
    """

    block_v: int
    block_t: int
    num_warps: int
    row_registers: int | None = None
    registers: int | None = None


class PiecesTile(NamedTuple):
    """block_v:           columns of the values in a program of the loop over pieces
    stages:            pieces whose operands are loaded at a time, in that loop
    prepare_warps:     of a program that prepares a piece
    pass_warps:        of a program of the loop
    output_warps:      of a program that computes outputs
    outputs_in_loop:   the loop computes the outputs, instead of a kernel behind it
    prepare_registers: the most that a thread of the preparation may have, on NVIDIA GPUs; None is the compiler's choice
    slabs:             parts of the table of pieces: the loop over the pieces of one runs beside the other kernels of the others
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
        """Columns of the values are filled up to a multiple of this."""
        return max(self.block_v, MIN_COLUMNS)


def few_rows_tile(recurrence: Recurrence) -> FewRowsTile:
    """A thread of 4 warps keeps 64 numbers of the state on NVIDIA GPUs, whose loads are on their way while the rest is read.

    With 128 registers four programs fit on a multiprocessor, which have 128 KiB of states on their way, and with 168 three. A
    step of one row of 64 sequences takes an H200 the same with both, and one of 256 sequences 4% less with 128, though the
    delta rule then keeps 128 bytes outside of registers. Gates by channel would keep 248, and several rows as much.
    """
    dim = power_of_2(max(recurrence.dim, 16))
    block_v = max(16, min(power_of_2(recurrence.dim_v), 8192 // dim))
    if block_v * dim < 8192:
        return FewRowsTile(block_v, 16, 4)
    return FewRowsTile(block_v, 16, 4, row_registers=168 if recurrence.by_channel else 128, registers=168)


def pieces_tile(recurrence: Recurrence) -> PiecesTile:
    """64 columns of the values, the fewest rows of a product of wgmma; of more sequences, more programs.

    In 4 warps, keys of 256 and gates by channel would spill, and so would everything where NVIDIA GPUs multiply without wgmma.
    Three stages of keys of 128 in 16 bits are 120 KiB: two stages fit where there are 99 KiB. With up to 168 registers, three
    programs of the preparation fit on a multiprocessor of Hopper. They wait for memory and for their products most of the time,
    so the third is worth some numbers outside of registers.

    On Hopper the loop of the delta rule computes the outputs where enough programs of it come to a multiprocessor. The
    states before all pieces, and what their rows add, do not go through memory then. Eight sequences of 4,096 rows and 32 heads
    of 128 take an H200 1,225 us, and 1,628 by a kernel behind the loop; one of 8,192 rows takes 389 and 474 us. One program is
    on a multiprocessor in both forms; of other recurrences three are there without outputs, and one with them.
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
    """The tile of what has one form."""
