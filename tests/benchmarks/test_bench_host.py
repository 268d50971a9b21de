"""The comparison of two trees runs from start to end, on a CPU, with this tree as both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sampled_cases import whole_runs

from benchmarks.engine import bench_host

ROOT = Path(__file__).parents[2]
CASES = {"dense", "varlen", "paged", "layer prompt", "layer token"}
CASES |= {f"flash_attn {name}" for name in ("dense", "varlen", "paged")}
ENGINE = {f"engine {batch} {what}" for batch in (1, 2) for what in ("host", "wall")}


@whole_runs
def test_every_case_of_both_trees_is_in_the_results(tmp_path: Path) -> None:
    trees = ["--before", str(ROOT), "--before-commit", "abc1234", "--after", str(ROOT), "--after-commit", "def5678"]
    command = [sys.executable, "-m", "benchmarks.engine.bench_host", *trees, "--tiny", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "host.jsonl").read_text().splitlines()]
    assert {line["case"] for line in lines} == CASES | ENGINE
    for line in lines:
        assert line["ours"] > 0
        assert line["peers"]["before"] > 0
        assert (line["before"], line["commit"], line["unit"]) == ("abc1234", "def5678", "us")
    assert "least and greatest of a round" in done.stdout


def test_a_worker_refuses_a_package_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed fa_serve must not be measured in place of a tree that lacks it."""
    monkeypatch.setattr("sys.argv", ["bench_host.py", "--worker", str(tmp_path), "--cases", "dense", "--tiny"])
    with pytest.raises(SystemExit, match=f"fa_serve must come from {tmp_path}"):
        bench_host.main()


def test_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bench_host.time, "perf_counter", lambda: clock[0])

    def spend(seconds: float) -> None:
        clock[0] += seconds

    us = bench_host.microseconds(lambda: spend(2e-6), bench_host.TINY, calls=4, start=lambda: spend(1.0))
    assert us == pytest.approx(2.0, rel=1e-6)
