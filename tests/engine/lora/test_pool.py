"""Slots and pages of adapters: who stays, who goes, who waits."""

from __future__ import annotations

import random

import pytest

from fa_serve.engine.lora.pool import Adapter, LoraPool


class FakeLoader:
    """Loads when it is told to. `failing` adapters raise."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, list[int]]] = []
        self.gone: list[str] = []
        self.left: list[str] = []
        self.done: set[Adapter] = set()
        self.failing: set[Adapter] = set()
        self.is_instant = True

    def start(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        self.started.append((adapter.name, slot, pages))
        if self.is_instant:
            self.done.add(adapter)

    def settle(self) -> None: ...

    def is_done(self, adapter: Adapter) -> bool:
        if adapter in self.failing:
            raise OSError("no such file")
        return adapter in self.done

    def evicted(self, adapter: Adapter, slot: int) -> None:
        self.gone.append(adapter.name)
        self.done.discard(adapter)

    def unused(self, adapter: Adapter) -> None:
        self.left.append(adapter.name)


def make(num_slots: int = 3, num_pages: int = 4, max_outer_bytes: int = 100) -> tuple[LoraPool, FakeLoader]:
    loader = FakeLoader()
    return LoraPool(num_slots, num_pages, max_outer_bytes, loader), loader


def adapters(*sizes: int) -> list[Adapter]:
    return [Adapter(name, number, size) for number, (name, size) in enumerate(zip("abcdefgh", sizes, strict=False), 1)]


def test_the_least_recently_used_adapter_goes_first() -> None:
    pool, loader = make()
    a, b, c, d = adapters(1, 2, 1, 2)
    for each in (a, b, c):
        assert pool.hold(each)
        assert pool.is_ready(each)
    assert not pool.hold(d), "all are held"
    for each in (b, c, a):
        pool.release(each)
    assert pool.hold(d)
    assert loader.gone == ["b"], "its two pages suffice"
    assert pool.hold(c), "it has stayed"
    assert [name for name, *_ in loader.started] == ["a", "b", "c", "d"]
    pool.check_integrity([d, c])


def test_an_adapter_that_is_being_loaded_stays() -> None:
    pool, loader = make(num_pages=2)
    a, b = adapters(2, 1)
    loader.is_instant = False
    assert pool.hold(a)
    assert not pool.is_ready(a)
    pool.release(a)
    assert not pool.hold(b), "a thread writes to both pages"
    loader.done.add(a)
    assert pool.hold(b)
    assert loader.gone == ["a"]


def test_an_adapter_that_failed_is_loaded_again() -> None:
    pool, loader = make()
    [a] = adapters(1)
    loader.failing.add(a)
    pool.hold(a)
    with pytest.raises(OSError, match="no such file"):
        pool.is_ready(a)
    pool.release(a)
    assert a not in pool
    loader.failing.clear()
    assert pool.hold(a)
    assert pool.is_ready(a)
    assert len(loader.started) == 2


def test_bytes_beside_the_pages_are_bounded() -> None:
    pool, loader = make()
    a = Adapter("a", 1, 1, outer_bytes=60)
    b = Adapter("b", 2, 1, outer_bytes=60)
    assert pool.hold(a)
    assert not pool.hold(b)
    pool.release(a)
    assert pool.hold(b)
    assert loader.gone == ["a"]
    assert not pool.hold(Adapter("c", 3, 1, outer_bytes=101))


def test_the_last_sequence_tells_the_loader() -> None:
    pool, loader = make()
    [a] = adapters(1)
    pool.join(a)
    pool.join(a)
    pool.leave(a)
    assert pool.is_used(a)
    assert not loader.left
    pool.leave(a)
    assert loader.left == ["a"]
    assert not pool.is_used(a)


def test_an_adapter_that_nobody_holds_is_not_released() -> None:
    pool, _ = make()
    [a] = adapters(1)
    pool.hold(a)
    pool.release(a)
    with pytest.raises(RuntimeError, match="no sequence holds it"):
        pool.release(a)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_in_random_traffic(seed: int) -> None:
    draw = random.Random(seed)
    pool, loader = make(num_slots=4, num_pages=7)
    known = [Adapter(str(i), i, draw.randint(1, 3)) for i in range(1, 12)]
    held: list[Adapter] = []
    for _ in range(500):
        loader.is_instant = draw.random() < 0.5
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
        elif pool.hold(adapter := draw.choice(known)):
            held.append(adapter)
        if draw.random() < 0.7:
            loader.done.update(known)
        pool.check_integrity(held)
        pages = [page for adapter in held for page in pool._places[adapter].pages if held.count(adapter) == 1]
        assert len(pages) == len(set(pages))
