"""The benchmarks of rollouts and of deterministic mode run from start to end on a CPU, and check results before they time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import bench_deterministic, bench_rollouts
from benchmarks.engine.engine_workloads import make_model
from benchmarks.measure import Results


def test_rollouts_have_a_line_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXACT_WARM_UPS", "EXACT_TURNS"):
        monkeypatch.setattr(bench_rollouts, name, 1)
    results = Results("rollouts", tmp_path)
    model = make_model("tiny", "cpu", dtype="float32")
    model.set_attn_implementation("fa_serve")
    bench_rollouts.measure_engine(results, "tiny", model, tiny=True, peers={"update": 1.0})
    bench_rollouts.measure_exact(results, "tiny", model, tiny=True)
    assert [line["case"] for line in results.lines] == [
        "tiny rollouts",
        "tiny update",
        "tiny update again",
        "tiny sleep",
        "tiny exact",
        "tiny exact 8",
    ]
    assert all(line["ours"] > 0 for line in results.lines)
    assert results.lines[1]["peers"] == {"vllm": 1.0}
    assert {line["bench"] for line in results.lines} == {"rollouts"}


def test_an_answer_that_depends_on_the_batch_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_deterministic, "PROMPTS", (8,))
    monkeypatch.setattr(bench_deterministic.Engine, "__init__", _usual(bench_deterministic.Engine.__init__))
    with pytest.raises(AssertionError, match="an answer depends on the batch"):
        bench_deterministic.measure(Results("deterministic", tmp_path), "tiny", "cpu", tiny=True)


def _usual(make):
    """An engine that is told to be deterministic, and is not."""

    def init(self, config, **given):
        make(self, replace(config, deterministic=False), **given)

    return init
