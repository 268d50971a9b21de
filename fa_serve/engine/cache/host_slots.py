"""Which slots of the host's memory hold copies of which pages or states. Plain Python, no torch.

    slots = HostSlots()
    slots.grow(64)                           # the memory of 64 more slots is there
    slot, evicted = slots.take()             # a slot to copy to; the copy that it held before, if any, is gone
    slots.put(page_hash, slot)               # the copy is complete: it can be found by the hash of its page
    slot = slots.begin_reading(page_hash)    # nobody writes to the slot until `end_reading(slot)`

A slot is free, taken (being written), or holds the copy of one hash. Copies are evicted the least recently used one first. One
that is protected is not evicted: the device is about to give up what it is a copy of. Left out: the memory
(runner/host_memory.py), and when something is copied (host_tier.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class HostSlots:
    """Owner of the host's slots of one kind. Every operation is O(1)."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_evictions = 0
        self._free: list[int] = []
        self._taken: set[int] = set()
        self._slot_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._reading: set[int] = set()  # slots that are being read; they are free afterwards if their copy has been dropped

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

    def grow(self, count: int) -> None:
        """There are `count` more slots."""
        self._free += range(self.num_slots + count - 1, self.num_slots - 1, -1)
        self.num_slots += count

    def take(self) -> tuple[int, bytes] | None:
        """A slot to write to, and the hash whose copy is evicted for it (empty if none); None if all copies are to be kept."""
        evicted = b""
        if not self._free:
            if not self._evictable:
                return None
            evicted, _ = self._evictable.popitem(last=False)
            self.num_evictions += 1
            self._free.append(self._slot_of.pop(evicted))
        slot = self._free.pop()
        self._taken.add(slot)
        return slot, evicted

    def put(self, page_hash: bytes, slot: int) -> None:
        """What was written to this slot, which has been taken, is the copy of a hash. It is protected."""
        self._taken.remove(slot)
        self._slot_of[page_hash] = slot

    def give_back(self, slot: int) -> None:
        """What was written to this slot, which has been taken, is of no use."""
        self._taken.remove(slot)
        self._free.append(slot)

    def protect(self, page_hash: bytes) -> None:
        """The copy of this hash, if there is one, is not evicted."""
        self._evictable.pop(page_hash, None)

    def expose(self, page_hash: bytes, *, first: bool = False) -> None:
        """The copy of this hash, if there is one, may be evicted: as the most recently used one, or before all others."""
        if (slot := self._slot_of.get(page_hash)) is not None and slot not in self._reading:
            self._evictable[page_hash] = None
            self._evictable.move_to_end(page_hash, last=not first)

    def begin_reading(self, page_hash: bytes) -> int:
        """The slot with the copy of this hash. It stays as it is until it has been read."""
        slot = self._slot_of[page_hash]
        self.protect(page_hash)
        self._reading.add(slot)
        return slot

    def end_reading(self, page_hash: bytes, slot: int) -> None:
        """The slot has been read. Its copy is the first to be evicted, because the device has got the same."""
        self._reading.remove(slot)
        if self._slot_of.get(page_hash) == slot:
            self.expose(page_hash, first=True)
        else:
            self._free.append(slot)

    def drop(self, page_hash: bytes) -> None:
        """The copy of this hash, if there is one, is of no use."""
        slot = self._slot_of.pop(page_hash, None)
        if slot is not None:
            self._evictable.pop(page_hash, None)
            if slot not in self._reading:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Assert that each slot is in one state."""
        used = set(self._slot_of.values())
        assert len(used) == len(self._slot_of), "two hashes have one slot"
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is in the free list twice"
        assert not free & used, "a slot that is free has a copy"
        assert not self._taken & (free | used), "a slot that is written is in another state"
        dropped = self._reading - used
        assert not dropped & (free | self._taken), "a slot that is read may be written"
        assert len(free) + len(used) + len(self._taken) + len(dropped) == self.num_slots, "a slot is lost"
        assert self._evictable.keys() <= self._slot_of.keys(), "a copy that is gone can be evicted"
        assert not {self._slot_of[each] for each in self._evictable} & self._reading, "a slot that is read can be evicted"
