"""The simulation of a cluster against the figures that it is made from, and others."""

import json

import pytest

pytest.importorskip("simpy", reason="the bench extra is not installed")
from simulate_cluster import RESULTS, ClosedLoop, Engine, Front, fitted, fronts_needed, h200_engine, simulate

FREE = Front(0.0, 0.0)


def measured(case: str) -> float:
    lines = [
        json.loads(line) for name in ("serving", "engine") for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()
    ]
    return next(line["ours"] for line in lines if line["case"] == case)


def test_a_fit_gives_back_the_engine_that_made_the_figures():
    engine = Engine(0.005, 20e-6, 24e-6)
    loops = []
    for at_once, tokens_in, tokens_out in ((2, 32, 64), (64, 32, 64), (8, 512, 32)):
        step = engine.base + engine.sequence * at_once + engine.prompt_token * at_once * tokens_in / tokens_out
        loops.append(ClosedLoop(at_once, tokens_in, tokens_out, at_once / step))
    found = fitted(loops)
    assert (found.base, found.sequence, found.prompt_token) == pytest.approx((0.005, 20e-6, 24e-6))


def test_one_gpu_gives_what_was_measured():
    """Of the two figures only the first is in the fit."""
    engine = h200_engine()
    row = simulate(engine, FREE, 1, 1, ClosedLoop(256, 256, 256, 0.0), 10.0, 10.0)
    assert row["tokens_per_second"] == pytest.approx(measured("llama8b throughput, 256 at once"), rel=0.05)
    seconds = 256 * 512 * engine.prompt_token + 256 * (engine.base + 256 * engine.sequence)
    assert 256 * 256 / seconds == pytest.approx(measured("llama8b A"), rel=0.1)


def test_a_front_that_is_behind_sends_larger_pieces():
    engine = h200_engine()
    loop = ClosedLoop(64, 64, 64, 0.0)
    one = simulate(engine, Front(), 1, 1, loop, 4.0, 2.0)
    two = simulate(engine, Front(), 2, 2, loop, 4.0, 2.0)
    assert two["tokens_per_second"] == pytest.approx(2 * one["tokens_per_second"], rel=0.02)
    assert one["tokens_per_event"] == 1.0
    slow = simulate(engine, Front(event=200e-6), 2, 1, loop, 4.0, 2.0)
    assert slow["tokens_per_event"] > 1.5
    assert slow["front_busy"] > 0.95
    assert slow["first_token_p50_ms"] > one["first_token_p50_ms"]


def test_fronts_are_busy_for_seven_tenths_of_the_time():
    engine = h200_engine()
    loop = ClosedLoop(256, 256, 256, 0.0)
    assert fronts_needed(engine, Front(), 64, loop) == 34
    assert fronts_needed(engine, FREE, 1000, loop) == 1
