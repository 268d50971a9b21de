"""The threads of the Hopper emulator: the thread blocks that run at a time, the barriers at which their warps wait, and what
takes place only when they wait for it: copies and products."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class EmulationError(Exception):
    """A deadlock, too many arrivals at a barrier, or an access outside of a tensor."""


class _Thread(threading.local):
    """State of one partition: its thread block, its warps, and its products and copies that have not been waited for."""

    block: Block
    warps: int
    copies: list[Callable[[], None]]
    products: list[Any]
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

    It is a deadlock when every thread waits and none of them may go on, and when one waits for more than `patience` seconds.
    """

    def __init__(self, seed: int, patience: float, delay: float) -> None:
        self.patience = patience
        self.delay = delay
        self.failures: list[BaseException] = []
        self.lock = threading.Lock()
        self.random = random.Random(seed)
        self.running = 0
        """Threads that have begun and not ended, without those that only wait for the threads that they have started."""
        self._waits: dict[int, Callable[[], bool]] = {}
        """What each waiting thread waits for."""

    def count(self, threads: int) -> None:
        """So many threads begin, or end where the number is negative."""
        with self.lock:
            self.running += threads

    def jitter(self, probability: float = 0.2) -> None:
        if self.random.random() < probability:
            time.sleep(self.random.random() * self.delay)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.patience
        self._waits[threading.get_ident()] = ready
        try:
            while not ready():
                if self.failures or (not condition.wait(0.05) and (self._is_stuck() or time.monotonic() > deadline)):
                    raise EmulationError(f"deadlock: {what}")
        finally:
            del self._waits[threading.get_ident()]

    def _is_stuck(self) -> bool:
        """No thread can go on. A thread that has just been let go counts as waiting, but what it waits for has come."""
        waits = list(self._waits.values())
        return len(waits) == self.running and not any(ready() for ready in waits)


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


class ThreadCopies:
    """Copies by threads (cp.async). They take place when the partition waits for them or arrives at a barrier with them, as
    late as they may. Numbers that are masked out arrive as 0.
    """

    @staticmethod
    def copy_to_shared(target: Any, source: Any, mask: Any = None) -> None:
        target.data.fill_(float("nan"))
        current.copies.append(lambda: target.store(source.load(mask)))

    @staticmethod
    def mbarrier_arrive(barrier: Barrier, increment_count: bool = True) -> None:
        """Each thread arrives once its copies have. With `increment_count` the barrier would count that arrival twice."""
        current.block.machine.jitter()
        for copy in current.copies:
            copy()
        current.copies = []
        if not increment_count:
            barrier.arrive(32 * current.warps)

    @staticmethod
    def commit_group() -> None:
        """Groups are not told apart: `wait_group` waits for all of them."""

    @staticmethod
    def wait_group(pending: int) -> None:
        assert pending == 0, "groups are not told apart"
        for copy in current.copies:
            copy()
        current.copies = []


class Product:
    """An asynchronous matrix product, which reads its operands when it is waited for."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.a = a
        self.b = b
        self.acc = acc
        self.use_acc = use_acc
        self.value: torch.Tensor | None = None

    def run(self) -> None:
        self.value = self.a.data.float() @ self.b.data.float()
        if self.use_acc:
            self.value = self.value + (self.acc.value if isinstance(self.acc, Product) else self.acc)


def start_product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    current.products.append(Product(a, b, acc, use_acc))
    return current.products[-1]


def wait_products(pending: int, deps: list[Product]) -> Any:
    current.block.machine.jitter(0.5)
    while len(current.products) > int(pending):
        current.products.pop(0).run()
    # a product that still runs may be passed on as an accumulator; any other use of it is an error
    done = [dep.value if isinstance(dep, Product) and dep.value is not None else dep for dep in deps]
    return done[0] if len(deps) == 1 else tuple(done)


def wait_stores(pending: int) -> None:
    current.block.machine.jitter()
    while len(current.stores) > pending:
        current.stores.pop(0)()
