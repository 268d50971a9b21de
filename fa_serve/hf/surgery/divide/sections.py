"""Which rows or columns of a tensor each rank keeps: consecutive sections, each divided between the ranks by its units.

    cut = Cut(0, (Section(128, 8), Section(32, 2, shared=True)))      # 8 heads of 16 rows, then 2 heads that ranks may share
    cut.ranges(rank=1, size=4)                                        # [(32, 32), (128, 16)]

Left out: which tensors are cut, and into what (plan.py, mixers.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


def equal_sections(count: int, parts: int = 1) -> tuple[Section, ...]:
    """Sections of the same size, in which each row or column stands alone."""
    return (Section(count // parts, count // parts),) * parts
