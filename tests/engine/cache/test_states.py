"""The table of states: who holds which, which are kept, and that none outlives the page that it comes after."""

from __future__ import annotations

import pytest

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable


def chain_of(table: PageTable, tokens: list[int], salt: str | None = None) -> list[bytes]:
    """The hashes of the pages of these tokens."""
    hashes: list[bytes] = []
    table.hash_pages(tokens, hashes, salt)
    return hashes


def registered(table: PageTable, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Held pages with these tokens, all registered, and their hashes."""
    hashes = chain_of(table, tokens)
    pages = table.allocate(len(hashes))
    for index, page in enumerate(pages):
        table.register(page, hashes[index], hashes[index - 1] if index else b"")
    return pages, hashes


def kept(states: StateTable, page_hash: bytes) -> int:
    """A state that only the prefix cache keeps."""
    state = states.allocate()
    assert states.keep(state, page_hash)
    states.release(state)
    return state


def test_a_state_is_free_cached_or_held() -> None:
    pages = PageTable(4, 2)
    states = StateTable(3, pages)
    _, hashes = registered(pages, [1, 1, 2, 2])
    first = states.allocate()
    second = states.allocate()
    assert (states.num_held, states.num_available, states.num_kept) == (2, 1, 0)
    states.release(first)
    assert states.keep(second, hashes[0])
    states.acquire(second)
    states.release(second)
    states.check_integrity([[second]])
    assert states.match(hashes) == (1, second)
    assert not states.is_evictable(second)
    states.release(second)
    assert states.is_evictable(second)
    assert not states.is_evictable(-1)
    assert (states.num_held, states.num_available, states.num_kept) == (0, 3, 1)
    states.check_integrity([])
    with pytest.raises(RuntimeError, match=f"cannot release state {first}: no sequence holds it"):
        states.release(first)


def test_the_last_page_that_has_a_state_is_matched() -> None:
    pages = PageTable(4, 2)
    states = StateTable(4, pages)
    _, hashes = registered(pages, [1, 1, 2, 2, 3, 3, 4, 4])
    early = kept(states, hashes[0])
    late = kept(states, hashes[2])
    assert states.match(hashes) == (3, late)
    assert states.match(hashes[:2]) == (1, early)
    assert states.match(hashes[3:]) == (0, -1)
    assert states.match(chain_of(pages, [1, 1, 2, 2, 3, 3], "salt")) == (0, -1)


def test_the_least_recently_used_state_is_evicted_first_and_alone() -> None:
    pages = PageTable(4, 2)
    states = StateTable(3, pages)
    _, hashes = registered(pages, [1, 1, 2, 2, 3, 3, 4, 4])
    oldest, middle, newest = (kept(states, hashes[index]) for index in range(3))
    states.acquire(oldest)
    states.release(oldest)
    assert states.allocate() == middle
    assert states.match(hashes[:2]) == (1, oldest)
    assert len(pages.match(hashes)) == 4, "the pages stay"
    assert states.allocate() == newest
    assert states.allocate() == oldest
    assert states.match(hashes) == (0, -1)
    with pytest.raises(RuntimeError, match="cannot allocate a state: all 3 are held"):
        states.allocate()


def test_keeping_an_equal_state_makes_the_known_one_recent_and_the_other_one_free() -> None:
    pages = PageTable(4, 2)
    states = StateTable(4, pages)
    _, hashes = registered(pages, [1, 1, 2, 2])
    known = kept(states, hashes[0])
    other = kept(states, hashes[1])
    equal = kept(states, hashes[0])
    states.check_integrity([])
    assert states.match(hashes[:1]) == (1, known)
    assert equal != known
    assert [states.allocate() for _ in range(3)][-1] == other, "two were free, and the other one is older now"


def test_a_state_that_a_later_one_replaces_is_evicted_first_unless_conversations_part_there() -> None:
    pages = PageTable(4, 2)
    states = StateTable(4, pages)
    _, hashes = registered(pages, [1, 1, 2, 2, 3, 3, 4, 4])
    old, parting, replaced = (kept(states, hashes[index]) for index in range(3))
    states.allocate()
    for state in (parting, parting, replaced):
        states.acquire(state)
        states.release(state)
    for page_hash in (*hashes, b"unknown"):
        if page_hash != hashes[0]:
            states.replace(page_hash)
    states.check_integrity()
    assert [states.allocate() for _ in range(3)] == [replaced, old, parting]


def test_a_state_never_outlives_its_page() -> None:
    """Neither when pages are withdrawn, nor when they are evicted; and no state is kept after a page that is not registered."""
    pages = PageTable(3, 2)
    states = StateTable(3, pages)
    held, hashes = registered(pages, [1, 1, 2, 2, 3, 3])
    kept(states, hashes[0])
    reading = kept(states, hashes[2])
    states.acquire(reading)
    pages.unregister(held[1:2])
    assert states.match(hashes) == (1, states.match(hashes[:1])[1])
    states.check_integrity([[reading]])
    states.release(reading)
    assert states.num_kept == 1
    assert not states.keep(states.allocate(), hashes[2])
    pages.release(held)
    pages.allocate(3)
    assert (states.match(hashes), states.num_kept) == ((0, -1), 0)
    states.check_integrity()


def test_the_eviction_of_a_state_in_the_middle_of_a_chain_and_then_of_its_page() -> None:
    pages = PageTable(3, 2)
    states = StateTable(3, pages)
    held, hashes = registered(pages, [1, 1, 2, 2, 3, 3])
    middle = kept(states, hashes[1])
    last = kept(states, hashes[2])
    states.allocate()
    assert states.allocate() == middle
    pages.release(held)
    pages.forget(hashes[1:2])
    assert states.match(hashes) == (0, -1)
    assert states.num_available == 1
    states.check_integrity()
    assert states.allocate() == last


def test_forgotten_states_are_free_and_their_pages_stay() -> None:
    pages = PageTable(3, 2)
    states = StateTable(3, pages)
    _, hashes = registered(pages, [1, 1, 2, 2, 3, 3])
    kept(states, hashes[0])
    kept(states, hashes[2])
    states.forget([*hashes[1:], b"unknown"])
    assert (states.num_kept, states.match(hashes)[0], len(pages.match(hashes))) == (1, 1, 3)
    states.check_integrity([])


def test_a_state_is_ready_in_the_step_after_the_one_that_writes_it() -> None:
    states = StateTable(3, PageTable(1, 2))
    states.begin_step()
    state = states.allocate()
    assert not states.is_ready(state)
    states.begin_step()
    assert states.is_ready(state)


def test_the_interval_is_a_multiple_of_the_page_size() -> None:
    assert StateTable(3, PageTable(1, 48), interval=2048).interval == 2064
    assert StateTable(3, PageTable(1, 16)).interval == 2048


def test_a_table_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="num_states must be at least 3, got 2"):
        StateTable(2, PageTable(1, 2))
