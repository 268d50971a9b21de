"""The scheduler and the page table under random traffic: every request ends once, no page is lost or shared wrongly.

A model of a device takes the place of the GPU. It remembers which tokens were written into which slot of which page, runs one
step behind the scheduler if asked to, and checks at each step that every sequence finds its own tokens in its pages.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from scheduling import Device, Guesses, expected_output, make_request, make_scheduler

from fa_serve.engine import RequestError, SamplingParams
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, NO_TOKEN, ScheduledBatch
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import EXPECTED_TOKENS, SequenceState
from fa_serve.engine.scheduler.step_cost import StepSize

FAILURE = RequestError("step_failed", "the step failed")


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it comes
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 12),  # max_tokens
        st.sampled_from([frozenset(), frozenset({2})]),
        st.integers(0, 2),  # priority
        st.none() | st.integers(0, 20),  # aborted after so many steps
        st.integers(0, 2),  # client
    ),
    min_size=1,
    max_size=10,
)


ONE = (0, [0], 1, frozenset(), 0, None, 0)


@settings(max_examples=examples(150), deadline=None)
@example(
    # a sequence is preempted while its token is pending, by a step that is then rolled back
    arrivals=[ONE, ONE, (0, [0], 9, frozenset(), 0, None, 0), (0, [0] * 17, 5, frozenset(), 0, None, 0)],
    num_pages=8,
    max_num_seqs=2,
    budget=5,
    depth=1,
    caching=False,
    failing=set(),
    rolled_back={10},
    guesses=None,
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
    guesses=st.none() | st.tuples(st.integers(1, 7), st.sets(st.integers(0, 6), max_size=3), st.booleans()),
)
def test_random_traffic(arrivals, num_pages, max_num_seqs, budget, depth, caching, failing, rolled_back, guesses) -> None:
    speculation = None if guesses is None else Guesses(*guesses)
    scheduler = make_scheduler(num_pages, 4, max_num_seqs, budget, caching, speculation=speculation)
    device = Device(scheduler)
    inflight: deque[tuple[ScheduledBatch, list[int]]] = deque()
    sequences: dict[str, SequenceState] = {}
    output: dict[str, list[int]] = {}
    ended: list[str] = []

    def finish(sequence: SequenceState) -> None:
        ended.append(sequence.request.request_id)

    def take_in() -> None:
        for sequence, tokens in scheduler.commit(*inflight.popleft()).items():
            output[sequence.request.request_id] += tokens
            if sequence.finished:
                finish(sequence)

    step = 0
    while step <= 20 or scheduler.sequences or inflight:
        assert step < 2000, "no progress"
        for index, (arrival, prompt, max_tokens, end_ids, priority, abort_after, client) in enumerate(arrivals):
            name = str(index)
            if arrival == step:
                rank = (arrival + 3.0 * priority, index)
                request = make_request(name, prompt, max_tokens, end_ids=end_ids, rank=rank, client=str(client))
                sequences[name] = scheduler.add(request)
                output[name] = []
            if abort_after is not None and arrival + abort_after == step and (aborted := scheduler.abort(name)):
                finish(aborted)
                assert aborted.pages == []
                scheduler.check_integrity()
        if inflight and scheduler.needs_results():
            take_in()
        batch = scheduler.schedule()
        scheduler.check_integrity()
        if batch and step in failing:
            for sequence in scheduler.fail(batch, FAILURE):
                finish(sequence)
        elif batch and step in rolled_back:
            scheduler.rollback(batch)
        elif batch:
            inflight.append((batch, device.launch(batch)))
        if inflight and (len(inflight) > depth or not batch):
            take_in()
        scheduler.check_integrity()
        step += 1

    assert sorted(ended) == sorted(sequences), "a request did not end exactly once"
    assert scheduler.pages.num_held == 0
    assert speculation is None or not (speculation._histories or speculation.drafter._indices)
    for index, (_, prompt, max_tokens, end_ids, *_) in enumerate(arrivals):
        expected = expected_output(prompt, max_tokens, end_ids)
        got = output[str(index)]
        assert got == expected[: len(got)]
        if sequences[str(index)].finish_reason in ("stop", "length"):
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
        lengths.append([(chunk.sequence.request.request_id, chunk.length, chunk.num_samples) for chunk in batch.chunks])
        scheduler.commit(batch, device.launch(batch))
    assert lengths[0] == [("a", 2, 1), ("b", 4, 0)]
    assert lengths[1] == [("a", 1, 1), ("b", 5, 0)]
    assert lengths[2] == [("a", 1, 1), ("b", 2, 1)]
    assert lengths[3] == [("a", 1, 1), ("b", 1, 1)]


def test_the_latest_request_is_preempted_and_continues_where_it_was() -> None:
    scheduler = make_scheduler(num_pages=6, caching=False)
    early = scheduler.add(make_request("early", [1] * 7, 12, 0))
    late = scheduler.add(make_request("late", [2] * 7, 12, 1))
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    assert early.tokens[7:] == expected_output([1] * 7, 12, frozenset())
    assert late.tokens[7:] == expected_output([2] * 7, 12, frozenset())


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make_scheduler()
    prompt = [1, 0, 2, 1, 2, 0, 1, 1, 0]
    scheduler.add(make_request("first", prompt, 1))
    run_to_end(scheduler)
    second = scheduler.add(make_request("second", prompt, 1, 1))
    other = scheduler.add(make_request("other", [2, *prompt[1:]], 1, 2))
    batch = scheduler.schedule()
    assert [(chunk.start, chunk.length) for chunk in batch.chunks] == [(8, 1), (0, 9)]
    assert (second.num_cached_tokens, other.num_cached_tokens) == (8, 0)


def test_pages_filled_chunk_by_chunk_are_all_shared() -> None:
    scheduler = make_scheduler(tokens=3)
    device = Device(scheduler)
    prompt = [1, 0, 2, 1, 2, 0, 1, 1, 0, 2]
    scheduler.add(make_request("first", prompt, 7))
    run_to_end(scheduler, device)
    second = scheduler.add(make_request("second", prompt + expected_output(prompt, 7, frozenset()), 1))
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
    failed = scheduler.fail(scheduler.schedule(), FAILURE)
    assert [(sequence.finish_reason, sequence.error) for sequence in failed] == [("error", FAILURE)]
    scheduler.add(make_request("next", prompt))
    assert scheduler.schedule().chunks[0].start == 0
    scheduler.check_integrity()


def test_a_prompt_of_whole_pages_still_computes_its_last_page() -> None:
    scheduler = make_scheduler()
    device = Device(scheduler)
    for name in ("first", "second"):
        sequence = scheduler.add(make_request(name, [1, 0, 2, 1, 2, 0, 1, 1], 1))
        run_to_end(scheduler, device)
    assert sequence.num_cached_tokens == 4


@pytest.mark.parametrize(("token", "code"), [(INVALID_TOKEN, "not_finite"), (NO_TOKEN, "no_token_left")])
@pytest.mark.parametrize("params", [{}, {"bad_token_ids": (1,)}], ids=["plain", "narrowed"])
def test_an_invalid_token_fails_its_request_alone_and_says_whose_fault_it_is(params, token, code) -> None:
    scheduler = make_scheduler()
    good = scheduler.add(make_request("good", [1], serial=0))
    bad = scheduler.add(make_request("bad", [2], serial=1, params=SamplingParams(**params)))
    assert scheduler.commit(scheduler.schedule(), [0, token]) == {good: [0], bad: []}
    assert (bad.finish_reason, bad.error.code) == ("error", code)
    scheduler.check_integrity()


PROMPT = [1, 0, 2, 1, 2, 0, 1, 1, 0]
"""Two full pages and a token."""


def num_shared(scheduler: Scheduler, prompt: list[int], **fields: object) -> int:
    """How many tokens of this prompt a new request would not have to compute."""
    fresh = scheduler.add(make_request("fresh", prompt, **fields))
    scheduler.schedule()
    scheduler.abort("fresh")
    return fresh.num_cached_tokens


@pytest.mark.parametrize("params", [{}, {"bad_token_ids": (1,)}], ids=["plain", "narrowed"])
def test_pages_that_may_not_be_finite_are_never_shared_again(params) -> None:
    """Neither those of the request, nor those that it found in the cache, nor those that others computed from these."""
    scheduler = make_scheduler(num_pages=32, tokens=64)
    device = Device(scheduler)
    scheduler.add(make_request("first", PROMPT, 1))
    run_to_end(scheduler, device)
    longer = [*PROMPT, 1, 1, 1, 1, 0]
    scheduler.add(make_request("longer", longer, 1))
    run_to_end(scheduler, device)
    assert num_shared(scheduler, longer) == 12
    victim = scheduler.add(make_request("victim", [*PROMPT, 2, 2, 2, 2], params=SamplingParams(**params)))
    batch = scheduler.schedule()
    assert victim.num_cached_tokens == 8
    assert scheduler.commit(batch, [INVALID_TOKEN]) == {}
    assert victim.error is None, "the values that are not finite may be those of others"
    assert scheduler.commit(scheduler.schedule(), [INVALID_TOKEN]) == {victim: []}
    assert (victim.num_cached_tokens, victim.error.code) == (0, "not_finite")
    assert num_shared(scheduler, PROMPT) == 0
    scheduler.add(make_request("again", PROMPT, 1))  # the first pages are known again
    run_to_end(scheduler, device)
    assert num_shared(scheduler, longer) == 8, "a page that was computed from the withdrawn ones must be computed again"
    scheduler.check_integrity()


def test_parameters_that_leave_no_token_drop_nothing_from_the_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", PROMPT, 1))
    run_to_end(scheduler)
    scheduler.add(make_request("narrow", PROMPT))
    scheduler.commit(scheduler.schedule(), [NO_TOKEN])
    assert num_shared(scheduler, PROMPT) == 8


@pytest.mark.parametrize("preempted", [False, True])
def test_pages_of_a_request_that_ended_before_its_first_logits_are_not_shared(preempted) -> None:
    scheduler = make_scheduler(tokens=8)
    scheduler.add(make_request("left", PROMPT))
    batch = scheduler.schedule()
    if preempted:
        scheduler.commit(batch, [])
        scheduler._requeue(scheduler.running[-1])
        scheduler.check_integrity()
    scheduler.abort("left")
    assert num_shared(scheduler, PROMPT) == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("runs", [False, True])
def test_a_request_that_ends_takes_no_confirmed_pages_from_the_cache(runs) -> None:
    """It has never run, or it runs again, from pages that its first token had confirmed before it was preempted."""
    scheduler = make_scheduler(seqs=1)
    device = Device(scheduler)
    scheduler.add(make_request("first", PROMPT, 5))
    batch = scheduler.schedule()
    scheduler.commit(batch, device.launch(batch))
    if runs:
        scheduler._requeue(scheduler.running[-1])
        assert scheduler.schedule().admitted
    else:
        scheduler.add(make_request("waits", PROMPT[:8]))
        scheduler.schedule()
        scheduler.abort("waits")
    scheduler.abort("first")
    assert num_shared(scheduler, PROMPT) == 8
    scheduler.check_integrity()


def test_requests_share_prefixes_within_their_salt_only() -> None:
    scheduler = make_scheduler(num_pages=32)
    for salt in (None, "a"):
        assert num_shared(scheduler, PROMPT, cache_salt=salt) == 0
        scheduler.add(make_request("first", PROMPT, 2, cache_salt=salt))
        run_to_end(scheduler)
        assert num_shared(scheduler, PROMPT, cache_salt=salt) == 8
    assert num_shared(scheduler, PROMPT, cache_salt="b") == 0
    assert num_shared(scheduler, PROMPT, cache_salt="") == 0


def served_order(scheduler: Scheduler) -> list[str]:
    """The ids of the requests in the order in which they are admitted."""
    device = Device(scheduler)
    order = []
    while batch := scheduler.schedule():
        order += [sequence.request.request_id for sequence in batch.admitted]
        scheduler.commit(batch, device.launch(batch))
        scheduler.check_integrity()
    return order


def test_the_priority_of_one_client_does_not_matter_to_another() -> None:
    """Not in the queue, nor in who is preempted."""
    scheduler = make_scheduler(num_pages=6, caching=False)
    urgent = [(-1e9, serial) for serial in range(20)]
    for serial, rank in enumerate(urgent):
        scheduler.add(make_request(f"urgent-{serial}", [1] * 7, 12, rank=rank, client="urgent"))
    scheduler.add(make_request("patient", [2] * 7, 12, rank=(0.0, 21), client="patient"))
    order = served_order(scheduler)
    assert scheduler.num_preemptions > 0
    assert "patient" in order[:3]


def test_a_client_that_holds_every_slot_gives_one_to_a_client_that_has_none() -> None:
    scheduler = make_scheduler(num_pages=64, seqs=3, tokens=64)
    device = Device(scheduler)
    own = [scheduler.add(make_request(f"own-{serial}", [1, 2], 40, serial, client="own")) for serial in range(5)]
    scheduler.commit(batch := scheduler.schedule(), device.launch(batch))
    assert [sequence.slot >= 0 for sequence in own] == [True, True, True, False, False]
    other = scheduler.add(make_request("other", [1, 2], 40, 9, client="other"))
    more = scheduler.add(make_request("more", [1, 2], 40, 10, client="other"))
    for _ in range(3):
        scheduler.commit(batch := scheduler.schedule(), device.launch(batch))
        scheduler.check_integrity()
    assert (other.slot >= 0, more.slot) == (True, -1), "a client that has a slot waits for the next one"
    assert [sequence.slot >= 0 for sequence in own] == [True, True, False, False, False]
    assert scheduler.num_preemptions == 1
    run_to_end(scheduler, device)
    assert own[2].tokens[2:] == expected_output([1, 2], 40, frozenset())


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 300)), min_size=1, max_size=15), min_size=2, max_size=4
    ),
    seqs=st.integers(1, 3),
    later=st.integers(0, 20),
)
def test_clients_that_wait_get_the_same_number_of_tokens(lengths, seqs, later) -> None:
    """Between two clients that both have requests waiting, the charges differ by the largest request of each, and each slot's
    difference between what an answer was expected to cost and what it costs."""
    scheduler = make_scheduler(num_pages=1024, seqs=seqs, tokens=64)
    device = Device(scheduler)
    sequences: dict[int, list[SequenceState]] = {}
    served = dict.fromkeys(range(len(lengths)), 0)
    largest = max(prompt + answer for requests in lengths for prompt, answer in requests) + EXPECTED_TOKENS
    serial = 0

    def arrive(client: int) -> None:
        nonlocal serial
        for prompt, answer in lengths[client]:
            request = make_request(f"{client}-{serial}", [serial] * prompt, answer, serial, client=str(client))
            sequences.setdefault(client, []).append(scheduler.add(request))
            serial += 1

    arrive(0)
    step = 0
    base: dict[int, int] = {}
    while scheduler.sequences or step <= later:
        assert step < 50_000, "no progress"
        if step == later:
            for client in range(1, len(lengths)):
                arrive(client)
            base = {client: sum(len(x.tokens) for x in own if x.num_at_start) for client, own in sequences.items()}
        if batch := scheduler.schedule():
            scheduler.commit(batch, device.launch(batch))
        backlogged = [client for client, own in sequences.items() if own[-1].num_at_start == 0]
        if base and len(backlogged) > 1:
            for client in backlogged:
                served[client] = sum(len(x.tokens) for x in sequences[client] if x.num_at_start) - base[client]
            counts = [served[client] for client in backlogged]
            assert max(counts) - min(counts) <= (2 + 2 * seqs) * largest
        step += 1
    scheduler.check_integrity()


def test_a_stop_replaces_the_length_that_the_same_token_reached() -> None:
    scheduler = make_scheduler()
    last = scheduler.add(make_request("last", [1], max_tokens=1))
    early = scheduler.add(make_request("early", [1], max_tokens=5, serial=1))
    scheduler.commit(scheduler.schedule(), [0, 0])
    assert (last.finish_reason, early.finish_reason) == ("length", None)
    scheduler.stop(last)
    scheduler.stop(early)
    assert (last.finish_reason, early.finish_reason) == ("stop", "stop")
    scheduler.check_integrity()


def test_a_scheduler_that_is_given_up_releases_nothing() -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("a", [1]))
    scheduler.schedule()
    scheduler.abandon([sequence], FAILURE)
    assert (sequence.finish_reason, sequence.error) == ("error", FAILURE)
    assert scheduler.pages.num_held == 1


@settings(max_examples=examples(100), deadline=None)
@given(
    window=st.integers(1, 40),
    keys_per_tile=st.sampled_from([1, 4, 8, 16, 64]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    prompt=st.integers(1, 90),
    max_tokens=st.integers(1, 60),
    budget=st.integers(1, 40),
)
def test_no_page_that_a_kernel_may_still_read_is_released(window, keys_per_tile, page_size, prompt, max_tokens, budget) -> None:
    """A kernel reads whole tiles of keys_per_tile keys, also the keys before the window in the tile where it begins."""
    scheduler = make_scheduler(200, page_size, tokens=budget, window=window, keys_per_tile=keys_per_tile)
    scheduler.add(make_request("a", [1] * prompt, max_tokens))
    while batch := scheduler.schedule():
        (chunk,) = batch.chunks
        first_key = max(chunk.start - window, 0)
        first_read = first_key - first_key % keys_per_tile
        held = chunk.sequence.held_pages
        assert len(held) == len(set(held))
        assert chunk.sequence.num_released * page_size <= first_read, "a page with keys that are read was released"
        assert (chunk.sequence.num_released + 1) * page_size > first_read, "a page without keys that are read is still held"
        scheduler.commit(batch, [0] * chunk.num_samples)
        scheduler.check_integrity()


def test_larger_tiles_are_released_later() -> None:
    released = {}
    for keys_per_tile in (4, 16, 64):
        scheduler = make_scheduler(40, page_size=4, tokens=100, window=10, keys_per_tile=keys_per_tile)
        sequence = scheduler.add(make_request("a", [1] * 73, 2))
        scheduler.commit(scheduler.schedule(), [0])
        scheduler.schedule()  # token 73 attends to keys from 63 on
        released[keys_per_tile] = sequence.num_released
    assert released == {4: 60 // 4, 16: 48 // 4, 64: 0}


def test_an_id_may_be_used_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [1]))
    assert scheduler.abort("b") is None


def test_a_renewed_scheduler_has_the_settings_and_nothing_else() -> None:
    speculation = Guesses(2, set(), False)
    scheduler = make_scheduler(12, 4, 3, 24, True, speculation=speculation)
    scheduler.prompt_share = PromptShare(0.5, None)
    scheduler.prompt_share.record(StepSize(rows=8), 0.1)
    scheduler.max_num_batched_tokens = 7  # the device had no room for more
    scheduler.add(make_request("a", [1, 2, 3], 4), timeout=1.0)
    scheduler.schedule()
    fresh = scheduler.renewed()
    assert (fresh.pages.num_pages, fresh.pages.page_size, fresh.pages.prefix_caching, fresh.pages.num_held) == (12, 4, True, 0)
    assert (fresh.max_num_seqs, fresh.max_num_batched_tokens, fresh.keys_per_tile) == (3, 7, scheduler.keys_per_tile)
    assert fresh.window == scheduler.window
    assert fresh.speculation is speculation
    assert (fresh.prompt_share.target(StepSize(8)), fresh.prompt_share.cost.decode_seconds(8, 0)) == (0.5, 0.0)
    assert (fresh.sequences, list(fresh.waiting), fresh.running, bool(fresh.deadlines)) == ({}, [], [], False)
    fresh.check_integrity()


def test_sequences_whose_time_is_up_end_with_an_error() -> None:
    scheduler = make_scheduler(12, 4, 1, 24, True)
    running, waiting, unhurried = (
        scheduler.add(make_request(name, [1, 2], 9), timeout) for name, timeout in (("a", 5.0), ("b", 2.0), ("c", None))
    )
    assert scheduler.deadlines
    scheduler.schedule()
    assert scheduler.expire(running.request.arrival + 1.0) == []
    assert scheduler.expire(running.request.arrival + 2.0) == [waiting]
    assert scheduler.expire(running.request.arrival + 9.0) == [running]
    assert (running.finish_reason, running.error.code) == ("error", "timeout")
    assert list(scheduler.sequences) == [unhurried.request.request_id]
    assert scheduler.pages.num_held == 0
    scheduler.check_integrity()
