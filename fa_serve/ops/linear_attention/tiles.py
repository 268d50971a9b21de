"""Tiles of the kernels of linear attention, which follow from a recurrence alone. This module imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.linear_attention.problem import FEW_ROWS, Recurrence

MIN_COLUMNS = 64
"""The fewest columns of the matrices that `_prepare_pieces` multiplies by. With 16 or 32 columns and 4 warps, 16-bit inputs
gave wrong numbers or an illegal access on Hopper under Triton 3.6, for a reason that is not known. With 8 warps, or with 64
columns, they are right."""


class FewRowsTile(NamedTuple):
    """block_v columns of the values and block_t rows of the tail and of the step, in a program of num_warps warps."""

    block_v: int
    block_t: int
    num_warps: int


class PiecesTile(NamedTuple):
    """block_v columns of the values, in programs of num_warps warps."""

    block_v: int
    num_warps: int


def few_rows_tile(recurrence: Recurrence) -> FewRowsTile:
    """A program keeps 4096 numbers of the state in registers, and the keys of the tail, with their gates if they differ by
    channel. In 4 warps, 4096 numbers take 32 registers of a thread."""
    dim = power_of_2(max(recurrence.dim, 16))
    block_v = max(16, min(power_of_2(recurrence.dim_v), 4096 // dim))
    block_t = power_of_2(recurrence.page_size - 1 + FEW_ROWS)
    tail = block_t * dim * (2 if recurrence.by_channel else 1)
    return FewRowsTile(block_v, block_t, 8 if tail > 4096 else 4)


def pieces_tile(recurrence: Recurrence) -> PiecesTile:
    """32 columns of the values: a program for each of four blocks of a head of 128, so that few sequences fill a GPU.

    In 4 warps, keys of 256 and gates by channel would spill, and so would everything where NVIDIA GPUs multiply without wgmma.
    """
    fits_4_warps = recurrence.dim <= 128 and not recurrence.by_channel and recurrence.arch in (0, 90)
    return PiecesTile(32, 4 if fits_4_warps else 8)


def without_tile(recurrence: Recurrence) -> None:
    """The tile of what has one form."""
