"""The page table: eviction, hashes, reference counts. Its use under random traffic is tested in test_scheduler.py."""

from __future__ import annotations

import pytest

from fa_serve.engine.cache.pages import PageTable


def test_the_oldest_cached_page_is_evicted_first() -> None:
    table = PageTable(3, 2)
    for content in ([1, 1], [2, 2], [3, 3]):
        hashes: list[bytes] = []
        table.hash_pages(content, hashes)
        (page,) = table.allocate(1)
        table.register(page, hashes[0])
        table.release([page])
    hashes = []
    table.hash_pages([1, 1], hashes)
    table.acquire(table.match(hashes))  # [1, 1] is used again, so [2, 2] is the oldest now
    table.allocate(1)
    found = []
    for content in ([1, 1], [2, 2], [3, 3]):
        hashes = []
        table.hash_pages(content, hashes)
        found.append(len(table.match(hashes)))
    assert found == [1, 0, 1]
    table.check_integrity()


def test_hashes_depend_on_everything_before_and_on_the_salt() -> None:
    table, same, other = (PageTable(1, 2, salt=salt) for salt in (b"a", b"a", b"b"))

    def hashes(table: PageTable, tokens: list[int]) -> list[bytes]:
        known: list[bytes] = []
        table.hash_pages(tokens, known)
        return known

    assert hashes(table, [1, 2, 3, 4, 5]) == hashes(same, [1, 2, 3, 4])
    assert hashes(table, [1, 2, 3, 4])[1] != hashes(table, [9, 2, 3, 4])[1]
    assert hashes(table, [1, 2]) != hashes(other, [1, 2])


def test_a_page_cannot_be_released_twice_nor_taken_from_nobody() -> None:
    table = PageTable(2, 4)
    pages = table.allocate(2)
    with pytest.raises(RuntimeError, match="0 of 2 are available"):
        table.allocate(1)
    table.release(pages)
    with pytest.raises(RuntimeError, match="no sequence holds it"):
        table.release(pages[:1])


def test_integrity_check_sees_a_lost_page() -> None:
    table = PageTable(2, 4)
    table.allocate(1)
    table.check_integrity()
    with pytest.raises(AssertionError, match="reference counts"):
        table.check_integrity([])


def test_a_withdrawn_page_takes_along_what_was_computed_from_it() -> None:
    table = PageTable(6, 2)
    chains: list[list[bytes]] = [[], []]
    for chain, tokens in zip(chains, ([1, 1, 2, 2, 3, 3], [1, 1, 4, 4]), strict=True):
        table.hash_pages(tokens, chain)
    first = table.allocate(3)
    branch = table.allocate(1)
    for index, page in enumerate(first):
        table.register(page, chains[0][index], chains[0][index - 1] if index else b"")
    table.register(branch[0], chains[1][1], chains[1][0])
    table.release(branch)
    table.check_integrity([first])
    table.unregister(first[:1])
    table.check_integrity([first])
    assert table.match(chains[0]) == table.match(chains[1]) == []
    table.register(first[2], chains[0][2], chains[0][1])
    assert table.match(chains[0][2:]) == [], "nobody would find a page whose parent is not registered"
    table.release(first)
    table.check_integrity([])
    assert table.num_available == 6


def test_the_eviction_of_a_page_takes_along_what_nobody_can_find_any_more() -> None:
    table = PageTable(2, 2)
    chain: list[bytes] = []
    table.hash_pages([1, 1, 2, 2], chain)
    pages = table.allocate(2)
    for index, page in enumerate(pages):
        table.register(page, chain[index], chain[index - 1] if index else b"")
    table.release(pages[:1])
    table.allocate(1)
    table.check_integrity()
    table.forget(chain)
    assert table.match(chain[1:]) == []


def test_a_page_that_is_held_takes_the_place_of_an_equal_one_that_is_not() -> None:
    """So that the newer page is cached when it is released, and what was computed from it is found until then."""
    table = PageTable(5, 2)
    chain: list[bytes] = []
    table.hash_pages([1, 1, 2, 2], chain)
    old, new, third = (table.allocate(count) for count in (2, 2, 1))
    for index in range(2):
        table.register(old[index], chain[index], chain[index - 1] if index else b"")
    table.register(third[0], chain[0])
    assert table.match(chain) == old, "another sequence holds the page"
    table.release(old)
    for index in range(2):
        table.register(new[index], chain[index], chain[index - 1] if index else b"")
    table.check_integrity([new, third])
    assert (table.match(chain), table.num_available) == (new, 2)
    table.allocate(2)
    assert table.match(chain) == new, "the old pages were free"


def test_a_salt_gives_other_hashes() -> None:
    table = PageTable(1, 2)
    chains: list[list[bytes]] = []
    for salt in (None, "", "a", "b", "\ud800"):
        chains.append([])
        table.hash_pages([1, 2, 3, 4], chains[-1], salt)
    assert len({page_hash for chain in chains for page_hash in chain}) == 10


def test_a_page_may_have_no_child_one_or_several() -> None:
    """Most have one, which is kept in another way than several."""
    table = PageTable(6, 1)
    chains: list[list[bytes]] = [[], [], []]
    for number, chain in enumerate(chains):
        table.hash_pages([7, number], chain)
    pages = table.allocate(4)
    table.register(pages[0], chains[0][0])
    for page, chain in zip(pages[1:], chains, strict=True):
        table.register(page, chain[1], chain[0])
        table.check_integrity([pages])
    for page in pages[2:0:-1]:
        table.unregister([page])
        table.check_integrity([pages])
    assert table.match(chains[2]) == [pages[0], pages[3]]
    table.unregister([pages[3]])
    table.register(pages[1], chains[1][1], chains[1][0])
    assert table.match(chains[1]) == [pages[0], pages[1]]
    table.unregister(pages[:1])
    table.check_integrity([pages])
    assert [table.match(chain) for chain in chains] == [[], [], []]
