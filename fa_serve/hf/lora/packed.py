"""An adapter on the host: its matrices by product, laid out as in its file, in the dtype of the model.

    packed = memory.pack(adapter)            # checked; its tensors may be views of the adapter's mapped file
    packed.own()                             # now they are copies, independent of the file
    memory.rescale(packed)                   # after the weights of the model have changed
    staging.send(packed.copies(weights, pages=[3, 1], most=4 << 20))

A host copy in the layout of the device would be padded to whole pages, and allocating new memory for it is slow: an adapter of
42 MB takes 20,000 page faults. So matrices stay as they are, and the device lays them out (staging.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.hf.lora.format import LowRank
from fa_serve.hf.lora.host_runs import cloned, is_dense
from fa_serve.hf.lora.outer import OuterWeights
from fa_serve.hf.lora.staging import Copy
from fa_serve.ops import PAGE_RANKS, LoraWeights


class PackedPart(NamedTuple):
    """What an adapter adds to one module of a product.

    part:  index of the module in the product
    a:     (rows, in_features): a row for each rank, and none for a bias or for DoRA
    b:     (rows, out_features): a row for each rank, then one row each for a bias and for DoRA if the adapter has them
    """

    part: int
    a: Tensor
    b: Tensor


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
        """Copy tensors that are in memory of another owner. May be called from any thread, even while another one copies them.

        is_unchanged: called after copying: whether nobody has written to that memory. If not, the adapter stays borrowed
        """
        if not self.borrows:
            return
        with self.lock:
            copies = iter(cloned([x for parts in self.parts.values() for each in parts for x in (each.a, each.b)]))
            self.parts = {
                number: tuple(each._replace(a=next(copies), b=next(copies)) for each in parts)
                for number, parts in self.parts.items()
            }
        self.outer = None if self.outer is None else self.outer.cloned()
        self.borrows = not is_unchanged()

    def copies(self, weights: Sequence[LoraWeights], pages: Sequence[int], most: int) -> Iterator[Copy]:
        """How the matrices are copied into pages that hold zeros, piece by piece.

        weights: of each product
        pages:   of this adapter
        most:    bytes of a piece, unless PAGE_RANKS rows or a single column have more
        """
        for number, parts in self.parts.items():
            product = weights[number]
            for each in parts:
                k = product.a.shape[3]
                column = sum(product.widths[: each.part])
                yield from _copies(each.a, product.a, each.part * PAGE_RANKS * k, k, pages, most)
                yield from _copies(each.b, product.b, column, product.b.shape[2], pages, most)


def _copies(x: Tensor, memory: Tensor, offset: int, stride: int, pages: Sequence[int], most: int) -> Iterator[Copy]:
    """A matrix in pieces, which are dense as well.

    memory: of all pages, the first dimension
    offset: of the first row in a page
    stride: between the rows of a page

    Each target is made by one call of PyTorch, because there are hundreds of them.
    """
    num_rows, num_columns = x.shape
    begin = int(memory.storage_offset()) + offset
    starts = [begin + page * memory.stride(0) for page in pages]
    if not is_dense(x):
        x = x.contiguous()
    if x.is_contiguous():
        pieces = [x] if num_rows <= PAGE_RANKS else torch.split(x, PAGE_RANKS)
        for rows, start in zip(pieces, starts, strict=False):
            yield Copy(rows, [memory.as_strided(rows.shape, (stride, 1), start)])
        return
    counts = [min(PAGE_RANKS, num_rows - first) for first in range(0, num_rows, PAGE_RANKS)]
    width = max(most // (num_rows * x.itemsize), 1)
    pieces = [x] if num_columns <= width else torch.split(x, width, dim=1)
    for number, columns in enumerate(pieces):
        size = columns.shape[1]
        targets = [
            memory.as_strided((count, size), (stride, 1), start + number * width)
            for count, start in zip(counts, starts, strict=False)
        ]
        yield Copy(columns, targets)
