"""Rows of several tensors as one: sizes, and tensors that cannot be copied so."""

from __future__ import annotations

import pytest
import torch

from fa_serve import ops


def test_rows_go_there_and_back() -> None:
    keys = torch.randn(6, 16, 2, 8)
    values = torch.randn(6, 2, 16, 4).transpose(1, 2)
    table = ops.RowTable([keys, values])
    assert table.num_words * 8 == ops.row_bytes([keys, values]) == 4 * 16 * 2 * 12
    packed = torch.empty(2, table.num_words, dtype=torch.int64)
    ops.move_rows(table, torch.tensor([5, 1]), packed, pack=True)
    expected = keys[5].clone(), values[1].clone()
    keys.zero_()
    values.zero_()
    ops.move_rows(table, torch.tensor([5, 1]), packed, pack=False)
    assert torch.equal(keys[5], expected[0])
    assert torch.equal(values[1], expected[1])
    assert keys[:5].count_nonzero() == keys[1].count_nonzero()


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 8, 8)[:, :, :4]], ids=["6 bytes", "not dense"]
)
def test_a_row_must_be_one_range_of_words(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a row must be contiguous in memory and a multiple of 8 bytes long"):
        ops.RowTable([x])
