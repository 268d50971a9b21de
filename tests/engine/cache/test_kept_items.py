"""Items that are copied to the host and back: what comes of a copy is decided when it ends."""

from __future__ import annotations

from counted_opcodes import count_opcodes

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable


def make_table(num_slots: int = 8, num_pages: int = 4) -> tuple[PageTable, list[bytes]]:
    """A table of which two pages are cached, in a chain."""
    table = PageTable(num_pages, 2)
    table.host.grow(num_slots)
    hashes: list[bytes] = []
    table.hash_pages([1, 2, 3, 4], hashes)
    pages = table.allocate(2)
    for page, page_hash, parent in zip(pages, hashes, (b"", hashes[0]), strict=True):
        table.register(page, page_hash, parent)
    table.release(pages)
    return table, hashes


def demote(table: PageTable) -> None:
    table.end_leaving(table.start_leaving(table.num_pages, table.num_pages), True)


def test_evicted_items_with_copies_stay_registered() -> None:
    table, hashes = make_table()
    demote(table)
    held = table.allocate(4)
    assert (table.match(hashes), table.reach(hashes), table.num_lost) == ([], 2, 0)
    table.release(held)
    moves = table.start_arriving(hashes)
    assert (table.num_held, [*map(table.is_arriving, hashes)], table.match(hashes)) == (2, [True, True], [])
    table.check_integrity([])
    table.end_arriving(moves, True)
    assert (table.match(hashes), table.num_held) == ([move.item for move in moves], 0)
    table.check_integrity([])


def test_an_item_that_is_handed_out_while_it_leaves_has_no_copy() -> None:
    table, hashes = make_table()
    moves = table.start_leaving(4, 4)
    assert [move.page_hash for move in moves] == [*reversed(hashes)], "the last page goes first"
    table.allocate(3)
    table.end_leaving(moves, True)
    assert (hashes[0] in table.host, hashes[1] in table.host) == (True, False)
    table.check_integrity()


def test_a_page_that_takes_the_place_of_one_that_leaves_makes_its_copy_void() -> None:
    """The page that leaves is free then, and may be written before its copy has ended."""
    table, hashes = make_table()
    moves = table.start_leaving(4, 4)
    (page,) = table.allocate(1)
    table.register(page, hashes[0])
    table.end_leaving(moves, True)
    assert hashes[0] not in table.host
    table.check_integrity([[page]])


def test_what_is_forgotten_on_its_way_arrives_nowhere() -> None:
    table, hashes = make_table()
    leaving = table.start_leaving(4, 4)
    table.forget(hashes[:1])
    table.end_leaving(leaving, True)
    assert (table.reach(hashes), len(table.host)) == (0, 0)

    table, hashes = make_table()
    demote(table)
    table.release(table.allocate(4))
    arriving = table.start_arriving(hashes)
    table.forget_all()
    table.end_arriving(arriving, True)
    assert (table.reach(hashes), len(table.host), table.num_available) == (0, 0, 4)
    table.check_integrity([])


def cached_table(num_pages: int) -> tuple[PageTable, StateTable]:
    """Half of the pages are cached, in chains of 4 that share their first page; each has a state and a copy on the host."""
    table = PageTable(num_pages, 2)
    states = StateTable(num_pages, table)
    for kept in (table, states):
        kept.host.grow(num_pages)
    for chain in range(num_pages // 8):
        hashes: list[bytes] = []
        table.hash_pages([1, 1, *[chain] * 6], hashes)
        shared = table.match(hashes)
        table.acquire(shared)
        pages = [*shared, *table.allocate(4 - len(shared))]
        for index, page in enumerate(pages):
            table.register(page, hashes[index], hashes[index - 1] if index else b"")
            state = states.allocate()
            states.keep(state, hashes[index])
            states.release(state)
        table.release(pages)
    for kept in (table, states):
        kept.end_leaving(kept.start_leaving(num_pages, num_pages), True)
    return table, states


def test_forgetting_everything_takes_as_many_operations_whatever_is_cached() -> None:
    counts = []
    for num_pages in (64, 1024):
        table, states = cached_table(num_pages)
        assert min(len(table.cached_hashes(num_pages)), states.num_kept, len(table.host), len(states.host)) > num_pages // 4
        counts.append(count_opcodes(table.forget_all))
        table.check_integrity([])
        states.check_integrity([])
        assert (len(table.cached_hashes(table.num_pages)), states.num_kept, len(table.host), len(states.host)) == (0, 0, 0, 0)
        assert table.num_available == states.num_available == num_pages
    assert counts[0] == counts[1]


def test_entries_of_what_was_forgotten_are_freed_when_items_are_handed_out() -> None:
    table, _ = cached_table(1024)
    entries = len(table.cached_hashes(1024))
    table.forget_all()
    table.forget_all()
    given_up = sum(map(len, table._given_up))
    assert given_up > 4 * entries, "nothing is freed at once"
    held = table.allocate(12)
    assert given_up > sum(map(len, table._given_up)) >= given_up - 12 * 16, "and a few entries with each page"
    table.release(held)
    table.release(table.allocate(1024))
    assert table._given_up == []


def test_forgotten_items_are_handed_out_in_the_order_of_eviction() -> None:
    table, other = (make_table()[0] for _ in range(2))
    rest = table.allocate(2)
    table.forget_all()
    other.allocate(2)
    assert table.allocate(2) == other.allocate(2), "the last page of a chain, then the first one"
    table.release(rest)
    assert table.num_available == 2


def test_held_items_stay_held_when_everything_is_forgotten() -> None:
    table, hashes = make_table()
    shared = table.match(hashes)
    table.acquire(shared)
    leaving = table.start_leaving(4, 4)
    table.forget_all()
    table.end_leaving(leaving, True)
    assert (table.match(hashes), table.num_held) == ([], 2)
    table.check_integrity([shared])
    table.release(shared)
    assert (len(table.cached_hashes(table.num_pages)), table.num_available) == (0, 4)
    table.check_integrity([])


def test_a_copy_that_fails_is_forgotten_with_what_comes_after_it() -> None:
    table, hashes = make_table()
    demote(table)
    table.release(table.allocate(4))
    table.end_arriving(table.start_arriving(hashes[:1]), False)
    assert (table.reach(hashes), len(table.host), table.num_available) == (0, 0, 4)
    table.check_integrity([])


def test_a_page_that_was_computed_while_it_came_back_is_kept_once() -> None:
    table, hashes = make_table()
    demote(table)
    table.release(table.allocate(4))
    moves = table.start_arriving(hashes[:1])
    (page,) = table.allocate(1)
    table.register(page, hashes[0])
    table.end_arriving(moves, True)
    assert (table.match(hashes), table.num_held) == ([page], 1)
    table.check_integrity([[page]])


def test_the_host_drops_what_follows_an_evicted_copy() -> None:
    """The first page is on the host alone. Its slot is needed, so nobody could reach the second one."""
    table, hashes = make_table(num_slots=2)
    demote(table)
    held = table.allocate(4)
    table.host.expose(hashes[0], first=True)
    other: list[bytes] = []
    table.hash_pages([5, 6], other)
    table.register(held[0], other[0])
    table.release(held)
    demote(table)
    assert (table.reach(hashes), [*table.host]) == (0, other)
    table.check_integrity([])
