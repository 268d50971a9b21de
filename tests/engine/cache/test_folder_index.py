"""Which files are kept: the budget, the order of eviction, and what goes with a page that is withdrawn."""

from __future__ import annotations

from random import Random

from fa_serve.engine.cache.folder_files import FileName
from fa_serve.engine.cache.folder_index import FolderIndex


def page(number: int, parent: int = 0) -> FileName:
    return FileName("page", number.to_bytes(16, "big"), parent.to_bytes(16, "big") if parent else b"")


def state(number: int, parent: int = 0) -> FileName:
    return page(number, parent)._replace(kind="state")


def filled(*names: FileName, budget: int = 100) -> FolderIndex:
    index = FolderIndex(budget)
    for name in names:
        index.add(name, 10)
    return index


def test_the_least_recently_used_files_are_evicted() -> None:
    index = filled(*map(page, range(1, 11)))
    assert index.make_room(0) == []
    index.touch([page(1).page_hash, page(2).page_hash])
    assert index.make_room(25) == [page(3), page(4), page(5)]
    assert (index.num_bytes, index.num_evictions, len(index)) == (70, 3, 7)
    assert index.make_room(60, busy=[page(6)]) == [page(7), page(8), page(9)]
    assert index.make_room(101) is None
    assert index.make_room(75, busy=[page(1), page(2), page(6)]) is None
    assert len(index) == 4
    index.check_integrity()


def test_later_pages_of_a_chain_are_evicted_before_earlier_ones() -> None:
    index = filled(page(3, 2), page(1), page(2, 1))
    index.touch([page(n).page_hash for n in (1, 2, 3)])
    assert index.make_room(90) == [page(3, 2), page(2, 1)]


def test_a_withdrawn_page_takes_along_what_was_computed_from_it() -> None:
    index = filled(page(1), page(2, 1), state(2, 1), page(3, 2), state(4, 3), page(5, 1), page(6))
    assert {*index.withdraw(page(2).page_hash)} == {page(2, 1), state(2, 1), page(3, 2), state(4, 3)}
    assert index.find("page", page(5).page_hash) == page(5, 1)
    assert index.withdraw(page(9).page_hash) == []
    assert {*index.withdraw(page(1).page_hash)} == {page(1), page(5, 1)}
    assert (len(index), index.num_bytes) == (1, 10)
    index.check_integrity()


def test_files_after_a_page_that_has_none_go_with_it() -> None:
    index = filled(page(3, 2), page(4, 3))
    assert {*index.withdraw(page(2).page_hash)} == {page(3, 2), page(4, 3)}


def test_pages_are_found_up_to_the_first_that_is_missing() -> None:
    index = filled(page(1), page(2, 1), page(4, 3), state(3, 2))
    assert index.reach([page(n).page_hash for n in (1, 2, 3, 4)]) == 2
    assert index.find("state", page(3).page_hash) == state(3, 2)
    assert index.find("state", page(2).page_hash) is None


def test_files_of_other_identities_are_evicted_as_well() -> None:
    foreign = FileName("ab/cd/name.page", b"")
    index = filled(foreign, page(1))
    assert index.make_room(90) == [foreign]


def test_random_operations_keep_the_views_together() -> None:
    random = Random(0)
    index = FolderIndex(300)
    for _ in range(2000):
        name = random.choice((page, state))(random.randrange(1, 60), random.randrange(30))
        if random.random() < 0.5:
            size = random.randrange(1, 40)
            if index.make_room(size) is not None:
                index.add(name, size)
        elif random.random() < 0.5:
            index.remove(name)
        elif random.random() < 0.1:
            index.withdraw(name.page_hash)
        else:
            index.touch([name.page_hash])
        assert index.num_bytes <= 300
        index.check_integrity()
