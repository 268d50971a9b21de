"""The scheduler and the page table under random traffic: every request ends once, no page is lost or shared wrongly.

A tiny device model stands in for the GPU: it remembers which tokens were written into which slot of which page, runs one
step behind the scheduler if asked to, and checks at each step that every sequence finds its own tokens in its pages.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa_serve.engine.pages import PageTable
from fa_serve.engine.request import Request, SamplingParams
from fa_serve.engine.scheduler import INVALID_TOKEN, ScheduledBatch, Scheduler


def make_request(name: str, prompt: list[int], max_tokens: int = 8, serial: int = 0, **fields: object) -> Request:
    return Request(name, list(prompt), SamplingParams(), max_tokens, rank=(0.0, serial), **fields)


def make_scheduler(num_pages: int = 16, page_size: int = 4, seqs: int = 4, tokens: int = 16, caching: bool = True) -> Scheduler:
    return Scheduler(PageTable(num_pages, page_size, prefix_caching=caching), max_num_seqs=seqs, max_num_batched_tokens=tokens)


def next_token(tokens: list[int]) -> int:
    """A model: the next token is a function of all tokens before it. Small, so that prefixes repeat."""
    return hash(tuple(tokens)) % 3


class Device:
    """Runs launched steps in order. Memory is written when a step runs; a sampled token stays here until it is read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[tuple[int, int], int] = {}
        self.last_token: dict[int, int] = {}

    def launch(self, batch: ScheduledBatch) -> list[int]:
        size = self.scheduler.pages.page_size
        assert 0 < batch.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({chunk.slot for chunk in batch.chunks}) == len(batch.chunks)
        sampled = []
        for chunk in batch.chunks:  # a layer writes the keys of the whole step before it reads any
            request, pages = chunk.request, chunk.request.pages
            assert chunk.start + chunk.length < len(request.prompt) + request.max_tokens, "more than was asked for"
            for position in range(chunk.start, chunk.start + chunk.length):
                known = position < len(request.tokens)
                token = request.tokens[position] if known else self.last_token[chunk.slot]
                self.memory[pages[position // size], position % size] = token
        for chunk in batch.chunks:
            request, pages = chunk.request, chunk.request.pages
            tokens = [self.memory[pages[i // size], i % size] for i in range(chunk.start + chunk.length)]
            assert tokens[: len(request.tokens)] == request.tokens[: len(tokens)], "a sequence does not find its own tokens"
            if chunk.samples:
                self.last_token[chunk.slot] = next_token(tokens)
                sampled.append(self.last_token[chunk.slot])
        return sampled


def expected_output(prompt: list[int], max_tokens: int, end_ids: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it comes
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 12),  # max_tokens
        st.sampled_from([frozenset(), frozenset({2})]),
        st.integers(0, 2),  # priority
        st.none() | st.integers(0, 20),  # aborted after so many steps
    ),
    min_size=1,
    max_size=10,
)


ONE = (0, [0], 1, frozenset(), 0, None)


@settings(max_examples=150, deadline=None)
@example(
    # preempted while its token is on the way, by a step that is then rolled back
    arrivals=[ONE, ONE, (0, [0], 9, frozenset(), 0, None), (0, [0] * 17, 5, frozenset(), 0, None)],
    num_pages=8,
    max_num_seqs=2,
    budget=5,
    depth=1,
    caching=False,
    failing=set(),
    rolled_back={10},
)
@given(
    arrivals=arrivals,
    num_pages=st.integers(8, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
    depth=st.integers(0, 1),
    caching=st.booleans(),
    failing=st.sets(st.integers(0, 30), max_size=2),
    rolled_back=st.sets(st.integers(0, 30), max_size=2),
)
def test_random_traffic(arrivals, num_pages, max_num_seqs, budget, depth, caching, failing, rolled_back) -> None:
    scheduler = make_scheduler(num_pages, 4, max_num_seqs, budget, caching)
    device = Device(scheduler)
    inflight: deque[tuple[ScheduledBatch, list[int]]] = deque()
    requests: dict[str, Request] = {}
    output: dict[str, list[int]] = {}
    ended: list[str] = []

    def finish(request: Request) -> None:
        ended.append(request.request_id)

    step = 0
    while step <= 20 or scheduler.requests or inflight:
        assert step < 2000, "no progress"
        for index, (arrival, prompt, max_tokens, end_ids, priority, abort_after) in enumerate(arrivals):
            name = str(index)
            if arrival == step:
                request = make_request(name, prompt, max_tokens, end_ids=end_ids)
                request.rank = (arrival + 3.0 * priority, index)
                scheduler.add(request)
                requests[name], output[name] = request, []
            if abort_after is not None and arrival + abort_after == step and (aborted := scheduler.abort(name)):
                finish(aborted)
                assert aborted.pages == []
                scheduler.check_integrity()
        batch = scheduler.schedule()
        scheduler.check_integrity()
        if batch and step in failing:
            for request in scheduler.fail(batch, "the step failed"):
                finish(request)
        elif batch and step in rolled_back:
            scheduler.rollback(batch)
        elif batch:
            inflight.append((batch, device.launch(batch)))
        if inflight and (len(inflight) > depth or not batch):
            for request, token in scheduler.commit(*inflight.popleft()):
                output[request.request_id].append(token)
                if request.finished:
                    finish(request)
        scheduler.check_integrity()
        step += 1

    assert sorted(ended) == sorted(requests), "a request did not end exactly once"
    assert scheduler.pages.num_held == 0
    for index, (_, prompt, max_tokens, end_ids, _, _) in enumerate(arrivals):
        expected = expected_output(prompt, max_tokens, end_ids)
        got = output[str(index)]
        assert got == expected[: len(got)]
        if requests[str(index)].finish_reason in ("stop", "length"):
            assert got == expected


def run_to_end(scheduler: Scheduler, device: Device | None = None) -> None:
    device = device or Device(scheduler)
    while batch := scheduler.schedule():
        scheduler.commit(batch, device.launch(batch))
        scheduler.check_integrity()


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    scheduler = make_scheduler(tokens=6)
    scheduler.add(make_request("a", [1, 2], serial=0))
    scheduler.add(make_request("b", list(range(11)), serial=1))
    device = Device(scheduler)
    lengths = []
    for _ in range(4):
        batch = scheduler.schedule()
        lengths.append([(chunk.request.request_id, chunk.length, chunk.samples) for chunk in batch.chunks])
        scheduler.commit(batch, device.launch(batch))
    assert lengths[0] == [("a", 2, True), ("b", 4, False)]
    assert lengths[1] == [("a", 1, True), ("b", 5, False)]
    assert lengths[2] == [("a", 1, True), ("b", 2, True)]
    assert lengths[3] == [("a", 1, True), ("b", 1, True)]


def test_the_latest_request_is_preempted_and_continues_where_it_was() -> None:
    scheduler = make_scheduler(num_pages=6, caching=False)
    early = make_request("early", [1] * 7, 12, 0)
    late = make_request("late", [2] * 7, 12, 1)
    scheduler.add(early)
    scheduler.add(late)
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    assert early.tokens[7:] == expected_output([1] * 7, 12, frozenset())
    assert late.tokens[7:] == expected_output([2] * 7, 12, frozenset())


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make_scheduler()
    prompt = [1, 0, 2, 1, 2, 0, 1, 1, 0]
    first = make_request("first", prompt, 1)
    scheduler.add(first)
    run_to_end(scheduler)
    second = make_request("second", prompt, 1, 1)
    other = make_request("other", [2, *prompt[1:]], 1, 2)
    scheduler.add(second)
    scheduler.add(other)
    batch = scheduler.schedule()
    assert [(chunk.start, chunk.length) for chunk in batch.chunks] == [(8, 1), (0, 9)]
    assert (second.num_cached_tokens, other.num_cached_tokens) == (8, 0)


def test_pages_filled_chunk_by_chunk_are_all_shared() -> None:
    scheduler = make_scheduler(tokens=3)
    device = Device(scheduler)
    prompt = [1, 0, 2, 1, 2, 0, 1, 1, 0, 2]
    scheduler.add(make_request("first", prompt, 7))
    run_to_end(scheduler, device)
    second = make_request("second", prompt + expected_output(prompt, 7, frozenset()), 1)
    scheduler.add(second)
    scheduler.schedule()
    assert second.num_cached_tokens == 16, "10 tokens of prompt and 7 of answer, of which the last was never computed"


def test_requests_of_one_step_share_their_common_beginning() -> None:
    scheduler = make_scheduler(tokens=32)
    for serial, last in enumerate([3, 4, 3]):
        scheduler.add(make_request(str(serial), [1, 0, 2, 1, 2, 0, 1, 1, last], 1, serial))
    batch = scheduler.schedule()
    assert [(chunk.start, chunk.length) for chunk in batch.chunks] == [(0, 9), (8, 1), (8, 1)]
    assert scheduler.pages.num_held == 2 + 3
    scheduler.check_integrity()


def test_pages_that_a_failed_step_should_have_filled_are_not_shared() -> None:
    scheduler = make_scheduler()
    prompt = [1, 0, 2, 1, 2, 0, 1, 1, 0]
    scheduler.add(make_request("failed", prompt))
    failed = scheduler.fail(scheduler.schedule(), "no such luck")
    assert [(request.finish_reason, request.error) for request in failed] == [("error", "no such luck")]
    scheduler.add(make_request("next", prompt))
    assert scheduler.schedule().chunks[0].start == 0
    scheduler.check_integrity()


def test_a_prompt_of_whole_pages_still_computes_its_last_page() -> None:
    scheduler = make_scheduler()
    device = Device(scheduler)
    for name in ("first", "second"):
        request = make_request(name, [1, 0, 2, 1, 2, 0, 1, 1], 1)
        scheduler.add(request)
        run_to_end(scheduler, device)
    assert request.num_cached_tokens == 4


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
    table.acquire(table.match(hashes))  # used again: now [2, 2] is the oldest
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
    with pytest.raises(RuntimeError, match="0 available of 2"):
        table.allocate(1)
    table.release(pages)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        table.release(pages[:1])


def test_integrity_check_sees_a_lost_page() -> None:
    table = PageTable(2, 4)
    table.allocate(1)
    table.check_integrity()
    with pytest.raises(AssertionError, match="reference counts"):
        table.check_integrity([])


def test_an_invalid_token_fails_its_request_alone() -> None:
    scheduler = make_scheduler()
    good = make_request("good", [1], serial=0)
    bad = make_request("bad", [2], serial=1)
    scheduler.add(good)
    scheduler.add(bad)
    gained = scheduler.commit(scheduler.schedule(), [0, INVALID_TOKEN])
    assert gained == [(good, 0)]
    assert bad.finish_reason == "error"
    assert "not finite" in (bad.error or "")
    scheduler.check_integrity()


def test_an_id_may_be_used_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [1]))
    assert scheduler.abort("b") is None
