"""Which adapters have a slot and pages on the device, and which are worth keeping there. Plain Python, no torch.

    pool = LoraPool(num_slots=16, num_pages=64, max_outer_bytes=1 << 30, loader=loader)
    pool.join(adapter)                       # one more sequence has it, and will end with `leave`
    pool.hold(adapter)                       # this sequence holds it from now on; False if there is no room now
    pool.is_ready(adapter)                   # whether its weights are loaded; raises what loading raised
    pool.slot(adapter)
    pool.release(adapter)

An adapter that a sequence holds stays in memory. An adapter that no sequence holds stays as well, until another one needs its
room; the least recently used one goes first. If the adapter is not in memory, `hold` starts to load it in the loader's thread.
Left out: which sequences wait for which adapter (scheduler/adapter_seats.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, as it was loaded: another load under the same name makes another `Adapter`. Ranks send it to each other.

    number:      of the load, which no other adapter of the engine has; or of its content, which only equal adapters share
    num_pages:   pages of the pool that it takes
    outer_bytes: bytes that it takes on the device outside of its pages
    is_eager:    steps with it run without CUDA graphs
    serial:      number of the load, which no other adapter of the engine has
    """

    name: str
    number: int
    num_pages: int
    outer_bytes: int = 0
    is_eager: bool = False
    serial: int = 0


class Loader(Protocol):
    """Fills the memory of the device."""

    def settle(self) -> None:
        """Record which loads have ended: `is_done` reports them from now on. All ranks call it at the same point."""

    def start(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        """Begin to load an adapter into a slot and pages. No step that is launched before `is_done` is true reads them."""

    def is_done(self, adapter: Adapter) -> bool:
        """Whether the adapter is loaded, as of the last `settle`. Raises what loading has raised."""

    def evicted(self, adapter: Adapter, slot: int) -> None:
        """The adapter has no memory any more."""

    def unused(self, adapter: Adapter) -> None:
        """No sequence has the adapter any more."""


@dataclass(slots=True)
class _Place:
    """Where an adapter is, and how many sequences hold it."""

    slot: int
    pages: list[int]
    references: int = 0
    ready: bool = False


@dataclass(slots=True)
class LoraPool:
    """Owner of slots and pages. Every operation is O(1) per page, apart from evictions."""

    num_slots: int
    num_pages: int
    max_outer_bytes: int
    loader: Loader
    num_loads: int = 0
    _users: Counter[Adapter] = field(default_factory=Counter)
    _places: dict[Adapter, _Place] = field(default_factory=dict)
    _idle: OrderedDict[Adapter, None] = field(default_factory=OrderedDict)  # oldest first
    _slots: list[int] = field(init=False)
    _pages: list[int] = field(init=False)
    _outer_bytes: int = 0

    def __post_init__(self) -> None:
        self._slots = list(range(self.num_slots - 1, -1, -1))
        self._pages = list(range(self.num_pages - 1, -1, -1))

    def __contains__(self, adapter: Adapter) -> bool:
        """Whether the adapter has memory, loaded or being loaded."""
        return adapter in self._places

    @property
    def num_held(self) -> int:
        """Adapters that sequences hold."""
        return len(self._places) - len(self._idle)

    def is_used(self, adapter: Adapter) -> bool:
        """Whether a sequence has the adapter, or waits for room for it."""
        return adapter in self._users

    def join(self, adapter: Adapter) -> None:
        """One more sequence has the adapter, and waits for it or holds it."""
        self._users[adapter] += 1

    def leave(self, adapter: Adapter) -> None:
        """One sequence fewer has the adapter."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self.loader.unused(adapter)

    def slot(self, adapter: Adapter) -> int:
        """The slot of an adapter that is held."""
        return self._places[adapter].slot

    def hold(self, adapter: Adapter) -> bool:
        """One more sequence holds the adapter. Loads it if it is not in memory. Returns False if there is no room now."""
        if adapter not in self._places and not self._place(adapter):
            return False
        self._places[adapter].references += 1
        self._idle.pop(adapter, None)
        return True

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether an adapter that is held has been loaded. Raises what loading has raised."""
        place = self._places[adapter]
        if not place.ready:
            place.ready = self.loader.is_done(adapter)
        return place.ready

    def release(self, adapter: Adapter) -> None:
        """One sequence fewer holds the adapter. It stays in memory, unless it could not be loaded."""
        place = self._places[adapter]
        if place.references == 0:
            raise RuntimeError(f"cannot release adapter {adapter.name!r}: no sequence holds it")
        place.references -= 1
        if place.references == 0:
            self._idle[adapter] = None
            if self._has_failed(adapter):
                self.drop(adapter)

    def drop(self, adapter: Adapter) -> None:
        """The adapter will not be asked for again: free its memory, unless a sequence holds it or it is still being loaded."""
        if adapter in self._idle and self._settled(adapter):
            self._evict(adapter)

    def release_all(self) -> None:
        """No sequence is left, so none has or holds an adapter."""
        for adapter in [*self._users]:
            self._users[adapter] = 1
            self.leave(adapter)
        for adapter, place in self._places.items():
            place.references = 0
            self._idle[adapter] = None

    def check_integrity(self, held: list[Adapter]) -> None:
        """Assert that each slot and page has one owner, and that references agree with `held`, one entry for each sequence."""
        slots = self._slots + [place.slot for place in self._places.values()]
        pages = self._pages + [page for place in self._places.values() for page in place.pages]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of an adapter is lost"
        assert sorted(pages) == list(range(self.num_pages)), "a page of adapters is lost"
        for adapter, place in self._places.items():
            assert place.references == held.count(adapter), f"adapter {adapter.name!r} has wrong references"
            assert (place.references == 0) == (adapter in self._idle)
        assert self._outer_bytes == sum(adapter.outer_bytes for adapter in self._places)

    def _place(self, adapter: Adapter) -> bool:
        """Give an adapter a slot and pages, and begin to load it. Returns False if adapters in use leave too little room."""
        idle = [each for each in self._idle if self._settled(each)]
        free_pages = len(self._pages) + sum(len(self._places[each].pages) for each in idle)
        used_bytes = self._outer_bytes - sum(each.outer_bytes for each in idle)
        fits_outer = used_bytes + adapter.outer_bytes <= self.max_outer_bytes
        if adapter.num_pages > free_pages or not (self._slots or idle) or not fits_outer:
            return False
        for each in idle:
            enough = self._outer_bytes + adapter.outer_bytes <= self.max_outer_bytes
            if self._slots and len(self._pages) >= adapter.num_pages and enough:
                break
            self._evict(each)
        place = _Place(self._slots.pop(), [self._pages.pop() for _ in range(adapter.num_pages)])
        self._places[adapter] = place
        self._outer_bytes += adapter.outer_bytes
        self.num_loads += 1
        self.loader.start(adapter, place.slot, place.pages)
        return True

    def _settled(self, adapter: Adapter) -> bool:
        """Whether no thread writes to the adapter's memory."""
        return self._has_failed(adapter) or self.is_ready(adapter)

    def _has_failed(self, adapter: Adapter) -> bool:
        try:
            self.is_ready(adapter)
        except Exception:
            return True
        return False

    def _evict(self, adapter: Adapter) -> None:
        place = self._places.pop(adapter)
        del self._idle[adapter]
        self._slots.append(place.slot)
        self._pages += reversed(place.pages)
        self._outer_bytes -= adapter.outer_bytes
        self.loader.evicted(adapter, place.slot)
