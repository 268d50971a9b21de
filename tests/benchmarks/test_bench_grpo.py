"""The benchmark of GRPO runs the example in both modes, and draws a curve for each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks.engine import bench_grpo
from benchmarks.measure import Results


def test_both_modes_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(arguments: list[str]) -> list[SimpleNamespace]:
        asked.append(arguments)
        distance = 1e-5 if "--not-exact" in arguments else 0.0
        return [SimpleNamespace(reward=0.1 * step, first=distance) for step in range(12)]

    monkeypatch.setattr(bench_grpo, "load_example", lambda: SimpleNamespace(main=run))
    results = Results("grpo", tmp_path)
    bench_grpo.measure(results, ["--steps", "12"])
    assert asked == [["--steps", "12"], ["--not-exact", "--steps", "12"]]
    assert len(results.lines) == 48
    drawn = bench_grpo.figure(results.lines)
    ElementTree.fromstring(drawn)
    assert drawn.count("<polyline") == 2
    assert drawn.count("<circle") == 24
    assert "exactly 1 in every step" in drawn
    assert "up to 1.0e-05 away from 1" in drawn


def test_the_example_is_found() -> None:
    assert callable(bench_grpo.load_example().main)
