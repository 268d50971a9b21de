"""Rows of several tensors as one row of bytes, such as a page or a state in all layers.

    table = RowTable([k_cache_0, v_cache_0, k_cache_1, v_cache_1])      # (num_pages, ...) each, a page is one range of memory
    ops.move_rows(table, pages, packed, pack=True)                      # packed: (n, table.num_words) int64
    ops.move_rows(table, pages, packed, pack=False)                     # and back

The tensors may have any types, and any shapes after their first dimension. Left out: where the packed rows go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BYTES = 8
"""Bytes that are copied as one number."""
PIECE_WORDS = 2048
"""Words of a row that one program of a kernel copies."""


class RowTable:
    """The places of rows in several tensors.

    tensors: (n, ...) each. A row must be dense in memory, in any order of its dimensions, and have a multiple of 8 bytes.
             Raises ValueError otherwise

    words:     (n, m) int64 each: views of the same memory
    num_words: int64 words in a row of all tensors together
    pieces:    (num_pieces, 4) int64 on the device: address in row 0, words from one row to the next, place in the packed row,
               number of words
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.words = [_as_words(x) for x in tensors]
        self.num_words = sum(x.shape[1] for x in self.words)
        pieces = []
        first = 0
        for x in self.words:
            for start in range(0, x.shape[1], PIECE_WORDS):
                size = min(PIECE_WORDS, x.shape[1] - start)
                pieces.append([x.data_ptr() + start * WORD_BYTES, x.stride(0), first + start, size])
            first += x.shape[1]
        self.pieces = torch.tensor(pieces, dtype=torch.int64, device=self.words[0].device).view(-1, 4)

    @property
    def device(self) -> torch.device:
        return self.pieces.device


def row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a row of all tensors together."""
    return sum(x[0].numel() * x.itemsize for x in tensors)


def _as_words(x: Tensor) -> Tensor:
    """(n, ...) -> (n, m) int64, the same memory"""
    size = x[0].numel()
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    rows = x.permute(0, *order)
    if (
        not rows[0].is_contiguous()
        or (size * x.itemsize) % WORD_BYTES
        or (x.stride(0) * x.itemsize) % WORD_BYTES
        or x.data_ptr() % WORD_BYTES
    ):
        raise ValueError(
            f"a row must be contiguous in memory and a multiple of {WORD_BYTES} bytes long, got {tuple(x.shape)} {x.dtype}"
        )
    flat = torch.as_strided(rows, (len(x), size), (x.stride(0), 1))
    return flat.view(torch.uint8).view(torch.int64) if x.itemsize != WORD_BYTES else flat.view(torch.int64)
