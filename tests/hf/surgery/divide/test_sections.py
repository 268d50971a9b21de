"""Which rows and columns a rank keeps, of a weight and of what belongs to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fa_serve.hf.surgery.divide.sections import Cut, RankPart, Section, equal_sections, rank_part, set_rank_part

HEADS = Cut(0, (Section(16, 4), Section(8, 2, shared=True), Section(4, 1, shared=True)))
"""4 heads of 4 rows, then 2 heads, then one that all ranks share."""


@pytest.mark.parametrize(
    ("rank", "size", "ranges"),
    [
        (0, 2, [(0, 8), (16, 4), (24, 4)]),
        (1, 2, [(8, 8), (20, 4), (24, 4)]),
        (1, 4, [(4, 4), (16, 4), (24, 4)]),
        (3, 4, [(12, 4), (20, 4), (24, 4)]),
    ],
)
def test_ranks_keep_whole_heads_and_share_few(rank: int, size: int, ranges: list[tuple[int, int]]) -> None:
    assert HEADS.ranges(rank, size) == ranges
    part = RankPart(HEADS, rank, size)
    assert part.whole == 28
    rows = [row for start, count in ranges for row in range(start, start + count)]
    assert part.kept(torch.arange(28), 0).tolist() == rows
    assert part.kept(torch.arange(56).view(2, 28), 1).tolist() == [rows, [28 + row for row in rows]]


def test_what_divides() -> None:
    assert [Section(12, 4).divides(size) for size in (2, 3, 4, 8)] == [True, False, True, False]
    assert [Section(12, 2, shared=True).divides(size) for size in (2, 4, 3)] == [True, True, False]
    assert equal_sections(6, 2) == (Section(3, 3), Section(3, 3))


def test_a_module_knows_the_parts_of_its_weights() -> None:
    module = nn.Linear(2, 2)
    assert rank_part(module) is None
    weight = RankPart(HEADS, 0, 2)
    bias = RankPart(HEADS, 1, 2)
    set_rank_part(module, "weight", weight)
    set_rank_part(module, "bias", bias)
    assert (rank_part(module), rank_part(module, "bias"), rank_part(module, "other")) == (weight, bias, None)
