"""An adapter on the host: its matrices by product, as they were read, in the dtype of the model.

    packed = memory.pack(adapter)            # checked; its tensors may lie in the file of the adapter
    packed.own()                             # they are copies, whatever becomes of the file
    packed.fill(view, start, page, number, layout)   # what one product has of a page

A copy in the layout of the device would be padded to whole pages, and new memory for it is slow to come: an adapter of 42 MB
takes 20,000 page faults. So matrices are laid out when they are copied (staging.py), into memory that is used again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.hf.lora.outer import OuterWeights
from fa_serve.ops import PAGE_RANKS

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integers by the bytes of the numbers of a model."""


class PackedPart(NamedTuple):
    """What an adapter adds to one module of a product.

    part:  which of the product's modules it is
    a:     (rows, in_features): the ranks, and nothing for a bias or for DoRA
    b:     (rows, out_features): the ranks, and a row each for a bias and for DoRA
    """

    part: int
    a: Tensor
    b: Tensor


class SiteLayout(NamedTuple):
    """Where a product is: its first elements of A and B in a page, its columns, and the rows of each of its modules."""

    a: int
    b: int
    end: int
    k: int
    widths: tuple[int, ...]


@dataclass(slots=True, eq=False)
class PackedLora:
    """An adapter on the host.

    num_pages: that it takes on the device
    parts:     by the number of the product
    numbers:   (3, numbers of all products) int32: scales, whose bits are those of float32, ones and factors
    outer:     of the embedding and the head, or None
    rescales:  it has factors of DoRA
    content:   a number that no other content has; 0 if it was not asked for
    borrows:   tensors may lie in memory of somebody else, such as the file, or are copies of what was being written over
    """

    num_pages: int
    parts: Mapping[int, tuple[PackedPart, ...]]
    numbers: Tensor
    outer: OuterWeights | None
    rescales: bool
    content: int = 0
    borrows: bool = True

    @property
    def num_bytes(self) -> int:
        """On the host."""
        inner = sum(each.a.nbytes + each.b.nbytes for parts in self.parts.values() for each in parts)
        return inner + self.numbers.nbytes + self.outer_bytes

    @property
    def outer_bytes(self) -> int:
        """On the device, beside the pages."""
        return 0 if self.outer is None else self.outer.num_bytes

    @property
    def is_eager(self) -> bool:
        """Steps with this adapter run without CUDA graphs."""
        return self.outer is not None or self.rescales

    def own(self, is_unchanged: Callable[[], bool] = lambda: True) -> None:
        """Copy what lies in memory of somebody else. From any thread, also while another one lays the adapter out.

        is_unchanged: asked when all is copied, whether nobody has written there. Otherwise the adapter counts as borrowed still
        """
        if not self.borrows:
            return
        self.parts = {
            number: tuple(each._replace(a=each.a.clone(), b=each.b.clone()) for each in parts)
            for number, parts in self.parts.items()
        }
        self.outer = None if self.outer is None else self.outer.cloned()
        self.borrows = not is_unchanged()

    def fill(self, view: Tensor, start: int, page: int, number: int, layout: SiteLayout) -> None:
        """Write what one product has of a page of this adapter.

        view:   elements of the page from `start` on, which are zeros where nothing is written
        page:   of the adapter, from 0
        number: of the product
        """
        first = page * PAGE_RANKS
        width = sum(layout.widths)
        elements = _as_integers(view)
        a = elements[layout.a - start :][: len(layout.widths) * PAGE_RANKS * layout.k].reshape(-1, PAGE_RANKS, layout.k)
        b = elements[layout.b - start :][: PAGE_RANKS * width].reshape(PAGE_RANKS, width)
        for each in self.parts.get(number, ()):
            rows = _as_integers(each.a[first : first + PAGE_RANKS])
            a[each.part, : len(rows)] = rows
            rows = _as_integers(each.b[first : first + PAGE_RANKS])
            column = sum(layout.widths[: each.part])
            b[: len(rows), column : column + rows.shape[1]] = rows


def _as_integers(x: Tensor) -> NDArray[Any]:
    """The same memory for NumPy, which has no bfloat16. NumPy copies a transposed matrix, as B is, twice as fast as PyTorch."""
    return x.view(_INTEGERS[x.itemsize]).numpy()
