"""The share of prompts in a step: sequences that decode wait no longer than the target, and prompts never starve.

The costs of steps are simulated: a step takes the time of reading the weights, or that of its rows if it has many. Whatever the
measured times are, what the share predicts stays below the target, and equal times give equal decisions.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from scheduling import BUDGET, Cost, Run, step_cost

from fa_serve.engine import EngineConfig, SamplingParams
from fa_serve.engine.scheduler.prompt_share import (
    MIN_PROMPT_TOKENS,
    TARGET_SECONDS,
    TARGET_STEPS,
    TARGET_TTFT,
    PromptShare,
)
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.step_cost import RECENT, StepSize


def learned(target: float | None, cost: Cost = step_cost, rows: int = 64) -> PromptShare:
    """A share that has measured steps of growing size."""
    share = PromptShare(target)
    measure(share, rows, 0, cost(rows, 0))
    for _ in range(40):
        tokens = min(share.limit(StepSize(rows)), BUDGET)
        measure(share, rows, tokens, cost(rows, tokens))
        measure(share, rows, 0, cost(rows, 0))
    return share


def measure(share: PromptShare, rows: int, tokens: int, seconds: float) -> None:
    """A step has taken so long, whose prompt begins with it."""
    share.record(prompt_step(rows, tokens), seconds)


def prompt_step(rows: int, tokens: int) -> StepSize:
    return StepSize(rows, 0, tokens, tokens * tokens // 2)


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("target", [0.015, 0.025, 0.05])
def test_a_step_of_the_largest_share_keeps_the_target(rows: int, target: float) -> None:
    share = learned(target, rows=rows)
    tokens = share.limit(StepSize(rows))
    if step_cost(rows, MIN_PROMPT_TOKENS) > target:
        assert tokens == MIN_PROMPT_TOKENS
    else:
        assert 0.6 * target < step_cost(rows, tokens) <= target * 1.1, "the first rows cost less"


@settings(max_examples=examples(200), deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 8192), st.floats(1e-5, 10.0)), max_size=60),
    rows=st.integers(1, 400),
    target=st.none() | st.floats(0.0005, 1.0),
)
def test_the_predicted_time_stays_below_the_target_whatever_was_measured(steps, rows, target) -> None:
    share = PromptShare(target)
    for step in steps:
        measure(share, *step)
    tokens = share.limit(StepSize(rows))
    assert tokens >= MIN_PROMPT_TOKENS
    seconds = share.cost.seconds(prompt_step(rows, tokens))
    assert tokens == MIN_PROMPT_TOKENS or seconds <= share.target(StepSize(rows)) * (1 + 1e-9)


def test_the_share_grows_by_steps_until_a_large_one_was_measured() -> None:
    """The first rows of a step are nearly free, so a small step says little of a large one."""
    share = PromptShare(0.025)
    measure(share, 8, 0, step_cost(8, 0))
    limits = []
    for _ in range(12):
        limits.append(share.limit(StepSize(8)))
        measure(share, 8, limits[-1], step_cost(8, limits[-1]))
    assert limits[0] == MIN_PROMPT_TOKENS, "nothing is known"
    assert all(later <= max(1.25 * earlier, earlier + 64) + 8 for earlier, later in pairwise(limits))
    assert max(step_cost(8, tokens) for tokens in limits) <= 0.025 * 1.1
    assert limits[-1] > 700


def test_one_slow_step_changes_little() -> None:
    """A step that waits for a compiler says nothing of the next ones."""
    share = learned(0.025)
    before = share.limit(StepSize(64))
    measure(share, 64, before, 3.0)
    measure(share, 64, 0, 2.0)
    assert share.limit(StepSize(64)) == before
    for _ in range(RECENT):
        tokens = share.limit(StepSize(64))
        measure(share, 64, tokens, 3 * step_cost(64, tokens))
    assert share.limit(StepSize(64)) < before / 2, "but what stays slow is learned"
    for _ in range(2 * RECENT):
        tokens = share.limit(StepSize(64))
        measure(share, 64, tokens, step_cost(64, tokens))
    assert share.limit(StepSize(64)) == before, "and forgotten"


def test_a_target_is_derived_from_decoding() -> None:
    share = learned(None)
    assert share.target(StepSize(64)) == pytest.approx(TARGET_STEPS * step_cost(64, 0))
    small = learned(None, lambda rows, tokens: 0.0008 + 2e-6 * tokens)
    assert small.target(StepSize(64)) == TARGET_SECONDS, "faster than people read"
    assert PromptShare().target(StepSize(5)) == TARGET_SECONDS
    assert PromptShare(0.03).target(StepSize(5)) == 0.03


def test_steps_grow_when_first_tokens_are_late() -> None:
    share = learned(None)
    decoding = StepSize(64)
    plain = share.target(decoding)
    assert share.target(decoding, TARGET_TTFT) == plain, "the first token is in time"
    assert share.target(decoding, 3 * TARGET_TTFT) == pytest.approx(3 * plain)
    for expected in (0.0, 0.4, 0.8, 1.6):  # a step grows by one size at a time
        for _ in range(20):
            tokens = share.limit(decoding, 0, expected)
            measure(share, 64, tokens, step_cost(64, tokens))
        assert 0.6 * share.target(decoding, expected) < step_cost(64, tokens) <= 1.1 * share.target(decoding, expected)
    assert tokens > 4 * share.limit(decoding)


def test_a_target_of_gaps_is_relaxed_only_for_a_target_of_first_tokens() -> None:
    assert PromptShare(0.03).target(StepSize(8), expected=60.0) == 0.03
    assert PromptShare(0.03, 1.0).target(StepSize(8), expected=0.9) == 0.03
    assert PromptShare(0.03, 1.0).target(StepSize(8), expected=4.0) == pytest.approx(0.12)
    assert PromptShare(None, 1.0).target(StepSize(8), expected=2.0) == pytest.approx(2 * TARGET_SECONDS)


def test_a_first_token_is_expected_after_what_is_left_of_its_prompt() -> None:
    """So steps grow at once for a long prompt, and for a short one when it has waited for long."""
    share = learned(None)
    assert share.expected(0.0, 300, 0) < 0.01
    assert share.expected(0.5, 300, 0) == pytest.approx(0.5 + step_cost(0, 300), abs=0.01)
    assert share.expected(0.0, 20_000, 0) > 0.5
    assert share.expected(0.0, 1_000, 19_000) < 0.1


def test_prompts_behind_many_keys_get_fewer_tokens() -> None:
    share = learned(0.05)
    assert share.limit(StepSize(64), before=30_000) < 0.7 * share.limit(StepSize(64))


def test_steps_have_few_sizes() -> None:
    """A step with prompts may need another CUDA graph for each multiple of 64 tokens."""
    sizes = set()
    for target in range(10, 100):
        share = learned(target / 1000)
        sizes.add(64 + share.limit(StepSize(64)))
    assert all(size % MIN_PROMPT_TOKENS == 0 for size in sizes)
    assert len(sizes) < 20


def test_the_engine_takes_milliseconds() -> None:
    assert EngineConfig(target_itl=30).prompt_share().target(StepSize(1)) == 0.03
    assert EngineConfig(target_itl=None).prompt_share().target(StepSize(1)) == TARGET_SECONDS
    assert EngineConfig().prompt_share() is None
    assert EngineConfig(target_itl=30, target_ttft=400).prompt_share().target(StepSize(1), 0.8) == pytest.approx(0.06)
    assert EngineConfig(target_itl=None, target_ttft=400).prompt_share().target(StepSize(1), 0.4) == TARGET_SECONDS
    assert EngineConfig(target_itl=None, target_ttft=400, device="cpu").prompt_share() is not None
    assert EngineConfig(target_itl=30, device="cpu").prompt_share().target(StepSize(1)) == 0.03
    assert EngineConfig(target_itl=None, device="cpu").prompt_share() is None, "small chunks cost too much there"


def decoding(scheduler: Scheduler) -> int:
    return sum(x.num_computed + 1 >= x.num_tokens and not x.is_last_pending for x in scheduler.running)


traffic = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 1200), st.integers(1, 12)),  # the step, tokens of the prompt and the answer
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(25), deadline=None)
@given(
    arrivals=traffic, budget=st.integers(16, 2048), target=st.sampled_from([None, 0.001, 0.01, 0.05]), depth=st.integers(0, 1)
)
def test_random_traffic(arrivals, budget, target, depth) -> None:
    """While sequences decode, prompts stay within the share and get some of it. Otherwise they get the whole step."""
    share = PromptShare(target)
    run = Run(share, tokens=budget, depth=depth, num_pages=4000, page_size=4)
    scheduler = run.scheduler
    step = 0
    while step <= 30 or scheduler.sequences or run.inflight:
        assert step < 20_000, "no progress"
        for index, (arrival, length, max_tokens) in enumerate(arrivals):
            if arrival == step:
                run.add(str(index), [index] * length, max_tokens, serial=index)
        count = decoding(scheduler)
        late = [x for x in scheduler.sequences.values() if not x.num_output_tokens]
        rest = [(run.now - x.request.arrival, x.num_tokens - x.num_computed, x.num_computed) for x in late]
        expected = max((share.expected(*each) for each in rest), default=0.0)
        limit, completing = share.limits(StepSize(count), budget, 0, expected) if count else (0, 0)
        seconds = share.cost.seconds(prompt_step(count, limit))
        assert limit <= MIN_PROMPT_TOKENS or seconds <= share.target(StepSize(count), expected) * (1 + 1e-9)
        missing = sum(x.num_tokens - x.num_computed for x in scheduler.running if x.num_tokens - x.num_computed > 1)
        waiting = sum(x.num_tokens - x.num_computed for x in scheduler.sequences.values() if not x.num_pending)
        batch = run.step()
        if count:
            assert batch.num_prompt_tokens <= completing
            if batch.num_prompt_tokens > limit:
                assert [chunk for chunk in batch.chunks if chunk.length != chunk.num_samples][-1].num_samples, "it is complete"
            assert sum(chunk.length == chunk.num_samples for chunk in batch.chunks) >= count, (
                "each sequence that decodes has a place"
            )
            assert batch.num_prompt_tokens >= min(MIN_PROMPT_TOKENS, budget - 8, missing), "prompts starve"
        else:
            assert batch.num_tokens == min(budget, waiting), "nothing decodes, so prompts get the whole step"
        step += 1


@pytest.mark.parametrize("target", [None, 0.02])
@pytest.mark.parametrize("excess", [0.9, 1.25, 1.4])
def test_a_prompt_is_not_divided_for_a_small_rest(target: float | None, excess: float) -> None:
    """Unless a time was asked for."""
    run = Run(PromptShare(target))
    run.add("first", [1] * 20, 400)
    serial = 0

    def chunks_of(length: int) -> list[int]:
        """The lengths of the chunks in which a prompt is computed."""
        nonlocal serial
        serial += 1
        sequence = run.add(str(serial), [serial] * length, 1, serial=serial)
        lengths = []
        while not sequence.finished:
            lengths += [chunk.length for chunk in run.step().chunks if chunk.sequence is sequence]
        return lengths

    for _ in range(20):
        chunks_of(2000)
    limit = run.scheduler.prompt_share.limit(StepSize(1))
    assert limit > 500
    length = int(excess * limit)
    divided = excess > (4 / 3 if target is None else 1)
    assert chunks_of(length) == ([limit, length - limit] if divided else [length])


def test_a_prompt_that_cannot_be_completed_keeps_the_share() -> None:
    """A step makes log-probabilities of at most 256 prompt tokens."""
    share = PromptShare()
    share.limits = lambda *step: (240, 320)  # type: ignore[method-assign]
    run = Run(share)
    run.add("first", [1] * 20, 400)
    for _ in range(3):
        run.step()
    for serial, logprobs in ((2, None), (3, 0)):
        params = SamplingParams(prompt_logprobs=logprobs)
        sequence = run.add(str(serial), [serial] * 300, 1, serial=serial, params=params)
        lengths = []
        while not sequence.finished:
            lengths += [chunk.length for chunk in run.step().chunks if chunk.sequence is sequence]
        assert lengths == ([300] if logprobs is None else [240, 60])


def test_equal_times_give_equal_steps() -> None:
    """The times are the only input besides the requests: a lockstep of several schedulers needs no more than these."""

    def chunks(cost: Cost) -> list[list[tuple[str, int, int]]]:
        run = Run(PromptShare(0.02), cost)
        for index in range(6):
            run.add(str(index), [index] * (300 * index + 1), 12, serial=index)
        found = []
        while run.scheduler.sequences:
            batch = run.step()
            found.append([(chunk.sequence.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks])
        return found

    assert chunks(step_cost) == chunks(step_cost)
    assert chunks(step_cost) != chunks(lambda rows, tokens: 3 * step_cost(rows, tokens))


def test_a_long_prompt_holds_up_nobody() -> None:
    """Without a limit, a step that decodes takes as long as a whole budget of prompt tokens; with one, about the target."""

    def longest(share: PromptShare | None) -> tuple[float, int]:
        """The longest time of a step in which a sequence decodes, and the steps until the long prompt has its first token."""
        run = Run(share)
        run.add("short", [1] * 20, 400)
        for _ in range(30):
            run.step()
        sequence = run.add("long", [2] * 9000, 2, serial=1)
        seconds = []
        while not sequence.num_output_tokens:
            batch = run.step()
            seconds.append(step_cost(batch.num_tokens - batch.num_prompt_tokens, batch.num_prompt_tokens))
        return max(seconds), len(seconds)

    unlimited, few = longest(None)
    limited, more = longest(PromptShare(0.025))
    assert unlimited > 0.09
    assert limited <= 0.0255
    assert few < more < 25, "the time until the first token is within twice the time without a limit"
