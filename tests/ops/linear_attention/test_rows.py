"""Groups of sequences that are computed together."""

from __future__ import annotations

import torch

from fa_serve.ops.linear_attention.problem import Sequences, StateBatch
from fa_serve.ops.linear_attention.rows import packed_groups, step_groups


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_few_rows_are_computed_together_and_equal_lengths() -> None:
    """Sequences without rows are in no group."""
    bounds = ints(0, 1, 1, 17, 57, 60, 100, 141)
    groups = packed_groups(Sequences(1, 150, bounds), bounds.device)
    assert [group.sequences.tolist() for group in groups] == [[0, 2, 4], [3, 5], [6]]
    assert groups[0].rows.shape == (3, 16)
    assert groups[0].lengths.tolist() == [1, 16, 3]
    dense = packed_groups(Sequences(3, 20), bounds.device)
    assert [group.rows[:, 0].tolist() for group in dense] == [[0, 20, 40]]


def test_rows_go_there_and_back() -> None:
    """Rows that fill up are zeros, whatever stands in the row that is read in their place."""
    (group,) = packed_groups(Sequences(1, 7, ints(0, 2, 5)), torch.device("cpu"))
    x = torch.tensor([torch.nan, 1, 2, 3, 4, 5, 6])
    assert group.gather(x)[0, 2:].tolist() == [0]
    assert group.gather(x)[1].tolist() == [2, 3, 4]
    out = group.scatter(torch.zeros(7), torch.tensor([[7.0, 8, 9], [10, 11, 12]]))
    assert out.tolist() == [7, 8, 10, 11, 12, 0, 0]


def test_where_a_step_begins_and_what_it_stores() -> None:
    """Pages of 4. A sequence of padding is left out, a target is of the last page that fills, a chunk's pages are in pieces."""
    batch = StateBatch(
        page_size=4,
        sources=ints(3, -1, 5, -1),
        targets=ints(7, -1, 8, -1),
        slots=torch.tensor([2, 0, 1, 0]),
        cu_seqlens=ints(0, 6, 7, 9, 29),
        seqused_k=ints(9, 0, 7, 24),
        chunks=ints(9, 8, 3, 6, 17, 12, 3, -1, 0, 0, -1, 2).view(3, 4),
    )
    few, chunk = step_groups(batch)
    assert few.sequences.tolist() == [0, 2]
    assert few.first.tolist() == [3, 5]
    assert few.start.tolist() == [0, 4]
    assert few.in_tail.tolist() == [[True, True, True], [True, False, False]]
    assert few.stores == [(0, 8, 7)]  # the page of the other sequence is not full
    assert chunk.stores == [(0, 12, 6)]
    assert chunk.tail_positions.shape == (1, 0)
