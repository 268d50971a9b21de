"""Whether there is room for the first sequence of the queue."""

from __future__ import annotations

from scheduling import make_request, make_scheduler

from fa_serve.engine.cache.prefix import Room


def test_the_first_sequence_needs_a_slot_and_pages() -> None:
    scheduler = make_scheduler(num_pages=4, seqs=2)
    for number in range(3):
        scheduler.add(make_request(f"{number}", [number, 1, 2], serial=number))
    assert scheduler._admission.has_room()
    scheduler.commit(scheduler.schedule(), [1, 1])
    assert not scheduler._admission.has_room(), "both slots are taken"
    scheduler.abort("0")
    assert scheduler._admission.has_room()


def test_what_the_running_ones_grow_by_is_left_to_them() -> None:
    scheduler = make_scheduler(num_pages=4, seqs=4)
    scheduler.add(make_request("runs", [1, 2, 3], serial=0))
    scheduler.commit(scheduler.schedule(), [1])
    waits = scheduler.add(make_request("waits", [5, 6, 7], serial=1))
    shared = scheduler._prefix.shared(waits)
    assert scheduler._admission.fits(waits, shared)
    assert not scheduler._admission.fits(waits, shared, growth=Room(3))


def test_a_sequence_that_waits_for_its_token_needs_no_room() -> None:
    """It was preempted while the device had its newest token."""
    scheduler = make_scheduler(num_pages=4, seqs=1)
    sequence = scheduler.add(make_request("first", [1, 2, 3]))
    scheduler.schedule()
    scheduler._requeue(sequence)
    scheduler._slots.clear()
    assert sequence.num_pending
    assert scheduler._admission.has_room()
