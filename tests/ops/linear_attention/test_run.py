"""Pieces of sequences that the device finds by itself."""

from __future__ import annotations

import torch

from fa_serve.ops.linear_attention.run import piece_table, runs_triton


def test_pieces_of_packed_sequences() -> None:
    """Lengths 70, 0, 64 and 1: the last piece of each stores its state. A sequence without rows has none."""
    table = piece_table(torch.tensor([0, 70, 70, 134, 135], dtype=torch.int32), 140)
    assert table.dtype == torch.int32
    assert table[:4].tolist() == [[0, 64, 0, -1], [64, 6, 0, 0], [70, 64, 2, 2], [134, 1, 3, 3]]
    assert len(table) == 140 // 64 + 4
    assert table[4:, 1].tolist() == [0, 0]


def test_there_is_always_room() -> None:
    for lengths in ([1] * 9, [65] * 5, [63, 1, 64, 128, 0, 129], [0, 0]):
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        table = piece_table(bounds, sum(lengths))
        assert int(table[:, 1].sum()) == sum(lengths)
        assert sorted(table[:, 3][table[:, 3] >= 0].tolist()) == [b for b, length in enumerate(lengths) if length]


def test_where_kernels_run() -> None:
    assert runs_triton(torch.device("cuda", 0))
    assert not runs_triton(torch.device("cpu"))
