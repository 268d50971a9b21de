"""Which sequences hold which pages of the KV cache, and which pages are worth keeping. Plain Python, no torch.

    pages = table.allocate(3)
    table.register(pages[0], page_hash, parent)      # the page holds these tokens' keys and values: others may share it
    table.release(pages)
    shared = table.match(hashes)             # the pages of the longest known prefix
    table.acquire(shared)                    # one more sequence holds them

A page is free, cached or held (kept_items.py). With a host tier, a page that is evicted stays registered if the host has a copy
of it, which comes back before a sequence needs it.

A sequence writes only to pages that no other sequence holds: pages are shared when they are full, and full pages are never
written again. So nothing is ever copied, and `n` answers to one prompt share its full pages and compute at most one page each.

Hashes are chained (the hash of a page covers every token before it) and keyed with a secret of this table, so that a client
cannot craft a prompt that collides with another client's prompt. A chain begins with the salt of its request, so that requests
share pages only with requests of the same salt. A page is registered only while the page before it is: a page whose content is
withdrawn takes along every page that was computed from it. Left out: which sequence gets pages when (scheduler.py), and the
memory itself (tensors.py). The idea comes from vLLM (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

from fa_serve.engine.cache.kept_items import KeptItems


def new_salt() -> bytes:
    """A secret to key hashes with."""
    return os.urandom(16)


class PageTable(KeptItems):
    """Reference counts, the free list and the prefix cache of `num_pages` pages. Every operation is O(1) per page.
    `forget_all` replaces the dictionaries of registered pages, and later operations free the entries of the old ones.

    page_size: tokens in a page; salt: key of the hashes, random unless it is given

    on_forget:   if set, is called with each hash that is unregistered, so that what is keyed by hashes goes with the pages
    on_forget_all: if set, is called once when all hashes are unregistered together, instead of `on_forget` for each
    on_withdraw: if set, is called with each hash whose content is not valid, so that files with this content go as well
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True, salt: bytes | None = None) -> None:
        super().__init__(num_pages, "page")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.on_forget: Callable[[bytes], None] | None = None
        self.on_forget_all: Callable[[], None] | None = None
        self.on_withdraw: Callable[[bytes], None] | None = None
        self._salt = new_salt() if salt is None else salt
        # the tree of registered pages, by hash; a first page has no parent
        self._parent_of: dict[bytes, bytes] = {}
        # most pages have one child: a dictionary for each would take more memory and time than the rest of the tree
        self._only_child_of: dict[bytes, bytes] = {}
        self._children_of: dict[bytes, dict[bytes, None]] = {}

    def renewed(self) -> PageTable:
        """An empty table of as many pages, with the same key of the hashes."""
        return PageTable(self.num_pages, self.page_size, prefix_caching=self.prefix_caching, salt=self._salt)

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages that no other sequence holds. Cached pages are evicted when no page is free."""
        if count > self.num_available:
            raise RuntimeError(f"cannot allocate {count} pages: {self.num_available} of {self.num_pages} are available")
        pages = []
        for _ in range(count):
            page = self.take()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Release each page once, the last one first: later pages are evicted before those that they depend on."""
        for page in reversed(pages):
            self.release_one(page)

    def hash_pages(self, token_ids: Sequence[int], known: list[bytes], salt: str | None = None, adapter: int = 0) -> None:
        """Extend `known`, the hashes of a sequence's first pages, to all pages that `token_ids` fills. `known` is changed.

        salt, adapter: hashes of different salts or adapters never agree; adapter 0 is the model without an adapter
        """
        if not self.prefix_caching:
            return
        for start in range(len(known) * self.page_size, len(token_ids) - self.page_size + 1, self.page_size):
            parent = known[-1] if known else self._root(salt, adapter)
            content = array("q", token_ids[start : start + self.page_size]).tobytes()
            known.append(blake2b(parent + content, digest_size=16, key=self._salt).digest())

    def _root(self, salt: str | None, adapter: int) -> bytes:
        """The bytes that the chains of this salt and adapter begin with: none if there is neither, else 16."""
        if salt is None and not adapter:
            return b""
        person = b"root" if salt is not None else b"adapter"
        text = (salt or "").encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16, key=self._salt, person=person, salt=adapter.to_bytes(8, "little")).digest()

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix. They are not held yet: see `acquire`."""
        pages = []
        for page_hash in hashes:
            page = self._item_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def reach(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages, from the first one on, are registered, on the device or on the host."""
        return next((number for number, page_hash in enumerate(hashes) if page_hash not in self), len(hashes))

    def num_evictable(self, pages: Sequence[int]) -> int:
        """How many of these pages are available now and would not be after `acquire`."""
        return sum(self._references[page] == 0 for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """One more sequence holds these pages, which `match` has found."""
        for page in pages:
            self.acquire_one(page)

    def register(self, page: int, page_hash: bytes, parent: bytes = b"") -> None:
        """The content of this page is complete. It is shared unless another page has the same content already.

        If no sequence holds the other page, that page is freed and this one is shared instead, because it will be released
        later. This happens in models with states, which compute pages again that the cache has.

        parent: the hash of the page before; empty for a first page. If it is not registered, this page is not registered either
        """
        if page in self._hash_of:
            return
        other = self._item_of.get(page_hash)
        if other is not None:
            if other in self._cached:
                del self._cached[other]
                del self._hash_of[other]
                self._free.append(other)
                self._hash_of[page] = page_hash
                self._item_of[page_hash] = page
                self._leaving.pop(page_hash, None)
                self.host.expose(page_hash, first=True)
            return
        if page_hash not in self.host and parent:
            if parent not in self:
                return
            self._add_child(page_hash, parent)
        self._hash_of[page] = page_hash
        self._item_of[page_hash] = page

    def unregister(self, pages: Sequence[int]) -> None:
        """Stop sharing these pages and all pages that were computed from them."""
        self.forget([self._hash_of[page] for page in pages if page in self._hash_of])

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Stop sharing the pages of these hashes and all pages that were computed from them. Hashes that are not registered are
        skipped. Files stay, because an earlier run may have written valid ones."""
        for page_hash in hashes:
            if page_hash in self:
                self._forget(page_hash)

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """The content of these pages is not valid: stop sharing it and all that was computed from it, and remove the files."""
        for page_hash in hashes:
            if self.on_withdraw is not None:
                for each in self._descent(page_hash):
                    self.on_withdraw(each)
        self.forget(hashes)

    def forget_all(self) -> None:
        """No page is shared from now on: the model's weights have changed, or the memory is given away."""
        super().forget_all()
        self._give_up(self._parent_of, self._only_child_of, self._children_of)
        self._parent_of = {}
        self._only_child_of = {}
        self._children_of = {}
        if self.on_forget_all is not None:
            self.on_forget_all()

    def parent_of(self, page_hash: bytes) -> bytes:
        """The hash of the page before a registered one; empty for a first page."""
        return self._parent_of.get(page_hash, b"")

    def _descent(self, page_hash: bytes) -> list[bytes]:
        """A hash, and those of all registered pages that were computed from its page."""
        found = [page_hash]
        for each in found:
            found += self._children(each)
        return found

    def _register_restored(self, page_hash: bytes, parent: bytes) -> bool:
        if parent and parent not in self:
            return False
        if parent and page_hash not in self:
            self._add_child(page_hash, parent)
        return True

    def _add_child(self, page_hash: bytes, parent: bytes) -> None:
        self._parent_of[page_hash] = parent
        if parent in self._children_of:
            self._children_of[parent][page_hash] = None
        elif parent in self._only_child_of:
            self._children_of[parent] = {self._only_child_of.pop(parent): None, page_hash: None}
        else:
            self._only_child_of[parent] = page_hash

    def _remove_child(self, page_hash: bytes, parent: bytes) -> None:
        if self._only_child_of.pop(parent, None) is None:
            siblings = self._children_of[parent]
            del siblings[page_hash]
            if not siblings:
                del self._children_of[parent]

    def _children(self, page_hash: bytes) -> Collection[bytes]:
        """The hashes of the registered pages after this one, in the order in which they were registered."""
        if page_hash in self._only_child_of:
            return (self._only_child_of[page_hash],)
        return self._children_of.get(page_hash, ())

    def _lose(self, page_hash: bytes) -> None:
        self._forget(page_hash)

    def _forget(self, page_hash: bytes) -> None:
        """Unregister a hash and all hashes below it, and drop the host's copies. Pages are free if no sequence holds them."""
        parent = self._parent_of.pop(page_hash, b"")
        if parent:
            self._remove_child(page_hash, parent)
        below = [page_hash]
        while below:
            each = below.pop()
            self._parent_of.pop(each, None)
            below += self._children(each)
            self._only_child_of.pop(each, None)
            self._children_of.pop(each, None)
            self._cancel(each)
            if self.on_forget is not None:
                self.on_forget(each)
            page = self._item_of.pop(each, None)
            if page is not None:
                del self._hash_of[page]
                if page in self._cached:
                    del self._cached[page]
                    self._free.append(page)

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Assert that free + cached + held == total, and that reference counts are those of `holders` (pages by sequence)."""
        self.check_conditions(holders)
        known = {*self._item_of, *self.host}
        parents = self._only_child_of.keys() | self._children_of.keys()
        assert self._parent_of.keys() <= known >= parents, "a hash of the tree is not registered"
        assert not self._only_child_of.keys() & self._children_of.keys(), "a page has an only child and others"
        edges = {(parent, child) for parent in parents for child in self._children(parent)}
        assert edges == {(parent, child) for child, parent in self._parent_of.items()}, "parents and children disagree"
