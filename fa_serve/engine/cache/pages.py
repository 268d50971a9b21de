"""Which sequences hold which pages of the KV cache, and which pages are worth keeping. Plain Python, no torch.

    pages = table.allocate(3)
    table.register(pages[0], page_hash, parent)      # the page holds these tokens' keys and values: others may share it
    table.release(pages)
    shared = table.match(hashes)             # the pages of the longest known prefix
    table.acquire(shared)                    # one more sequence holds them

A page is in exactly one of three states:

    free    no sequence holds it and its content is worthless
    cached  no sequence holds it, but its content is registered under a hash; the least recently used page is evicted first
    held    as many sequences hold it as its reference count says

A sequence writes only to pages that it alone holds: pages are shared when they are full, and full pages are never written
again. Therefore nothing is ever copied, and `n` answers to one prompt share its full pages and compute at most one page each.

Hashes are chained (the hash of a page covers every token before it) and keyed with a secret of this table, so that a client
cannot craft a prompt that collides with another client's prompt. A chain begins with the salt of its request, so that requests
share pages only with requests of the same salt. A page is registered only while the page before it is: a page whose content is
withdrawn takes along every page that was computed from it. Left out: which sequence gets pages when (scheduler.py), and the
memory itself (tensors.py). The idea comes from vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b


def new_salt() -> bytes:
    """A secret to key hashes with."""
    return os.urandom(16)


class PageTable:
    """Reference counts, the free list and the prefix cache of `num_pages` pages. Every operation is O(1) per page.

    page_size: tokens in a page; salt: key of the hashes, random unless it is given

    `on_forget`, if it is set, is called with each hash that is unregistered: what is keyed by hashes goes with the pages.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True, salt: bytes | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.on_forget: Callable[[bytes], None] | None = None
        self._salt = new_salt() if salt is None else salt
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # the tree of registered pages, by hash; a first page has no parent
        self._parent_of: dict[bytes, bytes] = {}
        self._children_of: dict[bytes, dict[bytes, None]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages that no other sequence holds. Cached pages are evicted when no page is free."""
        if count > self.num_available:
            raise RuntimeError(f"cannot allocate {count} pages: {self.num_available} of {self.num_pages} are available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(self._hash_of[page])
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Release each page once, the last one first: later pages are evicted before those that they depend on."""
        for page in reversed(pages):
            if self._references[page] == 0:
                raise RuntimeError(f"cannot release page {page}: no sequence holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def hash_pages(self, token_ids: Sequence[int], known: list[bytes], salt: str | None = None, adapter: int = 0) -> None:
        """Extend `known`, the hashes of a sequence's first pages, to all pages that `token_ids` fills. `known` is changed.

        salt, adapter: hashes of different salts or adapters never agree; 0 is the model without one
        """
        if not self.prefix_caching:
            return
        for start in range(len(known) * self.page_size, len(token_ids) - self.page_size + 1, self.page_size):
            parent = known[-1] if known else self._root(salt, adapter)
            content = array("q", token_ids[start : start + self.page_size]).tobytes()
            known.append(blake2b(parent + content, digest_size=16, key=self._salt).digest())

    def _root(self, salt: str | None, adapter: int) -> bytes:
        """What the chains of this salt and adapter begin with: nothing without both, else 16 bytes."""
        if salt is None and not adapter:
            return b""
        person = b"root" if salt is not None else b"adapter"
        text = (salt or "").encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16, key=self._salt, person=person, salt=adapter.to_bytes(8, "little")).digest()

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix. They are not held yet: see `acquire`."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether a page is registered under this hash."""
        return page_hash in self._page_of

    def num_evictable(self, pages: Sequence[int]) -> int:
        """How many of these pages are available now and would not be after `acquire`."""
        return sum(self._references[page] == 0 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """One more sequence holds these pages, which `match` has found."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def register(self, page: int, page_hash: bytes, parent: bytes = b"") -> None:
        """The content of this page is complete. It is shared unless another page has the same content already.

        If no sequence holds the other page, it is free from now on, and this one is shared in its place: it will be released
        later, and a model with states computes pages again that the cache has.

        parent: the hash of the page before; empty for a first page. Without a registered parent nobody would find the page
        """
        if page in self._hash_of:
            return
        other = self._page_of.get(page_hash)
        if other is not None:
            if other in self._cached:
                del self._cached[other]
                del self._hash_of[other]
                self._free.append(other)
                self._hash_of[page] = page_hash
                self._page_of[page_hash] = page
            return
        if parent:
            if parent not in self._page_of:
                return
            self._parent_of[page_hash] = parent
            self._children_of.setdefault(parent, {})[page_hash] = None
        self._hash_of[page] = page_hash
        self._page_of[page_hash] = page

    def unregister(self, pages: Sequence[int]) -> None:
        """The content of these pages is not valid: nobody shares it from now on, nor any page that was computed from it."""
        for page in pages:
            if page in self._hash_of:
                self._forget(self._hash_of[page])

    def forget(self, hashes: Sequence[bytes]) -> None:
        """The same, by the hashes of the pages. Hashes that are not registered are skipped."""
        for page_hash in hashes:
            if page_hash in self._page_of:
                self._forget(page_hash)

    def forget_all(self) -> None:
        """No page's content is valid for others any more, because the model's weights have changed."""
        self.forget([page_hash for page_hash in self._page_of if page_hash not in self._parent_of])

    def _forget(self, page_hash: bytes) -> None:
        """Unregister a hash and all hashes below it. Their pages are free if no sequence holds them."""
        parent = self._parent_of.pop(page_hash, b"")
        if parent:
            siblings = self._children_of[parent]
            del siblings[page_hash]
            if not siblings:
                del self._children_of[parent]
        below = [page_hash]
        while below:
            each = below.pop()
            self._parent_of.pop(each, None)
            below += self._children_of.pop(each, ())
            page = self._page_of.pop(each)
            del self._hash_of[page]
            if self.on_forget is not None:
                self.on_forget(each)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Assert that free + cached + held == total, and that reference counts are those of `holders` (pages by sequence)."""
        free = set(self._free)
        cached = set(self._cached)
        held = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert len(free) + len(cached) + len(held) == self.num_pages, (
            f"free {len(free)} + cached {len(cached)} + held {len(held)} != {self.num_pages}"
        )
        assert len(free | cached | held) == self.num_pages, "a page is in two states"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert self._page_of == {h: p for p, h in self._hash_of.items()}, "hashes and pages disagree"
        assert cached <= self._hash_of.keys(), "a cached page has no hash"
        assert not free & self._hash_of.keys(), "a free page has a hash"
        assert self._parent_of.keys() <= self._page_of.keys() >= self._children_of.keys(), (
            "a hash of the tree is not registered"
        )
        edges = {(parent, child) for parent, children in self._children_of.items() for child in children}
        assert edges == {(parent, child) for child, parent in self._parent_of.items()}, "parents and children disagree"
        if holders is not None:
            counts = [0] * self.num_pages
            for pages in holders:
                for page in pages:
                    counts[page] += 1
            assert counts == self._references, "reference counts differ from what the sequences hold"
