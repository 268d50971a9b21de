"""Who holds which page of the KV cache, and which pages are worth keeping. Plain Python, no torch.

    pages = table.allocate(3)
    table.register(pages[0], page_hash)      # it holds these tokens' keys and values: others may share it
    table.release(pages)
    shared = table.match(hashes)             # the longest known prefix
    table.acquire(shared)                    # held once more

A page is in exactly one of three states:

    free    nobody holds it and its content is worth nothing
    cached  nobody holds it, but its content is registered under a hash; the least recently used is evicted first
    held    by as many sequences as its reference count

A sequence writes only to pages that it alone holds: pages are shared when they are full, and full pages are never written
again. So nothing is ever copied, and `n` answers to one prompt share its full pages and recompute at most one.

Hashes are chained (a page's hash covers every token before it) and keyed with a secret of this table's own, so that nobody
can craft a prompt that collides with another's. Left out: which request gets pages when (scheduler.py), and the memory
itself (kv_cache.py). Source of the idea: vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


class PageTable:
    """Reference counts, the free list and the prefix cache of `num_pages` pages; every operation is O(1) per page."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True, salt: bytes | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._salt = os.urandom(16) if salt is None else salt
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages that nobody else holds; cached ones are evicted when the free list is empty."""
        if count > self.num_available:
            raise RuntimeError(f"{count} pages asked for, {self.num_available} available of {self.num_pages}")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Let go of each page once. The later pages of a sequence are evicted before the ones they build upon."""
        for page in reversed(pages):
            if self._references[page] == 0:
                raise RuntimeError(f"page {page} is released, but nobody holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def hash_pages(self, token_ids: Sequence[int], known: list[bytes]) -> None:
        """Extend `known`, the hashes of a sequence's first pages, to all pages that `token_ids` fills."""
        if not self.prefix_caching:
            return
        for start in range(len(known) * self.page_size, len(token_ids) - self.page_size + 1, self.page_size):
            parent = known[-1] if known else b""
            content = array("q", token_ids[start : start + self.page_size]).tobytes()
            known.append(blake2b(parent + content, digest_size=16, key=self._salt).digest())

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix. Nothing is held yet."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_evictable(self, pages: Sequence[int]) -> int:
        """How many of these pages count as available now, and would not once they are held."""
        return sum(self._references[page] == 0 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found once more."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def register(self, page: int, page_hash: bytes) -> None:
        """The page's content is complete. If another page already has that content, this one stays private."""
        if page not in self._hash_of and page_hash not in self._page_of:
            self._hash_of[page] = page_hash
            self._page_of[page_hash] = page

    def unregister(self, pages: Sequence[int]) -> None:
        """The content of these pages, which somebody holds, is not to be trusted: nobody else may take them over."""
        for page in pages:
            if page in self._hash_of:
                del self._page_of[self._hash_of.pop(page)]

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """free + cached + held == total, and the reference counts are those of `holders` (each sequence's pages)."""
        free = set(self._free)
        cached = set(self._cached)
        held = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert len(free) + len(cached) + len(held) == self.num_pages, (
            f"free {len(free)} + cached {len(cached)} + held {len(held)} != {self.num_pages}"
        )
        assert len(free | cached | held) == self.num_pages, "a page is in two states"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert self._page_of == {h: p for p, h in self._hash_of.items()}, "hashes and pages disagree"
        assert cached <= self._hash_of.keys(), "a cached page has no hash"
        assert not free & self._hash_of.keys(), "a free page has a hash"
        if holders is not None:
            counts = [0] * self.num_pages
            for pages in holders:
                for page in pages:
                    counts[page] += 1
            assert counts == self._references, "reference counts differ from what the sequences hold"
