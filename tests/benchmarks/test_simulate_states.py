"""The simulation of the prefix cache of states: what it counts, on traffic small enough to count by hand."""

from __future__ import annotations

import random

import pytest

from benchmarks.engine.simulate_states import Memory, Policy, Talk, simulate, tokens

MEMORY = Memory(total=1000 * 2048, state=2048, token=1)


def talks(count: int = 4) -> list[Talk]:
    """Conversations of three turns, one after the other in each turn: 60 tokens are new each time, and answers have 20."""
    draw = random.Random(0)
    return [Talk(tokens(draw, 30), [(60, 20)] * 3, True, 10_000 * number) for number in range(count)]


@pytest.mark.parametrize(("ends", "again"), [(True, (110 - 96) + (190 - 176)), (False, (110 - 80) + (190 - 160))])
def test_tokens_that_are_computed_again_are_those_after_the_last_state(ends: bool, again: int) -> None:
    outcome = simulate(talks(), MEMORY, Policy(ends=ends), random.Random(1))
    assert (outcome.num_requests, outcome.num_common) == (12, 4 * (110 + 190))
    assert outcome.num_again == 4 * again
    assert outcome.num_cached == outcome.num_common - outcome.num_again
    assert outcome.num_preemptions == 0


def test_memory_is_divided_by_bytes() -> None:
    assert Memory(total=300 * 64, state=64, token=1).divide(state_tokens=128, page_size=16) == (800, 100)
