"""Pieces of sequences that the device finds by itself, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fa_serve.ops.linear_attention.listing import SequenceList, list_sequences
from fa_serve.ops.linear_attention.problem import Sequences

CPU = torch.device("cpu")


def listed(lengths: list[int], behind: int = 0) -> SequenceList:
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    found = list_sequences(Sequences(1, sum(lengths) + behind, bounds), sum(lengths) + behind, CPU)
    assert torch.equal(found.bounds, bounds)
    assert found.lengths.tolist() == lengths
    return found


def test_packed_sequences() -> None:
    """Lengths 70, 0, 64 and 1: the last piece of each stores its state. A sequence without rows has none."""
    found = listed([70, 0, 64, 1], behind=5)
    assert found.pieces.dtype == torch.int32
    assert found.pieces[:4].tolist() == [[0, 64, 0, -1], [64, 6, 0, 0], [70, 64, 2, 2], [134, 1, 3, 3]]
    assert len(found.pieces) == 140 // 64 + 4
    assert found.pieces[4:, 1].tolist() == [0, 0]
    assert found.own.tolist() == [0, 1, 2, 3]
    assert found.none.tolist() == [-1] * 4


def test_dense_sequences() -> None:
    found = list_sequences(Sequences(3, 100), 300, CPU)
    assert found.bounds.tolist() == [0, 100, 200, 300]
    assert found.lengths.tolist() == [100] * 3
    assert found.pieces[:3].tolist() == [[0, 64, 0, -1], [64, 36, 0, 0], [100, 64, 1, -1]]
    assert int(found.pieces[:, 1].sum()) == 300


@pytest.mark.parametrize("lengths", [[1] * 9, [65] * 5, [63, 1, 64, 128, 0, 129], [0, 0], [70] * 150, [9000]], ids=str)
def test_there_is_always_room(lengths: list[int]) -> None:
    """More sequences than are read at a time, and more pieces than a program lists, among them."""
    pieces = listed(lengths).pieces
    used = pieces[pieces[:, 1] > 0].tolist()
    assert [row for first, count, _, _ in used for row in range(first, first + count)] == list(range(sum(lengths)))
    assert [page for *_, page in used if page >= 0] == [b for b, length in enumerate(lengths) if length]
