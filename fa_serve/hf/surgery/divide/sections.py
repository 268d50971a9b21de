"""Which rows or columns of a tensor each rank keeps. A tensor has consecutive sections; each is divided by whole units.

    cut = Cut(0, (Section(128, 8), Section(32, 2, shared=True)))      # 8 heads of 16 rows, then 2 heads that ranks may share
    cut.ranges(rank=1, size=4)                                        # [(32, 32), (128, 16)]
    RankPart(cut, rank=1, size=4).kept(b, dim=0)                      # the same rows of another tensor

Left out: which tensors are cut, and into what (plan.py, mixers.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Section(NamedTuple):
    """Consecutive rows or columns that are divided.

    size:   number of rows or columns
    units:  number of parts that are not divided further, such as heads
    shared: whether several ranks may keep the same unit if there are fewer units than ranks
    """

    size: int
    units: int
    shared: bool = False

    def count(self, size: int) -> int:
        """The number of units that each of `size` ranks keeps."""
        return max(self.units // size, 1)

    def divides(self, size: int) -> bool:
        """Whether each of `size` ranks can keep the same number of units."""
        return self.units % size == 0 or (self.shared and size % self.units == 0)


class Cut(NamedTuple):
    """How a tensor is divided: each rank keeps part of each section, along one dimension."""

    dim: int
    sections: tuple[Section, ...]

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """(start, length) of the part that a rank keeps, for each section."""
        found = []
        start = 0
        for section in self.sections:
            width = section.size // section.units
            first = rank * section.units // size
            found.append((start + first * width, section.count(size) * width))
            start += section.size
        return found

    def kept(self, tensor: Tensor, rank: int, size: int) -> list[Tensor]:
        """Views of the parts that a rank keeps."""
        return [tensor.narrow(self.dim, start, length) for start, length in self.ranges(rank, size)]


class RankPart(NamedTuple):
    """The part of a weight that this rank keeps."""

    cut: Cut
    rank: int
    size: int

    @property
    def whole(self) -> int:
        """The number of rows or columns of the undivided weight."""
        return sum(section.size for section in self.cut.sections)

    def kept(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor whose dimension `dim` is divided like the weight."""
        return torch.cat(self.cut._replace(dim=dim).kept(tensor, self.rank, self.size), dim=dim)


def rank_part(module: nn.Module, name: str = "weight") -> RankPart | None:
    """The part of a parameter that this rank keeps; None for a parameter that every rank keeps whole."""
    parts: dict[str, RankPart] = vars(module).get(_PARTS, {})
    return parts.get(name)


def set_rank_part(module: Any, name: str, part: RankPart) -> None:
    """Record which part of a parameter this rank keeps."""
    setattr(module, _PARTS, vars(module).get(_PARTS, {}) | {name: part})


_PARTS = "_fa_serve_parts"


def equal_sections(count: int, parts: int = 1) -> tuple[Section, ...]:
    """Sections of equal size, in which each row or column is a unit."""
    return (Section(count // parts, count // parts),) * parts
