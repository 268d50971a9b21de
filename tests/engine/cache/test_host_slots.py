"""The slots of the host: which copy is evicted, and which slot may be written."""

from __future__ import annotations

from fa_serve.engine.cache.host_slots import HostSlots

A = b"a"
B = b"b"
C = b"c"


def make_slots(*hashes: bytes, count: int = 2) -> HostSlots:
    """Each hash has a copy that may be evicted, the first one before the others."""
    slots = HostSlots()
    slots.grow(count)
    for page_hash in hashes:
        slot, _ = slots.take()
        slots.put(page_hash, slot)
        slots.expose(page_hash)
    return slots


def test_the_least_recently_used_copy_is_evicted() -> None:
    slots = make_slots(A, B)
    slots.expose(A)
    slot, evicted = slots.take()
    assert evicted == B
    assert (slots.num_evictions, A in slots, B in slots) == (1, True, False)
    slots.put(C, slot)
    slots.check_integrity()
    assert [*slots] == [A, C]


def test_a_copy_that_is_protected_or_read_is_not_evicted() -> None:
    slots = make_slots(A, B)
    slots.protect(A)
    slot = slots.begin_reading(B)
    slots.expose(B)
    assert slots.take() is None
    slots.end_reading(B, slot)
    assert slots.take() == (slot, B)
    slots.check_integrity()


def test_a_slot_whose_copy_is_dropped_while_it_is_read_is_free_afterwards() -> None:
    slots = make_slots(A, count=1)
    slot = slots.begin_reading(A)
    slots.drop(A)
    slots.check_integrity()
    assert slots.take() is None, "somebody still reads it"
    slots.end_reading(A, slot)
    assert slots.take() == (slot, b"")


def test_a_copy_of_the_same_hash_may_come_while_the_old_one_is_read() -> None:
    slots = make_slots(A)
    old = slots.begin_reading(A)
    slots.drop(A)
    new, _ = slots.take()
    slots.put(A, new)
    slots.end_reading(A, old)
    assert (slots.slot_of(A), len(slots)) == (new, 1)
    slots.check_integrity()
    assert slots.take() == (old, b"")


def test_a_slot_that_was_taken_in_vain_is_free_again() -> None:
    slots = make_slots(count=1)
    slot, _ = slots.take()
    assert slots.take() is None
    slots.give_back(slot)
    slots.drop(A)
    assert slots.take() == (slot, b"")
    slots.check_integrity()


def test_when_all_copies_are_dropped_a_slot_that_is_read_is_free_afterwards() -> None:
    slots = make_slots(A, B, count=3)
    read = slots.begin_reading(A)
    slots.drop_all()
    slots.check_integrity()
    assert (len(slots), A in slots) == (0, False)
    taken = [slots.take() for _ in range(3)]
    assert read not in {each[0] for each in taken if each is not None}
    assert taken[2] is None, "a slot that is read is not written"
    slots.end_reading(A, read)
    assert slots.take() == (read, b"")
    slots.check_integrity()
