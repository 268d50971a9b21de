"""The parts of steps and the longest steps are those that were timed."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from benchmarks.tuning.step_parts import COLLECTING, LongSteps, parts_of_step, timing_parts
from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.scheduler.scheduler import Scheduler

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=str(model_path()), device="cpu", max_model_len=64, num_pages=64))


def test_the_longest_step_names_the_part_that_took_long(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.schedule
    calls = 0

    def slow(scheduler: Scheduler) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            time.sleep(0.2)
        return plain(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", slow)
    with LongSteps() as steps:
        engine.generate([[1, 2, 3], [4, 5]], PARAMS)
    assert len(steps.steps) == calls
    first = steps.steps[0]
    fourth = steps.steps[3]
    assert first.batch == "2 sequences, 5 tokens, 5 of prompts"
    assert fourth.batch == "2 sequences, 2 tokens, 0 of prompts"
    assert fourth.parts["schedule"] >= 0.2 > first.parts["schedule"]
    assert fourth.seconds >= fourth.parts["schedule"]
    table = steps.table(1).splitlines()
    assert len(table) == 2
    assert table[1].startswith(f"  step 3: {1e3 * fourth.seconds:.1f} (2 sequences, 2 tokens, 0 of prompts): ")
    assert f"schedule {1e3 * fourth.parts['schedule']:.1f}" in table[1]


def test_a_collection_in_a_step_is_a_part_of_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.commit

    def collecting(*args: Any) -> Any:
        gc.collect()
        return plain(*args)

    monkeypatch.setattr(Scheduler, "commit", collecting)
    with LongSteps() as steps:
        engine.generate([[1, 2, 3]], PARAMS)
    assert max(step.parts[COLLECTING] for step in steps.steps) > 1e-3
    assert gc.callbacks.count(steps._collect) == 0


def test_functions_are_what_they_were_before(engine: Engine) -> None:
    before = [getattr(owner, name) for owner, name in parts_of_step().values()]
    with pytest.raises(ZeroDivisionError), LongSteps():
        _ = 1 / 0
    with timing_parts() as spent:
        engine.generate([[1, 2, 3]], PARAMS)
    assert [getattr(owner, name) for owner, name in parts_of_step().values()] == before
    assert spent["launch"] > 0
    assert spent["towers"] == 0


def test_no_step_has_no_longest() -> None:
    assert LongSteps().table(3) == "no step"
