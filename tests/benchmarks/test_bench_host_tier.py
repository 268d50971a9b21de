"""The benchmark of the host tier runs from start to end on a CPU, and compares answers before it times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import bench_host_tier
from benchmarks.engine.engine_workloads import make_model
from benchmarks.measure import Results


@pytest.mark.slow
def test_each_part_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_host_tier, "REPEATS", 1)
    results = Results("host_tier", tmp_path)
    model = make_model("tiny", "cpu", dtype="float32")
    bench_host_tier.measure(results, "tiny", model, "cpu", bench_host_tier.Sizes(tiny=True))
    assert [line["case"] for line in results.lines] == [
        "tiny first",
        "tiny to host",
        "tiny to device",
        "tiny no hits",
        "tiny room",
    ]
    assert all(line["ours"] > 0 and min(line["peers"].values()) > 0 for line in results.lines)
    assert {line["bench"] for line in results.lines} == {"host_tier"}
