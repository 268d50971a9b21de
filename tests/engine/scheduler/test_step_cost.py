"""What a step costs: learned from steps whose times are those of a known device, and what one odd step does to it."""

from __future__ import annotations

import random

import pytest

from fa_serve.engine.scheduler.step_cost import PRIOR_KEYS, RECENT, ImageSeconds, StepCost, StepSize


def device(size: StepSize) -> float:
    """About an 8B model on an H100: weights 5.5 ms, 25 us for a row of products, 50 ns for a key of a row, 1 ns for a pair."""
    products = max(5.5e-3, 25e-6 * (size.rows + size.prompt_tokens))
    return products + 50e-9 * size.keys + 1e-9 * size.pairs


def draw_step(draw: random.Random, prompts: bool) -> StepSize:
    rows = draw.randint(8, 15)
    before = draw.randint(0, 28_000)
    tokens = draw.randint(1024, 4095) if prompts else 0
    return StepSize(rows, rows * draw.randint(200, 20_000), tokens, tokens * (before + tokens // 2))


def learned(steps: int = 300, slow: int = 0) -> StepCost:
    """slow: every so many steps one takes five times as long"""
    draw = random.Random(1)
    cost = StepCost()
    for number in range(steps):
        size = draw_step(draw, number % 3 > 0)
        cost.record(size, device(size) * (5.0 if slow and number % slow == slow - 1 else 1.0))
    return cost


@pytest.mark.parametrize("slow", [0, 10])
def test_the_time_of_a_step_is_predicted_from_its_tokens_and_its_keys(slow: int) -> None:
    """Over prompts with up to 28,000 keys before them and sequences of up to 20,000."""
    cost = learned(slow=slow)
    draw = random.Random(2)
    errors = []
    for number in range(200):
        size = draw_step(draw, number % 2 > 0)
        errors.append(abs(cost.seconds(size) / device(size) - 1))
    errors.sort()
    assert errors[100] < 0.06
    assert errors[190] < 0.2


def test_attention_counts_before_it_is_measured() -> None:
    cost = StepCost()
    assert cost.prompt_seconds(512, 10_000) == 0.0, "nothing was measured"
    cost.record(StepSize(prompt_tokens=512), 0.02)
    assert cost.prompt_seconds(512, PRIOR_KEYS - 256) == pytest.approx(2 * 512 * (0.02 / 512), rel=1e-6)


def test_a_slope_that_recent_steps_do_not_tell_is_forgotten() -> None:
    """Otherwise a change of the device that happens to fall together with one of the prompts counts for ever."""
    cost = learned()
    behind = cost.prompt_seconds(2048, 20_000)
    for _ in range(2 * RECENT):
        cost.record(StepSize(rows=8, prompt_tokens=2048, pairs=2048 * 1024), 0.104)
    assert cost.prompt_seconds(2048, 20_000) != pytest.approx(behind, rel=0.01)
    plain = cost.prompt_seconds(2048, 0) / (1 + 1024 / PRIOR_KEYS)
    assert cost.prompt_seconds(2048, 20_000) == pytest.approx(plain * (1 + 21_024 / PRIOR_KEYS), rel=1e-6)


def test_decoding_is_learned_by_rows_and_keys() -> None:
    cost = learned()
    short = cost.decode_seconds(12, 12 * 500)
    long = cost.decode_seconds(12, 12 * 20_000)
    assert short == pytest.approx(5.5e-3 + 50e-9 * 6_000, rel=0.1)
    assert long == pytest.approx(5.5e-3 + 50e-9 * 240_000, rel=0.1)


def test_images_are_no_part_of_the_time_of_prompts_and_of_decoding() -> None:
    """The next step's images hold up the step before it, whose time tells nothing about the images that it has itself."""
    cost = StepCost()
    decoding = StepSize(rows=8)
    cost.record(decoding, 0.005)
    for _ in range(10):
        cost.record(decoding, 0.014, ImageSeconds(beside=0.009))
        cost.record(decoding._replace(image_tokens=400), 0.005, ImageSeconds(own=0.009))
        cost.record(decoding._replace(prompt_tokens=400, image_tokens=400), 0.013, ImageSeconds(own=0.009))
    assert cost.image_seconds(400) == pytest.approx(0.009)
    assert cost.prompt_seconds(400, 0) == pytest.approx(0.008, rel=0.02)
    assert cost.decode_seconds(8, 0) == 0.005
