"""The benchmarks of rollouts and of deterministic mode run from start to end on a CPU, and check results before they time."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import bench_deterministic, bench_rollouts, engine_workloads
from benchmarks.engine.engine_workloads import make_model, tiny_sizes
from benchmarks.engine.rollout_peers import Workload, measure_generate_batch
from benchmarks.measure import Results


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Returns the exit status."""
    monkeypatch.setattr(engine_workloads, "SHAPES", dict(engine_workloads.SHAPES))
    monkeypatch.setattr(sys, "argv", ["bench_rollouts", "--device", "cpu", "--tiny", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_rollouts.main()
    return ended.value.code


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["llama06", "qwen06", "qwenmoe06", "gemma06"])
def test_rollouts_of_many_lengths_have_the_bits_of_training(tmp_path: Path, shape: str, dtype: str) -> None:
    results = Results("rollouts", tmp_path)
    model = make_model(shape, "cpu", dtype=getattr(torch, dtype), **tiny_sizes(shape))
    model.set_attn_implementation("fa_serve")
    assert bench_rollouts.measure_lengths(results, shape, model, tiny=True)
    found = {line["case"]: (line["unit"], line["ours"]) for line in results.lines}
    plain = found.pop(f"{shape} lengths plain")
    assert found == {f"{shape} lengths tokens": ("tokens", 84), f"{shape} lengths": ("difference", 0.0)}
    assert plain[1] > 0, "a comparison that finds no difference anywhere would prove nothing"


def test_differences_are_shown_and_end_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the training forward differs")

    monkeypatch.setattr(bench_rollouts.fa_serve, "exact", lambda model: nullcontext())
    monkeypatch.setattr(bench_rollouts, "require_equal_bits", refuse)
    code = run_main(monkeypatch, "--shapes", "tiny,qwenmoe06", "--parts", "lengths,exact", "--out", str(tmp_path))
    shown = capsys.readouterr().out
    assert code == 1
    assert shown.count("lengths: prompt") == 2 * len(bench_rollouts.TINY_LENGTHS)
    assert "tokens DIFFER, by up to" in shown
    assert shown.count("exact is not timed: the training forward differs") == 2
    assert not list(tmp_path.iterdir()), "what a CPU measures is not kept"


def test_where_the_first_difference_is() -> None:
    expected = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    assert bench_rollouts.compare(expected.float(), expected) == "4 equal in every bit"
    found = torch.tensor([-1.0, -2.5, -3.0, -4.125])
    told = "2 of 4 tokens DIFFER, by up to 0.5, first token 1 of the answer: -2.5 in training, -2 in the rollout"
    assert bench_rollouts.compare(found, expected) == told
    assert "1 of 4 tokens DIFFER, by up to nan" in bench_rollouts.compare(expected.where(expected > -4, torch.nan), expected)


@pytest.mark.slow
def test_generate_batch_is_a_peer_of_rollouts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made: list[Results] = []

    def make(*given: Any, **options: Any) -> Results:
        made.append(Results(*given, **options))
        return made[0]

    monkeypatch.setattr(bench_rollouts, "Results", make)
    parts = ("--shapes", "gemma06", "--parts", "rollouts,generate_batch", "--prompts", "4")
    assert run_main(monkeypatch, *parts, "--out", str(tmp_path)) == 0
    [line] = made[0].lines
    assert line["case"] == "gemma06 rollouts of 4 prompts"
    assert line["peers"]["generate_batch"] > 0
    assert "generate_batch: 72 of 72 tokens" in capsys.readouterr().out
    assert run_main(monkeypatch, "--parts", "generate_batch") == 2, "it has no line without the rollouts"


@pytest.mark.slow
def test_generate_batch_is_stopped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    work = Workload(2, 2, 8, 4000)
    peers = measure_generate_batch("tiny", work, device="cpu", tiny=True, seconds=0.5, out=tmp_path)
    tokens = int(capsys.readouterr().out.split("generate_batch: ")[1].split()[0])
    assert 0 < tokens < 4 * 4000
    assert peers["generate_batch"] == pytest.approx(tokens / 4000 / 0.5, rel=0.8)


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
