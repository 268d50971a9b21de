"""The threads of the Hopper emulator: the thread blocks that run at a time, the barriers at which their warps wait, and what
takes place only when they wait for it: copies and products.

One thread runs at a time, until it waits. So threads do not compete for Python's lock, no delay takes time, a deadlock is seen
at once, and the same seed gives the same order on any machine.
"""

from __future__ import annotations

import random
import threading
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


class _Wait:
    """A thread that does not run: it goes on at or after the time `until`, once `ready` returns True."""

    def __init__(self, ready: Callable[[], bool], until: float) -> None:
        self.ready = ready
        self.until = until
        self.turn = threading.Semaphore(0)


class Machine:
    """What all thread blocks share: failures, and whose turn it is.

    Time stands still while a thread runs. Random delays of up to 1 make others run first. It is a deadlock when every thread
    waits and none of them may go on: those that wait then fail, and so come to their ends.
    """

    def __init__(self, seed: int) -> None:
        self.failures: list[BaseException] = []
        self._random = random.Random(seed)
        self._time = 0.0
        self._waits: list[_Wait] = []

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Run each in a thread, and return when all have ended."""
        ended = []

        def run_one(function: Callable[[], None], wait: _Wait) -> None:
            wait.turn.acquire()
            try:
                function()
            except BaseException as error:
                self.failures.append(error)
            ended.append(function)
            self._next().turn.release()

        for function in functions:
            wait = _Wait(lambda: True, self._time)
            self._waits.append(wait)
            threading.Thread(target=run_one, args=(function, wait), daemon=True).start()
        self._give_turn(lambda: len(ended) == len(functions), self._time)

    def jitter(self, probability: float = 0.2) -> None:
        if self._random.random() < probability:
            self._give_turn(lambda: True, self._time + self._random.random())

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        if not ready():
            self._give_turn(lambda: ready() or bool(self.failures), self._time)
            if not ready():
                raise EmulationError(f"deadlock: {what}")

    def _give_turn(self, ready: Callable[[], bool], until: float) -> None:
        """Others run, and this thread again when it is ready and its time has come."""
        mine = _Wait(ready, until)
        self._waits.append(mine)
        chosen = self._next()
        if chosen is not mine:
            chosen.turn.release()
            mine.turn.acquire()

    def _next(self) -> _Wait:
        """The thread that goes on: any that may go on now, or the one whose delay is over first."""
        able = [wait for wait in self._waits if wait.ready()]
        if not able:
            self.failures.append(EmulationError("deadlock: every thread waits"))
            able = [wait for wait in self._waits if wait.ready()]
        self._time = max(self._time, min(wait.until for wait in able))
        chosen = self._random.choice([wait for wait in able if wait.until <= self._time])
        self._waits.remove(chosen)
        return chosen


class Barrier:
    def __init__(self) -> None:
        self.phase = 0
        self.count = 1
        self.pending = 1
        self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        self.pending -= count
        self.bytes += expected_bytes
        self._turn()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._turn()

    def _turn(self) -> None:
        if self.pending < 0:
            raise EmulationError("more arrivals at an mbarrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def wait(self, parity: int) -> None:
        current.block.machine.wait(lambda: (self.phase & 1) != parity, "mbarrier")


class NamedBarrier:
    """A named barrier of two warpgroups: one arrives, and the other waits for it."""

    def __init__(self) -> None:
        self.arrived = 0
        self.turns = 0  # how often both have arrived

    def arrive(self) -> int:
        turn = self.turns
        self.arrived += 1
        if self.arrived == 2:
            self.arrived = 0
            self.turns += 1
        return turn

    def sync(self) -> None:
        turn = self.arrive()
        current.block.machine.wait(lambda: self.turns > turn, "named barrier")


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
