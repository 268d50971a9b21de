"""A host's memory for the devices of `scheduling`: copies that take as many steps as a test says, and fail where it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scheduling import Device, StateDevice
from state_traffic import Traffic

from fa_serve.engine.cache.host_tier import CopyError, HostTier, Lane
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable


class PlannedCopy:
    """Copies that end after so many looks at them. run: makes them, at their beginning or at their end"""

    def __init__(self, run: Callable[[], None], looks: int, *, late: bool, fails: bool) -> None:
        self._run = run if late else run()
        self._looks = looks
        self._fails = fails

    def is_done(self) -> bool:
        if self._looks:
            self._looks -= 1
            return False
        if self._fails:
            self._fails = False
            raise CopyError("planted")
        if self._run is not None:
            self._run()
            self._run = None
        return True

    def wait(self) -> None:
        self._looks = 0


class PlannedCopies:
    """Slots for the rows of a device: `read` and `write` take a row's content.

    plan: for each batch of copies (looks, late, fails); fails is "", "begin" or "end"
    """

    row_bytes = 1

    def __init__(self, num_slots: int, plan: Iterator[tuple[int, bool, str]]) -> None:
        self.num_slots = num_slots
        self.slots: dict[int, Any] = {}
        self.plan = plan
        self.read: Callable[[int], Any]
        self.write: Callable[[int, Any], None]

    def to_host(self, rows: Sequence[int], slots: Sequence[int]) -> PlannedCopy:
        return self._copy(lambda: self.slots.update((slot, self.read(row)) for row, slot in zip(rows, slots, strict=True)))

    def to_device(self, slots: Sequence[int], rows: Sequence[int]) -> PlannedCopy:
        def copy() -> None:
            for slot, row in zip(slots, rows, strict=True):
                self.write(row, self.slots[slot])

        return self._copy(copy)

    def _copy(self, run: Callable[[], None]) -> PlannedCopy:
        looks, late, fails = next(self.plan)
        if fails == "begin":
            raise CopyError("planted")
        return PlannedCopy(run, looks, late=late, fails=fails == "end")


def make_tier(
    num_slots: int, num_state_slots: int, plan: Iterator[tuple[int, bool, str]], depth: int = 64
) -> Callable[[PageTable, StateTable | None], HostTier]:
    """What `scheduling.make_scheduler` takes. The memory is connected to a device by `connect`."""

    def make(pages: PageTable, states: StateTable | None) -> HostTier:
        lanes = [Lane(pages, PlannedCopies(num_slots, plan), min(depth, pages.num_pages))]
        if states is not None:
            lanes.append(Lane(states, PlannedCopies(num_state_slots, plan), states.num_states))
        return HostTier(*lanes)

    return make


def connect(traffic: Traffic) -> HostTier:
    """Let the tier of a traffic's scheduler copy what its device holds."""
    tier = traffic.scheduler.tier
    device = traffic.device
    size = traffic.scheduler.pages.page_size
    assert tier is not None
    _connect_pages(tier.lanes[0].copies, device, size)
    if isinstance(device, StateDevice):
        states = tier.lanes[1].copies
        assert isinstance(states, PlannedCopies)
        states.read = device.states.__getitem__
        states.write = device.states.__setitem__
    return tier


def _connect_pages(copies: Any, device: Device, size: int) -> None:
    def write(page: int, content: list[int | None]) -> None:
        device.memory.update(((page, place), token) for place, token in enumerate(content) if token is not None)

    copies.read = lambda page: [device.memory.get((page, place)) for place in range(size)]
    copies.write = write
