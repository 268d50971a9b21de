"""Sequences wait for their adapters outside of the queue, and nobody waits for them."""

from __future__ import annotations

from fa_serve.engine.lora.pool import Adapter, LoraPool
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler import adapter_seats
from fa_serve.engine.scheduler.adapter_seats import AdapterSeats
from fa_serve.engine.scheduler.sequence import SequenceState


class SlowLoader:
    """Has loaded what is in `done`."""

    def __init__(self) -> None:
        self.done: set[Adapter] = set()
        self.failing: set[Adapter] = set()

    def start(self, adapter: Adapter, slot: int, pages: list[int]) -> None: ...

    def settle(self) -> None: ...

    def is_done(self, adapter: Adapter) -> bool:
        if adapter in self.failing:
            raise OSError("no such file")
        return adapter in self.done

    def evicted(self, adapter: Adapter, slot: int) -> None:
        self.done.discard(adapter)

    def unused(self, adapter: Adapter) -> None: ...


def sequence(adapter: Adapter | None) -> SequenceState:
    return SequenceState(Request("r", [1], SamplingParams(), max_tokens=1, adapter=adapter))


def make(num_slots: int = 1) -> tuple[AdapterSeats, SlowLoader, Adapter, Adapter]:
    loader = SlowLoader()
    return AdapterSeats(LoraPool(num_slots, num_slots, 0, loader)), loader, Adapter("a", 1, 1), Adapter("b", 2, 1)


def test_a_sequence_waits_until_its_adapter_is_loaded() -> None:
    seats, loader, a, _ = make()
    assert seats.add(sequence(None)), "the base waits for nothing"
    first = sequence(a)
    assert not seats.add(first)
    assert list(seats) == [first]
    assert seats.arrivals() == ([], [])
    loader.done.add(a)
    assert seats.arrivals() == ([first], [])
    assert not seats
    assert seats.add(sequence(a)), "it is there"
    seats.check_integrity()


def test_an_adapter_without_room_waits_until_no_sequence_holds_another_one() -> None:
    seats, loader, a, b = make()
    loader.done |= {a, b}
    first = sequence(a)
    second = sequence(b)
    assert seats.add(first)
    assert not seats.add(second)
    assert seats.arrivals() == ([], [])
    seats.remove(first)
    loader.done.add(b)
    assert seats.arrivals() == ([second], [])
    seats.remove(second)
    seats.check_integrity()


def test_adapters_in_memory_do_not_pass_the_first_forever(monkeypatch) -> None:
    monkeypatch.setattr(adapter_seats, "MAX_PASSED", 3)
    seats, loader, a, b = make()
    loader.done |= {a, b}
    running = [sequence(a)]
    assert seats.add(running[0])
    waiting = sequence(b)
    assert not seats.add(waiting)
    for _ in range(3):
        running.append(sequence(a))
        assert seats.add(running[-1])
    late = sequence(a)
    assert not seats.add(late), "three have passed"
    for each in running:
        seats.remove(each)
    loader.done |= {a, b}
    joined, _ = seats.arrivals()
    assert joined == [waiting]
    assert list(seats) == [late]


def test_a_failure_ends_the_sequences_of_that_adapter() -> None:
    seats, loader, a, b = make(num_slots=2)
    loader.failing.add(a)
    loader.done.add(b)
    bad = sequence(a)
    assert not seats.add(bad)
    assert seats.add(sequence(b))
    joined, [(failed, error)] = seats.arrivals()
    assert (joined, failed, error.code) == ([], bad, "adapter_failed")
    assert error.message == "the adapter 'a' could not be loaded: no such file"
    seats.remove(failed)
    seats.check_integrity()


def test_a_waiting_sequence_may_leave() -> None:
    seats, _, a, b = make()
    first = sequence(a)
    second = sequence(b)
    seats.add(first)
    seats.add(second)
    seats.remove(second)
    seats.remove(first)
    assert not seats
    seats.check_integrity()
