"""What pages and states have in common: each is free, cached or held, and the host may have a copy of it. No torch.

    item = items.take()                      # free, or the least recently used one that is cached
    items.release_one(item)

An item is in exactly one of three conditions:

    free    no sequence holds it and its content is worthless
    cached  no sequence holds it, but its content is registered under a hash; the least recently used item is evicted first
    held it has as many holders as its reference count says

With a host tier, the items that are evicted next are copied to the host ahead of time (`start_leaving`), and copies are copied
back to items when a sequence needs them (`start_arriving`). An item that leaves keeps its condition; if it is handed out before
the copy has ended, the copy is void. An item that arrives is held until its copy has ended. A copy that has ended is void, too,
if its hash was forgotten meanwhile. With a folder, files are read to the host (`restore`). Left out: the hashes of pages
(pages.py), which positions have states (states.py), and when copies are made (host_tier.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from fa_serve.engine.cache.host_slots import HostSlots

ENTRIES_FREED = 16
"""Entries of discarded dictionaries that are freed each time an item is handed out. An item has at most eight entries, so all
are gone before as many items have been handed out again."""


class Move(NamedTuple):
    """A page or a state that is being copied, in either direction."""

    page_hash: bytes
    item: int
    slot: int


class KeptItems:
    """Reference counts, the free list and the registered items of a table. name: what an item is called, "page" or "state"

    host:      the host's slots with copies; it has no slots if there is no host tier
    num_changes: how often an item has become cached, or has ceased to be available
    num_lost:  how many registered items were evicted without a copy on the host
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self.host = HostSlots()
        self.num_changes = 0
        self.num_lost = 0
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * count
        self._hash_of: dict[int, bytes] = {}
        self._item_of: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        self._arriving: dict[bytes, int] = {}
        self._in_transit: list[int] = []  # items that are held because they are being filled
        self._given_up: list[dict[Any, Any]] = []  # dictionaries whose entries `take` frees, a few at a time

    @property
    def num_available(self) -> int:
        """Items that can be handed out: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Items that are held."""
        return self._count - self.num_available

    def has(self, page_hash: bytes) -> bool:
        """Whether an item of the device is registered under this hash."""
        return page_hash in self._item_of

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether an item is registered under this hash, on the device or on the host."""
        return page_hash in self._item_of or page_hash in self.host

    def is_arriving(self, page_hash: bytes) -> bool:
        """Whether what is registered under this hash is on its way from the host."""
        return page_hash in self._arriving

    def lacks_copies(self, count: int, kept: Collection[int]) -> bool:
        """Whether the host lacks a copy of one of the next `count` items to be handed out. kept: items that are passed over"""
        evicted = (item for item in self._cached if item not in kept)
        return any(self._hash_of[item] not in self.host for item in islice(evicted, max(count - len(self._free), 0)))

    def start_leaving(self, depth: int, limit: int) -> list[Move]:
        """Take slots for those of the next `depth` items to be handed out that lack a copy on the host, `limit` at most."""
        chosen: list[int] = []
        for item in islice(self._cached, max(depth - len(self._free), 0)):
            page_hash = self._hash_of[item]
            if page_hash in self.host:
                self.host.protect(page_hash)
            elif len(chosen) < limit:
                chosen.append(item)
        moves = []
        for item in chosen:
            slot = self.take_slot()
            if slot < 0:
                break
            page_hash = self._hash_of.get(item, b"")
            if page_hash:
                self._leaving[page_hash] = item
                moves.append(Move(page_hash, item, slot))
            else:  # it was forgotten, because a page before it was evicted for a slot
                self.host.give_back(slot)
        return moves

    def take_slot(self, kept: Collection[bytes] | None = None) -> int:
        """A slot of the host to write to; -1 if all copies are to be kept. What comes after an evicted copy is forgotten.

        kept: if it is given, any copy may be evicted except those of these hashes
        """
        taken = self.host.take(kept)
        if taken is None:
            return -1
        slot, evicted = taken
        if evicted and evicted not in self._item_of:
            self._forget(evicted)
        return slot

    def end_leaving(self, moves: Sequence[Move], copied: bool) -> None:
        """Items have been copied to the host, or not."""
        for page_hash, item, slot in moves:
            if self._leaving.pop(page_hash, -1) == item and copied:
                self.host.put(page_hash, slot)
                if item not in self._cached:
                    self.host.expose(page_hash, first=True)
            else:
                self.host.give_back(slot)

    def start_arriving(self, hashes: Sequence[bytes]) -> list[Move]:
        """Hold an item to be filled for each of these hashes with a copy on the host. Taking items may forget other hashes."""
        moves = []
        for page_hash in hashes:
            if page_hash not in self.host or page_hash in self._arriving:
                continue
            slot = self.host.begin_reading(page_hash)
            item = self.take()
            self._hold(item)
            self._arriving[page_hash] = item
            moves.append(Move(page_hash, item, slot))
        return moves

    def end_arriving(self, moves: Sequence[Move], copied: bool) -> None:
        """Items have been filled with the host's copies.

        copied: False if that has failed; these copies are dropped then, and everything that comes after them
        """
        for page_hash, item, slot in reversed(moves):
            valid = self._arriving.get(page_hash) == item
            if valid:
                del self._arriving[page_hash]
            if valid and copied and page_hash not in self._item_of:
                self._hash_of[item] = page_hash
                self._item_of[page_hash] = item
            self.host.end_reading(page_hash, slot)
            self._let_go(item)
        if not copied:
            for page_hash, _, slot in moves:
                if self.host.slot_of(page_hash) != slot:
                    continue
                if page_hash in self._item_of:
                    self.host.drop(page_hash)
                else:
                    self._forget(page_hash)

    def cached_hashes(self, count: int) -> list[bytes]:
        """The hashes of the `count` cached items that are evicted last, the very last one first."""
        return [self._hash_of[item] for item in islice(reversed(self._cached), count)]

    def start_saving(self, hashes: Iterable[bytes]) -> list[Move]:
        """Take slots for those of these items that are cached and have no copy on the host, to write them to files.

        The host keeps no copies of them: the slots are given back afterwards.
        """
        chosen = []
        for page_hash in hashes:
            item = self._item_of.get(page_hash, -1)
            if item in self._cached and page_hash not in self.host and page_hash not in self._leaving:
                slot = self.take_slot()
                if slot < 0:
                    break
                chosen.append(Move(page_hash, item, slot))
        moves = []
        for move in chosen:
            if self._item_of.get(move.page_hash, -1) == move.item:
                moves.append(move)
            else:  # it was forgotten, because a page before it was evicted for a slot
                self.host.give_back(move.slot)
        return moves

    def restore(self, page_hash: bytes, slot: int, parent: bytes) -> bool:
        """A file has been read to this slot, which has been taken. Returns whether the slot is now the host's copy of the hash.

        It is not if the host has a copy already, or if the page before, whose hash is `parent`, is not registered. The copy is
        protected from eviction.
        """
        if page_hash in self.host or page_hash in self._leaving or not self._register_restored(page_hash, parent):
            self.host.give_back(slot)
            return False
        self.host.put(page_hash, slot, saved=True)
        return True

    def forget_all(self) -> None:
        """Nothing is registered from now on, and what was cached is free. Items that are held stay held.

        After rollouts tens of thousands of items are registered, and freeing that many entries takes tens of milliseconds. So
        the dictionaries are replaced, and `take` frees the entries of the old ones. Free items are handed out in the order in
        which cached ones would have been evicted.
        """
        self._free += reversed(self._cached)
        self._give_up(self._cached, self._hash_of, self._item_of, self._leaving, self._arriving)
        self._cached = OrderedDict()
        self._hash_of = {}
        self._item_of = {}
        self._leaving = {}
        self._arriving = {}
        self.host.drop_all()

    def _give_up(self, *known: dict[Any, Any]) -> None:
        """Keep dictionaries that are no longer used until `take` has freed their entries."""
        self._given_up += known

    def _free_entries(self) -> None:
        """Free a few entries of what was given up."""
        last = self._given_up[-1]
        for _ in range(min(len(last), ENTRIES_FREED)):
            last.popitem()
        if not last:
            self._given_up.pop()

    def take(self) -> int:
        """An item that nobody holds: a free one, or the oldest cached one, which is evicted. The caller has to hold it."""
        self.num_changes += 1
        if self._given_up:
            self._free_entries()
        if self._free:
            return self._free.pop()
        item, _ = self._cached.popitem(last=False)
        page_hash = self._hash_of[item]
        self._leaving.pop(page_hash, None)
        if page_hash in self.host:
            del self._hash_of[item]
            del self._item_of[page_hash]
            self.host.expose(page_hash)
        else:
            self.num_lost += 1
            self._lose(page_hash)
        return item

    def release_one(self, item: int) -> None:
        """One sequence less holds this item."""
        if self._references[item] == 0:
            raise RuntimeError(f"cannot release {self._name} {item}: no sequence holds it")
        self._references[item] -= 1
        if self._references[item] == 0:
            if item in self._hash_of:
                self.num_changes += 1
                self._cached[item] = None
            else:
                self._free.append(item)

    def acquire_one(self, item: int) -> None:
        """One more sequence holds this item."""
        if self._references[item] == 0:
            self.num_changes += 1
            del self._cached[item]
            self.host.expose(self._hash_of[item], first=True)
        self._references[item] += 1

    def _hold(self, item: int) -> None:
        self._references[item] += 1
        self._in_transit.append(item)

    def _let_go(self, item: int) -> None:
        self._in_transit.remove(item)
        self.release_one(item)

    def _lose(self, page_hash: bytes) -> None:
        """An item without a copy on the host has been evicted. It is in none of the three conditions."""
        raise NotImplementedError

    def _forget(self, page_hash: bytes) -> None:
        """Drop what is registered under this hash."""
        raise NotImplementedError

    def _register_restored(self, page_hash: bytes, parent: bytes) -> bool:
        """Register what has come from a file under this hash. Returns False if what it depends on is not registered."""
        raise NotImplementedError

    def _cancel(self, page_hash: bytes) -> None:
        """Drop the host's copy of a hash. Copies that are on their way become void."""
        self.host.drop(page_hash)
        self._leaving.pop(page_hash, None)
        self._arriving.pop(page_hash, None)

    def check_conditions(self, holders: Iterable[Iterable[int]] | None) -> None:
        """Assert that free + cached + held == total, and that reference counts are those of `holders` and of copies."""
        free = set(self._free)
        cached = set(self._cached)
        held = {item for item, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "an item is in the free list twice"
        assert len(free) + len(cached) + len(held) == self._count, (
            f"free {len(free)} + cached {len(cached)} + held {len(held)} != {self._count}"
        )
        assert len(free | cached | held) == self._count, "an item is in two conditions"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert self._item_of == {h: p for p, h in self._hash_of.items()}, "hashes and items disagree"
        assert cached <= self._hash_of.keys(), "a cached item has no hash"
        assert not free & self._hash_of.keys(), "a free item has a hash"
        assert set(self._arriving.values()) <= set(self._in_transit), "a copy that arrives holds nothing"
        assert all(self._item_of.get(h) == item for h, item in self._leaving.items()), "an item leaves that is another one now"
        self.host.check_integrity()
        if holders is not None:
            counts = [0] * self._count
            for items in (*holders, self._in_transit):
                for item in items:
                    counts[item] += 1
            assert counts == self._references, "reference counts differ from what is held"
