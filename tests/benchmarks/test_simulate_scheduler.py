"""The simulation of the scheduler: what it measures, on loads small enough to count by hand, and what its policies show."""

from __future__ import annotations

import random

import pytest

from benchmarks.engine.simulate_scheduler import POLICIES, Arrival, Device, Outcome, percentile, simulate, tokens
from fa_serve.engine.scheduler.step_cost import StepSize

DEVICE = Device(weights=0.01, token=1e-4, chunk=0.0, key=0.0, pair=0.0, row=0.0, host=0.0)


def test_times_are_those_of_the_device() -> None:
    """A prompt of 300 tokens takes 30 ms, a step that decodes 10 ms; the second request arrives while the first decodes."""
    draw = random.Random(0)
    outcome = simulate([Arrival(1.0, tokens(draw, 300), 3)], POLICIES["fa_serve"](), DEVICE)
    assert outcome.first == pytest.approx([0.03])
    assert outcome.gaps == pytest.approx([0.01, 0.01])
    assert outcome.seconds == pytest.approx(1.05)
    assert outcome.times()["gap p99"] == pytest.approx(10.0)


def test_another_request_comes_when_one_has_ended() -> None:
    draw = random.Random(0)
    arrivals = [Arrival(at, tokens(draw, 50), 2, n=2) for at in (0.0, -1.0)]
    outcome = simulate(arrivals, POLICIES["fa_serve"](), DEVICE)
    assert (len(outcome.first), len(outcome.gaps)) == (4, 4)
    assert outcome.first == pytest.approx([0.01] * 4, abs=0.011)
    assert outcome.rate == pytest.approx(8 / outcome.seconds)


def test_the_device_hides_products_behind_the_weights() -> None:
    device = Device()
    assert device.seconds(StepSize(rows=8)) == pytest.approx(device.host + device.weights + 8 * device.row)
    assert device.seconds(StepSize(0, 0, 4096, 0)) == pytest.approx(device.host + 4096 * device.token + device.chunk)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 75) == 1.75


def test_long_prompts_wait_less_than_with_the_guard_and_hold_up_tokens_less_than_in_vllm() -> None:
    """A third of the load that the engine's page shows."""

    def outcome(policy: str) -> Outcome:
        draw = random.Random(3)
        arrivals = [Arrival(number / 1.6, tokens(draw, draw.randint(750, 29_000)), 100) for number in range(20)]
        return simulate(arrivals, POLICIES[policy]())

    ours, guard, vllm = (outcome(policy).times() for policy in ("fa_serve", "guard", "vllm"))
    assert ours["first token p50"] < 0.9 * guard["first token p50"]
    assert ours["first token p50"] < 1.1 * vllm["first token p50"]
    assert ours["first token p99"] < 1.1 * vllm["first token p99"]
    assert ours["gap p99"] < 0.7 * vllm["gap p99"]
