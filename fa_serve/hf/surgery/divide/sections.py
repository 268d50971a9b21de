"""Which rows or columns of a tensor each rank keeps: consecutive sections, each divided between the ranks by its units.

    cut = Cut(0, (Section(128, 8), Section(32, 2, shared=True)))      # 8 heads of 16 rows, then 2 heads that ranks may share
    cut.ranges(rank=1, size=4)                                        # [(32, 32), (128, 16)]
    RankPart(cut, rank=1, size=4).kept(b, dim=0)                      # the same rows of a tensor that belongs to the weight

Left out: which tensors are cut, and into what (plan.py, mixers.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Section(NamedTuple):
    """Consecutive rows or columns that are divided.

    size:   number of rows or columns
    units:  parts that stay together, such as heads
    shared: several ranks may keep the same unit if there are fewer units than ranks
    """

    size: int
    units: int
    shared: bool = False

    def count(self, size: int) -> int:
        """The number of units that each of `size` ranks keeps."""
        return max(self.units // size, 1)

    def divides(self, size: int) -> bool:
        """Whether `size` ranks can keep the same number of units each."""
        return self.units % size == 0 or (self.shared and size % self.units == 0)


class Cut(NamedTuple):
    """What the ranks keep of a tensor: some of each section, along one dimension."""

    dim: int
    sections: tuple[Section, ...]

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """(start, length) of the part of each section that a rank keeps."""
        found = []
        start = 0
        for section in self.sections:
            width = section.size // section.units
            first = rank * section.units // size
            found.append((start + first * width, section.count(size) * width))
            start += section.size
        return found

    def kept(self, tensor: Tensor, rank: int, size: int) -> list[Tensor]:
        """Views of what a rank keeps."""
        return [tensor.narrow(self.dim, start, length) for start, length in self.ranges(rank, size)]


class RankPart(NamedTuple):
    """What this rank keeps of a weight."""

    cut: Cut
    rank: int
    size: int

    @property
    def whole(self) -> int:
        """The rows or columns of all ranks."""
        return sum(section.size for section in self.cut.sections)

    def kept(self, tensor: Tensor, dim: int) -> Tensor:
        """What this rank keeps of a tensor whose dimension `dim` has the rows or columns that are divided."""
        return torch.cat(self.cut._replace(dim=dim).kept(tensor, self.rank, self.size), dim=dim)


def rank_part(module: nn.Module, name: str = "weight") -> RankPart | None:
    """What this rank keeps of a parameter of a module; None for one that every rank has whole."""
    parts: dict[str, RankPart] = vars(module).get(_PARTS, {})
    return parts.get(name)


def set_rank_part(module: Any, name: str, part: RankPart) -> None:
    """This rank keeps this part of a parameter of a module."""
    setattr(module, _PARTS, vars(module).get(_PARTS, {}) | {name: part})


_PARTS = "_fa_serve_parts"


def equal_sections(count: int, parts: int = 1) -> tuple[Section, ...]:
    """Sections of the same size, in which each row or column stands alone."""
    return (Section(count // parts, count // parts),) * parts
