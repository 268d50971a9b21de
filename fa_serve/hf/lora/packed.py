"""An adapter on the host: its matrices by product, laid out as in its file, in the dtype of the model.

    packed = memory.pack(adapter)            # checked; its tensors may be views of the adapter's mapped file
    packed.own()                             # now they are copies, independent of the file
    memory.rescale(packed)                   # after the weights of the model have changed
    packed.fill(view, start, page, number, layout)   # writes the rows of one product in a page

A host copy in the layout of the device would be padded to whole pages, and allocating new memory for it is slow: an adapter of
42 MB takes 20,000 page faults. So matrices are laid out only when they are copied (staging.py), into buffers that are reused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.hf.lora.format import LowRank
from fa_serve.hf.lora.outer import OuterWeights
from fa_serve.ops import PAGE_RANKS

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integers by the bytes of the numbers of a model."""


class PackedPart(NamedTuple):
    """What an adapter adds to one module of a product.

    part:  index of the module in the product
    a:     (rows, in_features): a row for each rank, and none for a bias or for DoRA
    b:     (rows, out_features): a row for each rank, then one row each for a bias and for DoRA if the adapter has them
    """

    part: int
    a: Tensor
    b: Tensor


class SiteLayout(NamedTuple):
    """Where a product is in a page.

    a, b, end: the first element of A, the first element of B, and the end of the product
    k:         columns of the product
    widths:    rows of each of its modules
    """

    a: int
    b: int
    end: int
    k: int
    widths: tuple[int, ...]


@dataclass(slots=True, eq=False)
class PackedLora:
    """An adapter on the host.

    num_pages: number of pages that it takes on the device
    parts:     the parts of each product, by the number of the product
    numbers:   (3, elements of all products) int32: scales (the bits of float32 numbers), ones and factors
    outer:     weights that are not kept in pages, or None
    dora:      the matrices of linear layers with DoRA, by name. Their parts are made from these and from the model's weights
    version:   the version of the model's weights from which the parts of `dora` were made
    content:   a number that identifies the content of the adapter; 0 if adapters are not numbered by content
    borrows:   whether tensors may be in memory of another owner, such as the file, or were copied while it was written over
    """

    num_pages: int
    parts: Mapping[int, tuple[PackedPart, ...]]
    numbers: Tensor
    outer: OuterWeights | None
    dora: Mapping[str, LowRank] = field(default_factory=dict)
    version: int = 0
    content: int = 0
    borrows: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `parts` are replaced, because two threads may do so: one copies them, and one computes those of DoRA."""

    @property
    def num_bytes(self) -> int:
        """Memory on the host."""
        inner = sum(each.a.nbytes + each.b.nbytes for parts in self.parts.values() for each in parts)
        inner += sum(low.num_bytes for low in self.dora.values())
        return inner + self.numbers.nbytes + self.outer_bytes

    @property
    def rescales(self) -> bool:
        """Whether what is on the device depends on the model's weights: factors of DoRA, and copies of routers' weights."""
        return bool(self.dora) or (self.outer is not None and self.outer.changes_routers)

    @property
    def outer_bytes(self) -> int:
        """Memory on the device that is not in pages."""
        return 0 if self.outer is None else self.outer.num_bytes

    @property
    def is_eager(self) -> bool:
        """Whether steps with this adapter must run without CUDA graphs."""
        return self.outer is not None or self.rescales

    def own(self, is_unchanged: Callable[[], bool] = lambda: True) -> None:
        """Copy tensors that are in memory of another owner. May be called from any thread, even while another one runs `fill`.

        is_unchanged: called after copying: whether nobody has written to that memory. If not, the adapter stays borrowed
        """
        if not self.borrows:
            return
        with self.lock:
            self.parts = {
                number: tuple(each._replace(a=each.a.clone(), b=each.b.clone()) for each in parts)
                for number, parts in self.parts.items()
            }
        self.outer = None if self.outer is None else self.outer.cloned()
        self.borrows = not is_unchanged()

    def fill(self, view: Tensor, start: int, page: int, number: int, layout: SiteLayout) -> None:
        """Write all that one product has in a page of this adapter, zeros included.

        view:   elements of the page from `start` on
        page:   of the adapter, from 0
        number: of the product
        """
        first = page * PAGE_RANKS
        width = sum(layout.widths)
        elements = _as_integers(view)
        a = elements[layout.a - start :][: len(layout.widths) * PAGE_RANKS * layout.k].reshape(-1, PAGE_RANKS, layout.k)
        b = elements[layout.b - start :][: PAGE_RANKS * width].reshape(PAGE_RANKS, width)
        given = {each.part: each for each in self.parts.get(number, ())}
        column = 0
        for part, own in enumerate(layout.widths):
            each = given.get(part)
            _copy_rows(a[part], None if each is None else each.a[first : first + PAGE_RANKS])
            _copy_rows(b[:, column : column + own], None if each is None else each.b[first : first + PAGE_RANKS])
            column += own


def _copy_rows(target: NDArray[Any], rows: Tensor | None) -> None:
    """Copy rows to the beginning of a target, and write zeros behind them. None: there are no rows"""
    count = 0 if rows is None else len(rows)
    if rows is not None:
        target[:count] = _as_integers(rows)
    if count < len(target):
        target[count:] = 0


def _as_integers(x: Tensor) -> NDArray[Any]:
    """The same memory for NumPy, which has no bfloat16. NumPy copies a transposed matrix, as B is, twice as fast as PyTorch."""
    return x.view(_INTEGERS[x.itemsize]).numpy()
