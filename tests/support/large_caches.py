"""Paged caches whose rows lie 2^31 elements or more behind the first row of their page, or whose pages are that far apart.

On a CPU their memory is a sparse file, of which only the pages that a test touches exist. On a GPU it is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BOUND = 1 << 31
KEYS = 80
"""Keys of the sequence that a call sees."""


@dataclass(frozen=True)
class LargeCache:
    """strides:  of page and token, in elements; heads lie side by side
    page_size, length: of the cache, and of the one sequence in it
    window:   keys to the left that a query sees, so that few rows of the file are read
    """

    name: str
    strides: tuple[int, int]
    page_size: int
    length: int
    window: int

    def __str__(self) -> str:
        return self.name

    @property
    def pages(self) -> int:
        return -(-self.length // self.page_size)

    def numel(self, heads: int, dim: int) -> int:
        page, token = self.strides
        return (self.pages - 1) * page + (self.page_size - 1) * token + heads * dim

    def view(self, memory: Tensor, heads: int, dim: int) -> Tensor:
        return memory.as_strided((self.pages, self.page_size, heads, dim), (*self.strides, dim, 1))


def large_caches(heads: int, dim: int) -> list[LargeCache]:
    """One page of 2^31 elements and a few more rows, with and without a page size that is a whole number of blocks; tokens that
    are as far apart as the pages of a cache; and two pages that are 2^31 elements apart."""
    row = heads * dim
    rows = -(-BOUND // row)
    apart = -(-BOUND // 15 // 4096) * 4096
    return [
        LargeCache("one-page", ((rows + 256) * row, row), rows + 256, rows + 256, 20),
        LargeCache("one-odd-page", ((rows + 208) * row, row), rows + 208, rows + 200, 20),
        LargeCache("tokens-far-apart", (64 * row, apart), 16, KEYS, -1),
        LargeCache("far-pages", ((rows + 16) * row, row), 16, 32, -1),
    ]


def memory_on_disk(folder: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    return torch.from_file(str(folder / f"cache-{numel}"), shared=True, size=numel, dtype=dtype)


def fill(cache: LargeCache, k_cache: Tensor, v_cache: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Write the last keys and values of the sequence, whose pages stand in the block table in reverse order -> the table."""
    pages = list(reversed(range(cache.pages)))
    first = cache.length - len(keys)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        page, position = divmod(first + i, cache.page_size)
        k_cache[pages[page], position] = key
        v_cache[pages[page], position] = value
    return torch.tensor([pages], dtype=torch.int32, device=k_cache.device)
