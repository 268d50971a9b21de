"""Which sequences form groups that read shared pages once."""

from __future__ import annotations

import random

import pytest
from scheduling import Device, make_request, make_scheduler

from fa_serve.engine.scheduler.prefix_groups import MAX_MEMBERS, PrefixGroups
from fa_serve.engine.scheduler.scheduled_batch import Chunk, PrefixGroup, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState


def step(pages: list[list[int]], starts: list[int] | None = None, length: int = 1) -> ScheduledBatch:
    """A step of sequences with these pages, of 4 tokens each. Without starts, the last page of each begins."""
    batch = ScheduledBatch()
    for slot, own in enumerate(pages):
        sequence = SequenceState(make_request(f"{slot}", [0]))
        sequence.start(slot, own, 0, 4)
        batch.append(Chunk(sequence, slot, 4 * (len(own) - 1) if starts is None else starts[slot], length, 1))
    return batch


def arranged(batch: ScheduledBatch, least: int = 1) -> tuple[list[int], list[tuple[int, int]]]:
    PrefixGroups(4, least).arrange(batch)
    return [chunk.slot for chunk in batch.chunks], [tuple(group) for group in batch.groups]


@pytest.mark.parametrize(
    ("pages", "order", "groups"),
    [
        pytest.param([[1, 2, 3], [7, 8], [1, 2, 4]], [0, 2, 1], [(2, 2)], id="others between"),
        pytest.param([[1, 2], [3, 4], [5, 6]], [0, 1, 2], [], id="nothing shared"),
        pytest.param([[1, 2], [1, 3], [4, 5], [4, 6]], [0, 1, 2, 3], [(2, 1), (2, 1)], id="two groups"),
        # a system prompt of one page, behind which pairs share four more: 3 pages are saved together, and 10 in pairs
        pytest.param(
            [[1, 2, 3, 4, 5, 20], [1, 6, 7, 8, 9, 21], [1, 2, 3, 4, 5, 22], [1, 6, 7, 8, 9, 23]],
            [0, 2, 1, 3],
            [(2, 5), (2, 5)],
            id="pairs save more",
        ),
        pytest.param([[1, 2, 3, 4, 20], [1, 2, 3, 5, 21], [1, 2, 3, 4, 22]], [0, 1, 2], [(3, 3)], id="all together save more"),
        pytest.param([[1, 2, 3], [1, 2], [1, 2, 4, 5]], [0, 1, 2], [(3, 1)], id="the last page of a short one is its own"),
    ],
)
def test_groups_save_the_most_pages(pages: list[list[int]], order: list[int], groups: list[tuple[int, int]]) -> None:
    assert arranged(step(pages)) == (order, groups)


def test_a_page_that_is_not_full_is_not_shared() -> None:
    """Answers to one prompt: the page in which a sequence decodes may be shared no longer, whatever its number is."""
    assert arranged(step([[1, 2, 3], [1, 2, 3]], starts=[7, 9])) == ([0, 1], [(2, 1)])


@pytest.mark.parametrize(("least", "groups"), [(8, [(3, 1)]), (9, []), (0, [])])
def test_groups_must_save_enough(least: int, groups: list[tuple[int, int]]) -> None:
    assert arranged(step([[1, 2], [1, 3], [1, 4]]), least) == ([0, 1, 2], groups)


def test_a_large_group_is_divided_equally() -> None:
    count = 2 * MAX_MEMBERS + 1
    order, groups = arranged(step([[1, 2, 10 + slot] for slot in range(count)]))
    assert order == list(range(count))
    assert groups == [(11, 2), (11, 2), (11, 2)]


def test_steps_with_prompts_or_drafts_have_no_groups() -> None:
    pages = [[1, 2, 3], [1, 2, 4]]
    assert arranged(step(pages, length=2)) == ([0, 1], [])
    batch = step(pages)
    batch.num_drafts = 1
    assert arranged(batch) == ([0, 1], [])


def test_long_prefixes_differ_at_any_page() -> None:
    draw = random.Random(0)
    for _ in range(200):
        common = draw.randrange(1, 70)
        shared = list(range(100, 100 + common))
        pages = [[*shared, 200 + number, *range(300, 300 + draw.randrange(1, 5))] for number in range(3)]
        assert arranged(step(pages)) == ([0, 1, 2], [(3, common)])


def test_a_long_chain_of_prefixes() -> None:
    """Each sequence shares a page more than the one before, as continuations of one document do."""
    pages = [[*range(count + 1), 10_000 + count] for count in range(600)]
    batch = step(pages)
    PrefixGroups(4, 1).arrange(batch)
    assert batch.groups


def test_groups_are_found_again_when_other_sequences_run() -> None:
    groups = PrefixGroups(4, 1)
    first = step([[1, 2], [1, 3], [4, 5]])
    groups.arrange(first)
    again = ScheduledBatch(chunks=[*first.chunks])
    groups.arrange(again)
    assert again.groups == [PrefixGroup(2, 1)]
    readmitted = first.chunks[1].sequence
    readmitted.start(1, [6, 7], 0, 4)  # it has other pages than before
    groups.arrange(again)
    last = ScheduledBatch(chunks=[*again.chunks])
    groups.arrange(last)
    assert list(last.groups) == []


def test_tokens_reach_their_sequences_in_the_new_order() -> None:
    """The answers of a scheduler whose steps are arranged are those of one whose steps are not."""
    answers = []
    for least in (0, 1):
        scheduler = make_scheduler(num_pages=64, seqs=6, tokens=64)
        scheduler.groups = PrefixGroups(4, least)
        device = Device(scheduler)
        draw = random.Random(1)
        common = [[draw.randrange(9) for _ in range(12)] for _ in range(2)]
        num_groups = 0
        for number in range(9):
            scheduler.add(make_request(f"{number}", [*common[number % 2], number], 3 + number % 4, serial=number))
        kept = dict(scheduler.sequences)
        while batch := scheduler.schedule():
            num_groups += len(batch.groups)
            scheduler.commit(batch, device.launch(batch))
            scheduler.check_integrity()
        assert bool(num_groups) == bool(least)
        answers.append({name: sequence.tokens for name, sequence in kept.items()})
    assert answers[0] == answers[1]
