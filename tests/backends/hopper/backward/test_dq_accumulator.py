"""`hopper.backward.dq_accumulator`: what a warpgroup adds to the sum stands where the conversion looks for it."""

from __future__ import annotations

import pytest
import torch
from hopper_emulator import emulated, kernel_definitions, run_in_block

from fa_serve.backends.hopper.backward.dq_accumulator import convert_launch


def _sum_of(dq: torch.Tensor, columns: int = 64) -> torch.Tensor:
    """(heads, rows, width), as the warpgroups store it: each square twice, because additions must add up.

    columns: that a warpgroup adds at once, one square or two
    """
    add_to_dq = kernel_definitions({})["add_to_dq"]
    heads, rows, width = dq.shape
    total = torch.zeros(heads, rows, width)
    for head in range(heads):
        for row in range(0, rows, 64):
            for column in range(0, width, columns):
                square = dq[head, row : row + 64, column : column + columns]
                where = (head * rows + row) * width + 64 * column
                for _ in range(2):
                    run_in_block(add_to_dq, total, where, square)
    return total


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (40, 64), (128, 128), (96, 128)])
def test_the_sum_becomes_the_gradient(head_dim: int, width: int) -> None:
    heads = 2
    seqlen = 100
    rows = 128
    dq = torch.randn(heads, rows, width, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(1, seqlen, heads, head_dim)
    launch = convert_launch((1, heads, head_dim), width, seqlen, rows, False, 0.5)
    with emulated():
        launch((_sum_of(dq), found, None))
    torch.testing.assert_close(found[0], dq[:, :seqlen, :head_dim].transpose(0, 1))


@pytest.mark.parametrize(("head_dim", "width"), [(136, 192), (192, 192), (200, 256), (256, 256)])
def test_wide_sums_become_gradients(head_dim: int, width: int) -> None:
    """The kernel for wide heads adds parts of 128 columns and of the rest."""
    heads = 2
    dq = torch.randn(heads, 128, width, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(1, 100, heads, head_dim)
    launch = convert_launch((1, heads, head_dim), width, 100, 128, False, 0.5)
    with emulated():
        launch((_sum_of(dq, 128), found, None))
    torch.testing.assert_close(found[0], dq[:, :100, :head_dim].transpose(0, 1))


def test_packed_sequences_have_padded_statistics() -> None:
    """The statistics of a sequence that starts at row r and has number n start at r + 128 n, rounded down to 128."""
    dq = torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
    found = torch.full((220, 1, 64), 7.0)
    launch = convert_launch((3, 1, 64), 64, 130, 512, True, 0.5)
    with emulated():
        launch((_sum_of(dq), found, cu_seqlens))
    torch.testing.assert_close(found[:70, 0], dq[0, :70])
    torch.testing.assert_close(found[70:200, 0], dq[0, 256:386])
    assert (found[200:] == 7.0).all()


def test_no_rows_need_no_launch() -> None:
    assert convert_launch((1, 2, 64), 64, 0, 0, False, 1.0) is None
