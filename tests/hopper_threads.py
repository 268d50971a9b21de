"""The threads of the Hopper emulator: the thread blocks that run at a time, and the barriers at which their warps wait."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any


class EmulationError(Exception):
    """A deadlock, too many arrivals at a barrier, or an access outside of a tensor."""


class _Thread(threading.local):
    """State of one warp group: its thread block, and its products and copies that have not been waited for."""

    block: Block
    products: list[Any]
    copies: list[Callable[[], None]]
    stores: list[Callable[[], None]]


class Block:
    """One thread block: its number and its named barriers."""

    def __init__(self, index: int, grid: int, machine: Machine) -> None:
        self.index = index
        self.grid = grid
        self.machine = machine
        self.named: dict[int, NamedBarrier] = {}


class Machine:
    """What all thread blocks share: failures, a lock for atomics, and random delays of up to `delay` seconds.

    A wait of more than `patience` seconds counts as a deadlock.
    """

    def __init__(self, seed: int, patience: float, delay: float) -> None:
        self.patience = patience
        self.delay = delay
        self.failures: list[BaseException] = []
        self.lock = threading.Lock()
        self.random = random.Random(seed)

    def jitter(self, probability: float = 0.2) -> None:
        if self.random.random() < probability:
            time.sleep(self.random.random() * self.delay)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.patience
        while not ready():
            if self.failures or (not condition.wait(0.05) and time.monotonic() > deadline):
                raise EmulationError(f"deadlock: {what}")


class Barrier:
    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.phase = 0
        self.count = 1
        self.pending = 1
        self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        with self.condition:
            self.pending -= count
            self.bytes += expected_bytes
            self._turn()

    def complete(self, count: int) -> None:
        with self.condition:
            self.bytes -= count
            self._turn()

    def _turn(self) -> None:
        if self.pending < 0:
            raise EmulationError("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.condition.notify_all()

    def wait(self, parity: int) -> None:
        with self.condition:
            current.block.machine.wait(self.condition, lambda: (self.phase & 1) != parity, "mbarrier")


class NamedBarrier:
    """A named barrier of two warpgroups: one arrives, and the other waits for it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.arrived = 0
        self.turns = 0  # how often both have arrived

    def arrive(self) -> int:
        with self.condition:
            turn = self.turns
            self.arrived += 1
            if self.arrived == 2:
                self.arrived = 0
                self.turns += 1
                self.condition.notify_all()
            return turn

    def sync(self) -> None:
        turn = self.arrive()
        with self.condition:
            current.block.machine.wait(self.condition, lambda: self.turns > turn, "named barrier")


class Barriers:
    def __init__(self, count: int) -> None:
        self.items = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.items[int(i)]


current = _Thread()


def copy_to_shared(target: Any, source: Any, mask: Any) -> None:
    """A warpgroup's copy, which takes place when it waits for all of its copies. Numbers that are masked out arrive as 0."""
    target.data.fill_(float("nan"))
    current.copies.append(lambda: target.store(source.load(mask, 0)))


def wait_copies(pending: int) -> None:
    assert pending == 0, "groups are not told apart"
    while current.copies:
        current.copies.pop(0)()
