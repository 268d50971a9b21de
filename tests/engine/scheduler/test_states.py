"""Sequences with states of linear attention: what they read and write, what is kept, and what becomes of it when steps fail.

A model of a device takes the place of the GPU, whose states are the tokens that they have seen (tests/support/scheduling.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from scheduling import Guesses, make_request, make_scheduler
from state_traffic import FAILURE, SALTS, Traffic, lengths_of, prompt_of

from fa_serve.engine.cache.states import SHORT_CHUNK, chunk_length
from fa_serve.engine.scheduler.sequence import SequenceState

arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it comes
        st.lists(st.integers(0, 1), max_size=3),
        st.integers(1, 60),  # tokens of its prompt, which continues as the model would: prefixes repeat
        st.integers(1, 20),  # max_tokens
        st.sampled_from([frozenset(), frozenset({2})]),
        st.none() | st.integers(0, 20),  # aborted after so many steps
        st.integers(0, 1),  # client
        st.sampled_from(SALTS),
        st.integers(1, 3),  # answers to the same prompt
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    arrivals=arrivals,
    page_size=st.sampled_from([2, 4, 16, 32]),
    spare_pages=st.integers(0, 30),
    num_states=st.integers(3, 12),
    interval=st.sampled_from([1, 16, 2048]),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 80),
    depth=st.integers(0, 1),
    caching=st.sampled_from([True, True, True, False]),
    outcomes=st.dictionaries(
        st.integers(0, 30), st.sampled_from(["fail", "roll back", "not finite", "postpone", "postpone"]), max_size=5
    ),
    guesses=st.none() | st.tuples(st.integers(1, 15), st.sets(st.integers(0, 6), max_size=3), st.just(False)),
)
def test_random_traffic(
    arrivals, page_size, spare_pages, num_states, interval, max_num_seqs, budget, depth, caching, outcomes, guesses
) -> None:
    longest = max(len(beginning) + length + max_tokens for _, beginning, length, max_tokens, *_ in arrivals)
    scheduler = make_scheduler(
        -(-longest // page_size) + spare_pages,
        page_size,
        max_num_seqs,
        budget,
        caching,
        speculation=None if guesses is None else Guesses(*guesses),
        num_states=num_states,
        interval=interval,
    )
    traffic = Traffic(scheduler, depth)
    step = 0
    while step <= 20 or scheduler.sequences or traffic.inflight:
        assert step < 3000, "no progress"
        for index, (arrival, beginning, length, max_tokens, end_ids, abort_after, client, salt, n) in enumerate(arrivals):
            for answer in range(n):
                if arrival == step:
                    prompt = prompt_of(beginning, length)
                    fields = {"end_ids": end_ids, "client": str(client), "cache_salt": salt}
                    traffic.add(f"{index}-{answer}", prompt, max_tokens, **fields)
                if abort_after is not None and answer == 0 and arrival + abort_after == step:
                    scheduler.abort(f"{index}-{answer}")
                    traffic.check()
        traffic.step(outcomes.get(step, ""), step)
        step += 1
    traffic.check_ended()


@pytest.mark.parametrize(
    ("start", "length", "missing", "page_size", "expected"),
    [
        pytest.param(0, 100, 100, 16, 100, id="the-last-chunk-ends-anywhere"),
        pytest.param(0, 100, 101, 16, 96, id="others-end-at-a-multiple"),
        pytest.param(0, 20, 100, 32, SHORT_CHUNK, id="few-rows-end-anywhere"),
        pytest.param(16, 100, 300, 32, 16, id="few-rows-up-to-the-multiple"),
        pytest.param(17, 100, 100, 32, 15, id="not-many-rows-from-between-multiples"),
        pytest.param(17, 10, 10, 16, 10, id="few-rows-over-a-multiple"),
        pytest.param(17, 100, 100, 64, SHORT_CHUNK, id="a-multiple-that-is-far"),
        pytest.param(3, 100, 100, 4, 13, id="few-rows-over-several-multiples"),
        pytest.param(0, 0, 5, 16, 0, id="no-room"),
    ],
)
def test_long_chunks_begin_at_multiples_of_the_page_size(start, length, missing, page_size, expected) -> None:
    assert chunk_length(start, length, missing, page_size) == expected


def test_a_prompt_with_little_room_beside_another_waits_instead_of_leaving_the_grid() -> None:
    scheduler = make_scheduler(64, 16, tokens=90, num_states=8)
    traffic = Traffic(scheduler)
    traffic.add("a", prompt_of([0], 79), 1)
    traffic.add("b", prompt_of([1], 99), 1)
    assert lengths_of(scheduler, traffic) == [[("a", 0, 80)], [("b", 0, 80)], [("b", 80, 20)]]
    traffic.check_ended()


def test_steps_smaller_than_a_page_compute_few_rows() -> None:
    scheduler = make_scheduler(64, 32, tokens=20, num_states=8)
    traffic = Traffic(scheduler)
    traffic.add("a", prompt_of([0], 69), 2)
    lengths = [(start, length) for step in lengths_of(scheduler, traffic) for _, start, length in step]
    assert lengths == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 6), (70, 1)]
    traffic.check_ended()


def test_a_preempted_sequence_continues_from_its_last_page() -> None:
    scheduler = make_scheduler(64, 4, seqs=2, tokens=64, num_states=12)
    traffic = Traffic(scheduler, depth=1)
    traffic.add("early", prompt_of([0], 19), 30, client="a")
    late = traffic.add("late", prompt_of([1], 19), 30, client="a")
    while late.num_computed < 27:
        traffic.step()
    traffic.add("other", [2], 4, client="b")
    traffic.step()
    assert (late.slot, scheduler.num_preemptions) == (-1, 1)
    while late.slot < 0:
        traffic.step()
    assert (late.num_shared * 4, late.state_position) == (24, late.num_computed // 4 * 4)
    traffic.run()
    traffic.check_ended()


def test_sequences_that_lack_a_state_take_turns_and_nobody_is_preempted() -> None:
    """All four fill a page in the same step, and there is one state for them."""
    scheduler = make_scheduler(64, 4, seqs=4, tokens=64, num_states=5)
    traffic = Traffic(scheduler)
    for serial in range(4):
        traffic.add(str(serial), [serial % 3, 0, serial // 3], 30)
    lengths = [len(step) for step in lengths_of(scheduler, traffic)]
    assert (lengths[0], scheduler.num_preemptions) == (4, 0)
    assert min(lengths[:20]) < 4, "some of them have waited"
    traffic.check_ended()


def test_a_sequence_whose_turn_never_comes_gets_the_state_of_the_last_one() -> None:
    """Each of three holds a state, nothing comes back, and the first one needs another."""
    scheduler = make_scheduler(64, 4, seqs=3, tokens=64, num_states=3)
    traffic = Traffic(scheduler)
    for serial in range(3):
        traffic.add(str(serial), [serial, 0, 1], 30, client=str(serial))
    traffic.run()
    assert scheduler.num_preemptions > 0
    traffic.check_ended()


def test_a_client_that_runs_nothing_gets_a_state_from_the_client_with_the_most_sequences() -> None:
    scheduler = make_scheduler(64, 4, seqs=4, tokens=64, num_states=3)
    traffic = Traffic(scheduler)
    for serial in range(3):
        traffic.add(str(serial), [serial, 0, 1], 30, client="many")
    while scheduler.states.num_available:
        traffic.step()
    other = traffic.add("other", [1, 1, 0, 1, 1], 4, client="one")
    traffic.step()
    assert (other.slot >= 0, other.state_position, scheduler.num_preemptions) == (True, 4, 1)
    traffic.run()
    traffic.check_ended()


def drafting(num_states: int = 8, wrong: set[int] | None = None) -> tuple[Traffic, SequenceState]:
    """A sequence that has 15 tokens, of which 14 are computed, in pages of 8, and that drafts."""
    traffic = Traffic(make_scheduler(64, 8, tokens=64, num_states=num_states, speculation=Guesses(7, wrong or set())))
    sequence = traffic.add("a", prompt_of([0], 13), 40)
    traffic.step()
    assert (len(sequence.tokens), sequence.num_computed) == (15, 14)
    return traffic, sequence


def test_drafts_that_are_wrong_leave_the_state_before_them() -> None:
    traffic, sequence = drafting(wrong={0})
    states = traffic.scheduler.states
    before = (sequence.state, sequence.state_position)
    batch = traffic.scheduler.schedule()
    (chunk,) = batch.chunks
    assert (chunk.start, len(chunk.drafts), [position for position, _ in chunk.stores]) == (14, 7, [16])
    assert (sequence.state, states.num_held) == (before[0], 2), "it is not known yet whether the page is filled"
    tokens = traffic.device.launch(batch)
    traffic.inflight.append((batch, tokens))
    traffic.take_in()
    assert (len(sequence.tokens), sequence.state, sequence.state_position) == (16, *before)
    assert (states.num_held, sequence.retired) == (1, [])
    traffic.run()
    traffic.check_ended()


def test_drafts_that_are_right_move_to_the_state_after_them() -> None:
    traffic, sequence = drafting()
    batch = traffic.scheduler.schedule()
    ((position, state),) = batch.chunks[0].stores
    traffic.inflight.append((batch, traffic.device.launch(batch)))
    traffic.take_in()
    assert (sequence.state, sequence.state_position, traffic.scheduler.states.num_held) == (state, position, 1)
    traffic.run()
    traffic.check_ended()


def test_drafts_fill_no_page_when_states_are_short() -> None:
    traffic, _ = drafting(num_states=3)
    other = traffic.add("b", [1, 1, 1], 40)
    traffic.scheduler.waiting.first()
    for _ in range(2):
        traffic.scheduler.states.allocate()
    batch = traffic.scheduler.schedule()
    assert [(chunk.start + chunk.length <= 16, len(chunk.stores)) for chunk in batch.chunks] == [(True, 0)]
    assert other.slot == -1


def test_a_step_that_is_rolled_back_leaves_the_state_from_which_it_began() -> None:
    """Although the step before is in flight, and the next one has been told to read what the step was to write."""
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8), depth=1)
    sequence = traffic.add("a", prompt_of([0], 29), 20)
    traffic.step()
    while sequence.num_computed % 4 != 3:
        traffic.step()
    before = sequence.state_position
    batch = traffic.scheduler.schedule()
    assert (batch.chunks[0].start, len(batch.chunks[0].stores), sequence.state_position) == (before + 3, 1, before + 4)
    traffic.device.spoil(batch)
    traffic.scheduler.rollback(batch)
    traffic.check()
    traffic.take_in()
    batch = traffic.scheduler.schedule()
    assert (batch.chunks[0].start, traffic.device.states[batch.chunks[0].source]) == (before, tuple(sequence.tokens[:before]))
    traffic.inflight.append((batch, traffic.device.launch(batch)))
    traffic.run()
    traffic.check_ended()


def test_a_failed_step_leaves_the_states_before_it_and_none_of_its_own() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=32, interval=4))
    prompt = prompt_of([0], 29)
    traffic.add("a", prompt, 20)
    for _ in range(4):
        traffic.step()
    traffic.step("fail")
    assert traffic.sequences["a"].error is FAILURE
    traffic.add("prompt", prompt_of([1], 29), 20)
    traffic.step("fail")
    assert traffic.scheduler.states.num_held == 0
    again = traffic.add("again", prompt, 20)
    fresh = traffic.add("fresh", prompt_of([1], 29), 2)
    traffic.run()
    assert (again.num_cached_tokens, fresh.num_cached_tokens) == (28, 0)


def test_the_state_of_a_failed_step_is_not_kept_for_the_page_of_another_sequence() -> None:
    """Two sequences compute the same pages. Those of the first one are registered, and the second one fails."""
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=12))
    prompt = prompt_of([0], 29)
    traffic.add("pages", prompt, 1)
    traffic.run()
    traffic.scheduler.states.forget(list(traffic.sequences["pages"].page_hashes))
    traffic.add("fails", prompt, 20)
    traffic.step("fail")
    assert traffic.scheduler.states.num_kept == 0
    again = traffic.add("again", prompt, 2)
    traffic.run()
    assert again.num_cached_tokens == 0


def test_states_that_may_not_be_finite_are_never_read_again() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8, interval=8))
    prompt = prompt_of([0], 29)
    traffic.add("first", prompt, 1)
    traffic.run()
    broken = traffic.add("broken", [*prompt, 0, 1, 2, 0, 1], 20)
    traffic.step("not finite")
    assert (broken.num_cached_tokens, broken.error) == (28, None)
    traffic.step("not finite")
    assert (broken.num_cached_tokens, broken.error.code) == (0, "not_finite")
    again = traffic.add("again", prompt, 3)
    traffic.run()
    assert again.num_cached_tokens == 0


def test_a_token_that_is_computed_again_goes_back_to_the_state_before_it() -> None:
    """The token fills a page, so that the next step was to read the state after it."""
    for length in (3, 4, 31, 32, 33):
        for depth in (0, 1):
            traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8), depth)
            traffic.add("a", prompt_of([0], length - 1), 12)
            for _ in range(5):
                traffic.step("postpone")
                traffic.step()
            traffic.run()
            traffic.check_ended()


def test_the_superfluous_step_of_an_ended_sequence_leaves_the_state_of_its_answer() -> None:
    """The step after the last token is in flight when the token is found to be the last, and it fills a page."""
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8), depth=1)
    prompt = prompt_of([0], 29)
    sequence = traffic.add("a", prompt, 20)
    while sequence.num_computed < 36:
        traffic.step()
    assert (len(sequence.tokens), sequence.state_position) == (36, 36)
    traffic.scheduler.stop(sequence)
    traffic.check()
    again = traffic.add("again", [*sequence.tokens, 0, 1, 2], 1)
    traffic.scheduler.schedule()
    assert again.num_cached_tokens == 32, "the state after 36 tokens is not confirmed"


def test_pages_behind_the_window_are_released_and_states_stay() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8, window=8, keys_per_tile=4))
    sequence = traffic.add("a", prompt_of([0], 59), 20)
    scheduler = traffic.scheduler
    scheduler.commit(scheduler.schedule(), [0])
    while scheduler.sequences:
        scheduler.commit(scheduler.schedule(), [0])
        assert scheduler.states.num_held == (1 if scheduler.sequences else 0)
        if scheduler.sequences:
            assert sequence.num_released == (sequence.num_computed - 1 - 8) // 4
    scheduler.check_integrity()


def test_the_numbers_of_a_chunk_tell_ranks_with_other_states_apart() -> None:
    numbers = set()
    for taken in range(2):
        scheduler = make_scheduler(64, 4, tokens=64, num_states=8)
        for _ in range(taken):
            scheduler.states.allocate()
        scheduler.add(make_request("a", [0] * 9))
        batch = scheduler.schedule()
        numbers.add(batch.chunks[0].numbers())
        scheduler.commit(batch, [0])
        numbers.add(scheduler.schedule().chunks[0].numbers())
    assert len(numbers) == 4


def test_a_renewed_scheduler_has_a_new_table_of_states() -> None:
    scheduler = make_scheduler(64, 4, tokens=64, num_states=8, interval=40)
    scheduler.add(make_request("a", [0] * 9))
    scheduler.schedule()
    fresh = scheduler.renewed()
    assert (fresh.states.num_states, fresh.states.interval, fresh.states.num_held) == (8, 40, 0)
    fresh.check_integrity()
    scheduler.pages.on_forget = None
    assert fresh.pages.on_forget is not None
