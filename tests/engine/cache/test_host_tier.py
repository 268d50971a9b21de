"""The host tier under traffic: what is evicted comes back, and is what it was, whatever fails or is forgotten meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from random import Random

import pytest
from host_copies import connect, make_tier
from scheduling import make_scheduler
from state_traffic import SALTS, Traffic, prompt_of

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache import host_tier

AT_ONCE = (0, False, "")
PROMPT = prompt_of([0], 39)


def make_traffic(num_pages=24, slots=200, plan=None, num_states=0, state_slots=0, depth=64, **settings) -> Traffic:
    copies = make_tier(slots, state_slots, plan or repeat(AT_ONCE), depth)
    scheduler = make_scheduler(num_pages, 4, tokens=64, num_states=num_states, make_tier=copies, **settings)
    traffic = Traffic(scheduler, depth=1)
    connect(traffic)
    return traffic


def fill(traffic: Traffic, count: int, length: int = 40) -> None:
    """Prompts that take the pages of a small device. Each decodes for some steps, in which copies end."""
    for _ in range(count):
        number = len(traffic.sequences)
        traffic.add(f"fill-{number}", prompt_of([2, number % 3, number // 3 % 3, number // 9], length), 8)
        traffic.run()


def run_first(traffic: Traffic, **fields: object) -> list[bytes]:
    """A prompt whose pages have left the device afterwards. Returns their hashes."""
    sequence = traffic.add("first", PROMPT, 4, **fields)
    traffic.run()
    fill(traffic, 4)
    assert not traffic.scheduler.pages.match(sequence.page_hashes), "the device has none of them any more"
    for _ in range(3):  # the host has copies of everything that a prompt may evict
        traffic.scheduler.tier.finish()
        traffic.scheduler.tier.begin_step()
    return sequence.page_hashes


@pytest.mark.parametrize("plan", [AT_ONCE, (3, True, ""), (3, False, "")], ids=["at-once", "late", "early"])
def test_pages_that_were_evicted_come_back(plan) -> None:
    traffic = make_traffic(plan=repeat(plan))
    run_first(traffic)
    before = traffic.scheduler.tier.snapshot()
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 36
    stats = traffic.scheduler.tier.snapshot()
    assert (stats.num_hits, stats.bytes_in, stats.num_misses) == (9, 9, before.num_misses)
    assert (stats.num_lost, stats.num_failures) == (0, 0)
    assert 0 < stats.num_bytes_used <= stats.num_bytes == 200
    traffic.check_ended()


def test_a_sequence_waits_for_its_copies_and_others_go_on() -> None:
    traffic = make_traffic(plan=repeat((3, True, "")))
    run_first(traffic)
    other = traffic.add("other", prompt_of([1], 5), 12)
    traffic.step()
    again = traffic.add("again", PROMPT, 4)
    for _ in range(2):
        traffic.step()
        assert traffic.scheduler.tier.is_fetching
        assert (again.slot, other.finished) == (-1, False)
    before = len(other.tokens)
    traffic.run()
    assert len(other.tokens) > before
    assert traffic.scheduler.tier.snapshot().seconds > 0
    traffic.check_ended()


@pytest.mark.parametrize("looks", [1, 5])
def test_a_prompt_waits_until_the_pages_that_it_takes_are_copied(looks: int) -> None:
    """Copies are four pages ahead and take some steps, and each prompt takes nearly all pages at once."""
    traffic = make_traffic(num_pages=15, depth=4, plan=repeat((looks, True, "")))
    run_first(traffic)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 36
    assert traffic.scheduler.tier.snapshot().num_lost == 0
    traffic.check_ended()


def test_without_waiting_most_pages_of_a_flood_are_lost(monkeypatch) -> None:
    monkeypatch.setattr(host_tier, "LONGEST_WAIT", -1.0)
    traffic = make_traffic(num_pages=15, depth=4, plan=repeat((5, True, "")))
    run_first(traffic)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens < 20


def test_others_decode_while_a_prompt_waits_for_copies() -> None:
    traffic = make_traffic(num_pages=14, depth=1, plan=repeat((4, True, "")))
    traffic.add("first", PROMPT, 1)
    traffic.run()
    other = traffic.add("other", prompt_of([1], 4), 12)
    traffic.step()
    waiting = traffic.add("waiting", prompt_of([2], 30), 2)
    seen = []
    while not other.finished:
        traffic.step()
        seen.append((waiting.slot, traffic.scheduler.tier.is_awaited))
    assert seen.count((-1, True)) >= 3
    traffic.run()
    assert traffic.scheduler.tier.snapshot().num_lost == 0
    traffic.check_ended()


@pytest.mark.parametrize(
    ("plan", "slots"), [((10**9, True, ""), 200), ((0, True, "begin"), 200), ((1, True, "end"), 200), (AT_ONCE, 3)]
)
def test_a_prompt_does_not_wait_for_ever(plan, slots: int, monkeypatch) -> None:
    """Copies do not end, fail at once or later, or the host has no room: pages are lost, and everything ends."""
    monkeypatch.setattr(host_tier, "LONGEST_WAIT", 0.005)
    traffic = make_traffic(num_pages=15, slots=slots, depth=1, plan=repeat(plan))
    fill(traffic, 4)
    assert traffic.scheduler.tier.snapshot().num_lost > 0
    traffic.check_ended()


@pytest.mark.slow
def test_another_prompt_begins_to_wait_anew(monkeypatch) -> None:
    """The first one has left while it waited, so its time says nothing of the second."""
    traffic = make_traffic(plan=repeat((10**9, False, "")))
    tier = traffic.scheduler.tier
    fill(traffic, 4)
    now = [0.0]
    monkeypatch.setattr(host_tier.time, "monotonic", lambda: now[0])
    assert not tier.save(20, set(), "first")
    now[0] = 0.4
    assert not tier.save(20, set(), "first")
    now[0] = 100.0
    assert not tier.save(20, set(), "second")
    now[0] = 100.0 + host_tier.LONGEST_WAIT + 0.1
    assert tier.save(20, set(), "second")


def test_an_engine_with_nothing_else_to_do_waits_for_the_copies_of_a_prompt() -> None:
    traffic = make_traffic(num_pages=15, depth=1, plan=repeat((10**9, True, "")))
    traffic.add("first", PROMPT, 1)
    traffic.run()
    waiting = traffic.add("waiting", prompt_of([2], 30), 2)
    traffic.step()
    tier = traffic.scheduler.tier
    assert (tier.is_awaited, tier.is_fetching, waiting.slot) == (True, False, -1)
    tier.wait()
    traffic.step()
    assert (tier.is_awaited, tier.snapshot().num_lost) == (False, 0)
    traffic.scheduler.abort("waiting")
    traffic.run()


def test_pages_come_back_to_their_salt_only() -> None:
    traffic = make_traffic()
    run_first(traffic, cache_salt="salt")
    for salt, cached in ((None, 0), ("other", 0), ("salt", 36)):
        again = traffic.add(f"again-{salt}", PROMPT, 4, cache_salt=salt)
        traffic.run()
        assert again.num_cached_tokens == cached


def test_pages_come_back_to_their_adapter_only() -> None:
    tables = make_traffic().scheduler.pages
    chains = []
    for adapter in (0, 1, 2):
        chains.append([])
        tables.hash_pages(PROMPT, chains[-1], None, adapter)
    assert len({chain[-1] for chain in chains}) == 3


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_copy_to_the_device_that_fails_means_that_pages_are_computed(fails: str) -> None:
    plan = [AT_ONCE] * 1000
    traffic = make_traffic(plan=(plan[number] for number in range(1000)))
    run_first(traffic)
    plan[:] = [(2, True, fails)] * 1000
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 0
    assert traffic.scheduler.tier.snapshot().num_hits == 0
    assert traffic.scheduler.tier.snapshot().num_failures > 0
    traffic.check_ended()


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_copy_to_the_host_that_fails_leaves_nothing_to_be_found(fails: str) -> None:
    traffic = make_traffic(plan=repeat((1, True, fails)))
    run_first(traffic)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 0
    assert len(traffic.scheduler.pages.host) == 0
    traffic.check_ended()


def test_new_weights_leave_nothing_on_the_host() -> None:
    traffic = make_traffic(plan=repeat((2, True, "")))
    run_first(traffic)
    again = traffic.add("again", PROMPT, 4)
    traffic.step()
    assert traffic.scheduler.tier.is_fetching
    while traffic.inflight:
        traffic.take_in()
    traffic.scheduler.forget_cache()
    traffic.check()
    assert (len(traffic.scheduler.pages.host), traffic.scheduler.pages.num_held) == (0, 0)
    traffic.run()
    assert again.num_cached_tokens == 0
    traffic.check_ended()


def test_what_was_computed_from_a_page_that_is_not_finite_is_dropped_from_the_host() -> None:
    """The first pages are on the device again, where they are found not to be finite. What follows is on the host alone."""
    traffic = make_traffic(num_pages=40)
    hashes = run_first_of_many(traffic)
    assert traffic.scheduler.pages.reach(hashes) == 9
    broken = traffic.add("broken", PROMPT[:18], 4)
    traffic.step("not finite")
    traffic.step("not finite")
    assert (broken.num_cached_tokens, broken.error) == (16, None)
    while not broken.finished:
        traffic.step("not finite")
    assert (broken.num_cached_tokens, broken.error.code) == (0, "not_finite")
    assert traffic.scheduler.pages.reach(hashes) == 0
    assert not any(each in traffic.scheduler.pages.host for each in hashes)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 0


def run_first_of_many(traffic: Traffic) -> list[bytes]:
    sequence = traffic.add("first", PROMPT, 1)
    traffic.run()
    fill(traffic, 8)
    assert not traffic.scheduler.pages.match(sequence.page_hashes)
    return sequence.page_hashes[:9]


def test_prompts_whose_logits_are_wanted_are_computed_whole() -> None:
    traffic = make_traffic()
    run_first(traffic)
    again = traffic.add("again", PROMPT, 1, params=SamplingParams(prompt_logprobs=0))
    traffic.run()
    assert again.num_cached_tokens == 0


def test_a_full_host_evicts_what_was_demoted_first() -> None:
    traffic = make_traffic(slots=12)
    run_first(traffic)
    tier = traffic.scheduler.tier
    assert tier.snapshot().num_evictions > 0
    assert tier.snapshot().num_bytes_used <= tier.snapshot().num_bytes == 12
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 0, "the host has kept those of later prompts"
    traffic.check_ended()


def test_a_host_with_little_room_does_not_copy_the_same_pages_again_and_again() -> None:
    traffic = make_traffic(slots=4)
    traffic.add("first", PROMPT, 4)
    traffic.run()
    traffic.add("long", prompt_of([1], 5), 40)
    traffic.run()
    assert traffic.scheduler.tier.snapshot().bytes_out == 4


def test_a_state_comes_back_with_its_pages() -> None:
    traffic = make_traffic(num_states=6, state_slots=32, plan=repeat((2, True, "")))
    run_first(traffic)
    assert traffic.scheduler.states.match(traffic.sequences["first"].page_hashes) == (0, -1)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 36
    traffic.check_ended()


def test_a_state_comes_back_alone() -> None:
    traffic = make_traffic(num_pages=200, num_states=6, state_slots=32)
    sequence = traffic.add("first", PROMPT, 4)
    traffic.run()
    fill(traffic, 4)
    assert len(traffic.scheduler.pages.match(sequence.page_hashes)) >= 9
    assert traffic.scheduler.states.match(sequence.page_hashes) == (0, -1)
    again = traffic.add("again", PROMPT, 4)
    traffic.run()
    assert again.num_cached_tokens == 36
    assert traffic.scheduler.tier.snapshot().num_hits == 0, "no page had to come back"
    traffic.check_ended()


def test_a_renewed_scheduler_knows_nothing_of_what_is_on_the_host() -> None:
    traffic = make_traffic(plan=repeat((2, True, "")))
    run_first(traffic)
    traffic.add("again", PROMPT, 4)
    traffic.step()
    old = traffic.scheduler
    fresh = Traffic(old.renewed(), depth=1)
    connect(fresh)
    again = fresh.add("again", PROMPT, 4)
    fresh.run()
    assert again.num_cached_tokens == 0
    assert len(old.pages.host) > 0
    run = fresh.scheduler.tier.snapshot()
    assert run.num_bytes == 200


def random_plan(random: Random) -> Iterator[tuple[int, bool, str]]:
    while True:
        fails = random.choice(["begin", "end"]) if random.random() < 0.05 else ""
        yield random.randrange(4), random.random() < 0.5, fails


@pytest.mark.parametrize("num_states", [0, 8])
def test_random_traffic(num_states: int) -> None:
    """Every answer is what it is without a tier, which the device asserts at every step, and nothing is lost."""
    hits = 0
    for seed in range(6):
        random = Random(seed)
        slots, depth = random.choice([(8, 6), (40, 16), (200, 64)])
        traffic = make_traffic(24, slots, random_plan(random), num_states, slots // 4 + 1, depth, seqs=4)
        for number in range(60):
            beginning = prompt_of([random.randrange(3), random.randrange(2)], random.choice([8, 20, 30]))
            ending = prompt_of([random.randrange(3)], random.randrange(8))
            salt = random.choice(SALTS)
            traffic.add(f"{number}", [*beginning, *ending], random.randrange(1, 12), cache_salt=salt)
            for _ in range(random.randrange(8)):
                outcomes = ["fail", "roll back", "not finite", "postpone"] if random.random() < 0.06 else [""]
                traffic.step(random.choice(outcomes), random.randrange(4))
            if random.random() < 0.05:
                traffic.scheduler.abort(f"{random.randrange(number + 1)}")
            if random.random() < 0.03:
                while traffic.inflight:
                    traffic.take_in()
                traffic.scheduler.forget_cache()
            traffic.check()
        traffic.run()
        traffic.scheduler.tier.finish()
        traffic.check_ended()
        hits += traffic.scheduler.tier.snapshot().num_hits
    assert hits > 20, hits
