"""Which slots of the host's memory hold copies of which pages or states. Plain Python, no torch.

    slots = HostSlots()
    slots.grow(64)                           # the memory of 64 more slots is there
    slot, evicted = slots.take()             # a slot to copy to; the copy that it held before, if any, is gone
    slots.put(page_hash, slot)               # the copy is complete: it can be found by the hash of its page
    slot = slots.begin_reading(page_hash)    # nobody writes to the slot until `end_reading(page_hash, slot)`
    slot = slots.begin_saving(page_hash)     # the same, for a file; the order of eviction stays as it is

A slot is free, taken (being written), or holds the copy of one hash. The least recently used copy is evicted first. A protected
copy is not evicted, because the device is about to evict the original. A copy that is being read is not evicted either. Left
out: the memory (runner/host_memory.py), and when something is copied (host_tier.py, folder_tier.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain


class HostSlots:
    """Owner of the host's slots of one kind. Every operation is O(1), apart from skipping copies that are being read.

    unsaved: copies that have not been written to a file, oldest first; empty unless `keeps_unsaved`, which a folder sets
    num_unsaved_evictions: how many copies were evicted while they were `unsaved`
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_evictions = 0
        self.num_unsaved_evictions = 0
        self.keeps_unsaved = False
        self.unsaved: OrderedDict[bytes, None] = OrderedDict()
        self._free: list[int] = []
        self._taken: set[int] = set()
        self._slot_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._reads: Counter[int] = Counter()  # readers by slot; a slot whose copy was dropped is free after the last one

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._slot_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slot_of)

    def __len__(self) -> int:
        """How many copies there are."""
        return len(self._slot_of)

    def slot_of(self, page_hash: bytes) -> int:
        """The slot with the copy of this hash; -1 without one."""
        return self._slot_of.get(page_hash, -1)

    def set_aside(self, slots: Iterable[int]) -> None:
        """Never use these slots, which `grow` has not added yet: something may still write to them."""
        self._taken.update(slots)

    def grow(self, count: int) -> None:
        """Add `count` slots."""
        more = range(self.num_slots + count - 1, self.num_slots - 1, -1)
        self._free += [slot for slot in more if slot not in self._taken]
        self.num_slots += count

    def take(self, kept: Collection[bytes] | None = None) -> tuple[int, bytes] | None:
        """A slot to write to, and the hash whose copy is evicted for it (empty if none); None if all copies are to be kept.

        kept: hashes whose copies are kept. If it is given, protected copies of all other hashes may be evicted
        """
        evicted = b""
        if not self._free:
            candidates: Iterable[bytes] = self._evictable
            if kept is not None:  # the newest protected copies first: they were made for what the device evicts last
                candidates = (each for each in chain(self._evictable, reversed(self._slot_of)) if each not in kept)
            evicted = next((each for each in candidates if not self._reads[self._slot_of[each]]), b"")
            if not evicted:
                return None
            self.num_evictions += 1
            self.num_unsaved_evictions += evicted in self.unsaved
            self._free.append(self._slot_of[evicted])
            self._remove(evicted)
        slot = self._free.pop()
        self._taken.add(slot)
        return slot, evicted

    def put(self, page_hash: bytes, slot: int, *, saved: bool = False) -> None:
        """This slot, which has been taken, holds the copy of a hash now. The copy is protected. saved: it has a file"""
        self._taken.remove(slot)
        self._slot_of[page_hash] = slot
        if self.keeps_unsaved and not saved:
            self.unsaved[page_hash] = None

    def give_back(self, slot: int) -> None:
        """Free this slot, which has been taken, without a copy in it."""
        self._taken.remove(slot)
        self._free.append(slot)

    def protect(self, page_hash: bytes) -> None:
        """Keep the copy of this hash, if there is one, from being evicted."""
        self._evictable.pop(page_hash, None)

    def expose(self, page_hash: bytes, *, first: bool = False) -> None:
        """The copy of this hash, if there is one, may be evicted: as the most recently used one, or `first` of all."""
        if page_hash in self._slot_of:
            self._evictable[page_hash] = None
            self._evictable.move_to_end(page_hash, last=not first)

    def begin_reading(self, page_hash: bytes) -> int:
        """The slot with the copy of this hash. It stays as it is until it has been read."""
        self.protect(page_hash)
        return self.begin_saving(page_hash)

    def end_reading(self, page_hash: bytes, slot: int) -> None:
        """The slot has been read. Its copy is the first to be evicted, because the device has the same content now."""
        self.end_saving(page_hash, slot)
        if self._slot_of.get(page_hash) == slot:
            self.expose(page_hash, first=True)

    def stop_saving(self) -> None:
        """Copies are not written to files any more."""
        self.keeps_unsaved = False
        self.unsaved.clear()

    def begin_saving(self, page_hash: bytes) -> int:
        """The slot with the copy of this hash. It stays as it is until it has been written to a file."""
        slot = self._slot_of[page_hash]
        self._reads[slot] += 1
        return slot

    def end_saving(self, page_hash: bytes, slot: int) -> None:
        """The slot has been written to a file. It is free if its copy has been dropped meanwhile."""
        self._reads[slot] -= 1
        if not self._reads[slot]:
            del self._reads[slot]
            if self._slot_of.get(page_hash) != slot:
                self._free.append(slot)

    def drop(self, page_hash: bytes) -> None:
        """Drop the copy of this hash, if there is one."""
        slot = self._slot_of.get(page_hash)
        if slot is not None:
            self._remove(page_hash)
            if not self._reads[slot]:
                self._free.append(slot)

    def drop_all(self) -> None:
        """Drop every copy. Unless some are being read, the interpreter's work does not grow with the number of copies."""
        slots = [*self._slot_of.values()]
        if self._reads:
            slots = [slot for slot in slots if slot not in self._reads]
        self._free += slots
        for known in (self._slot_of, self._evictable, self.unsaved):
            known.clear()

    def _remove(self, page_hash: bytes) -> None:
        del self._slot_of[page_hash]
        self._evictable.pop(page_hash, None)
        self.unsaved.pop(page_hash, None)

    def check_integrity(self) -> None:
        """Assert that each slot is in one state."""
        used = set(self._slot_of.values())
        assert len(used) == len(self._slot_of), "two hashes have one slot"
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is in the free list twice"
        assert not free & used, "a slot that is free has a copy"
        assert not self._taken & (free | used), "a slot that is written is in another state"
        dropped = {slot for slot, count in self._reads.items() if count} - used
        assert not dropped & (free | self._taken), "a slot that is read may be written"
        assert len(free) + len(used) + len(self._taken) + len(dropped) == self.num_slots, "a slot is lost"
        assert self._evictable.keys() <= self._slot_of.keys(), "a copy that is gone can be evicted"
        assert self.unsaved.keys() <= self._slot_of.keys(), "a copy that is gone is to be saved"
