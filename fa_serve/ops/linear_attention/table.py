"""The kernels of linear attention, and which of them computes a call: the first row of the table that fits.

    asked = Recurrence(kind="delta", dim=128, dim_v=128, dtype=torch.bfloat16, rows="few", page_size=16)
    choice = select_recurrence_kernel(asked)
    choice.kernel.name                     # "few_rows"
    choice.tile                            # what the kernel is launched with

A step of the engine is two recurrences: its sequences with few rows, and its pieces of chunks. Each kernel skips the sequences
of the other by their lengths, which it reads on the device. This module imports no Triton, so that `fa-serve info` runs
anywhere. Left out: how a call is launched (run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_serve.ops.linear_attention.problem import Recurrence
from fa_serve.ops.linear_attention.tiles import few_rows_tile, pieces_tile, without_tile

MAX_DIM = 256
"""The most numbers of a key: a program keeps a key in registers."""
MAX_PAGE = 64
"""The most tokens of a page: each row reads the tail of the page again."""


@dataclass(frozen=True)
class RecurrenceKernel:
    """A row of the table.

    name:     name of the row
    about:    what it computes, in a few words
    launches: the names of its kernels' functions, or of PyTorch's
    kinds:    the kinds of `Recurrence` that it computes
    rows:     "few", "pieces", or both
    refuses:  returns the reason why it does not compute a recurrence of one of these kinds, or None
    tile:     returns the tile that it is launched with
    """

    name: str
    about: str
    launches: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: tuple[str, ...]
    refuses: Callable[[Recurrence], str | None]
    tile: Callable[[Recurrence], Any]

    def fits(self, recurrence: Recurrence) -> str | None:
        """None if the kernel computes the recurrence, else the reason why it does not."""
        if recurrence.kind not in self.kinds:
            return f"computes recurrences of kind {' or '.join(self.kinds)}, got {recurrence.kind}"
        if recurrence.rows not in self.rows:
            return f"takes rows={' or '.join(map(repr, self.rows))}, got {recurrence.rows!r}"
        return self.refuses(recurrence)


@dataclass(frozen=True)
class RecurrenceChoice:
    """What computes a recurrence.

    tile:        what the kernel is launched with
    passed_over: the rows of the table before it, and why they do not compute it
    """

    kernel: RecurrenceKernel
    tile: Any
    passed_over: Mapping[str, str]


def refuses_kernel(recurrence: Recurrence) -> str | None:
    """Why no kernel of this room computes the recurrence, or None."""
    if not recurrence.triton:
        return "needs Triton, which does not run on the device"
    if recurrence.dtype.itemsize > 4:
        return f"computes in float32, got {recurrence.dtype}"
    return None


def refuses_matrix(recurrence: Recurrence) -> str | None:
    """Why the kernels of states that are matrices do not compute the recurrence, or None."""
    if recurrence.dim > MAX_DIM:
        return f"takes keys of up to {MAX_DIM} numbers, got {recurrence.dim}"
    if recurrence.page_size > MAX_PAGE:
        return f"takes pages of up to {MAX_PAGE} tokens, got {recurrence.page_size}"
    return refuses_kernel(recurrence)


def refuses_scan(recurrence: Recurrence) -> str | None:
    """Why the kernel of states that are vectors does not compute the recurrence, or None."""
    if recurrence.page_size % 16 > 0:
        return f"takes pages whose size is a multiple of 16 tokens, got {recurrence.page_size}"
    return refuses_kernel(recurrence)


def refuses_no_recurrence(recurrence: Recurrence) -> None:
    """None: PyTorch computes every recurrence."""


RECURRENCE_KERNELS: tuple[RecurrenceKernel, ...] = (
    RecurrenceKernel(
        name="few_rows",
        about="up to 16 rows after a state page and a tail",
        launches=("_compute_few_rows",),
        kinds=("delta", "linear"),
        rows=("few",),
        refuses=refuses_matrix,
        tile=few_rows_tile,
    ),
    RecurrenceKernel(
        name="pieces",
        about="chunks of prompts, in pieces of 64 rows",
        launches=("_sum_gates", "_prepare_pieces", "_pass_states", "_compute_outputs"),
        kinds=("delta", "linear"),
        rows=("pieces",),
        refuses=refuses_matrix,
        tile=pieces_tile,
    ),
    RecurrenceKernel(
        name="convolution",
        about="short convolutions with their activation",
        launches=("_causal_conv_of_row", "_causal_conv", "_store_conv_states"),
        kinds=("conv",),
        rows=("few", "pieces"),
        refuses=refuses_kernel,
        tile=without_tile,
    ),
    RecurrenceKernel(
        name="scans",
        about="states that are vectors of channels",
        launches=("_scan_channels",),
        kinds=("scan", "lru"),
        rows=("few", "pieces"),
        refuses=refuses_scan,
        tile=without_tile,
    ),
    RecurrenceKernel(
        name="torch",
        about="PyTorch",
        launches=("torch.matmul",),
        kinds=("delta", "linear", "scan", "lru", "conv"),
        rows=("few", "pieces"),
        refuses=refuses_no_recurrence,
        tile=without_tile,
    ),
)
"""The first row that fits computes a recurrence."""


def select_recurrence_kernel(recurrence: Recurrence) -> RecurrenceChoice:
    """The first row of the table that fits, which computes the recurrence."""
    passed_over = dict[str, str]()
    for kernel in RECURRENCE_KERNELS:
        reason = kernel.fits(recurrence)
        if reason is None:
            return RecurrenceChoice(kernel, kernel.tile(recurrence), passed_over)
        passed_over[kernel.name] = reason
    raise AssertionError(f"no kernel takes {recurrence}, although the last row of the table must take every recurrence")
