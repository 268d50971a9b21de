"""The benchmark of the service, tried out with a tiny model on the CPU: open loops and the cases that they write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampled_cases import whole_runs

from benchmarks.engine import open_loops
from fa_serve.client.bench import Load

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.engine.bench_serving", "--shapes", "tiny", "--device", "cpu", "--no-offline"]
    command += ["--clients", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@whole_runs
def test_open_loops_from_a_cold_start_and_warm() -> None:
    said = bench("--open", "--rates", "20,40", "--cold-rates", "20", "--requests", "4", "--no-peers", "--peer-path", "nowhere")
    assert "vllm" not in said
    for name in ("cold, 20/s", "warm, 20/s", "warm, 40/s"):
        for time in ("first token", "per token", "between tokens"):
            for percentile in ("p50", "p95", "p99"):
                assert f"open, {name}, {time} {percentile} " in said
        assert f"open, {name}, goodput " in said
    assert "start, cold, alone " in said
    assert "start, warm, alone " in said


def test_the_load_has_random_lengths_and_a_count_for_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Load] = []

    async def run(load: Load) -> dict:
        seen.append(load)
        times = dict.fromkeys(("p50", "p95", "p99"), 1.0)
        failed = len(seen) == 6
        report = dict.fromkeys(("seconds", "requests_per_s", "client_busy", "goodput_per_s"), 0.5)
        return report | {"failed": int(failed), "errors": ["lost"], "ttft_ms": times, "tpot_ms": times, "itl_ms": times}

    monkeypatch.setattr("fa_serve.client.bench.run", run)
    load = open_loops.workload(Load(), None)
    cold = open_loops.straight_after_ready(load, 12, 20)
    assert len(cold) == 10
    assert (seen[0].rate, seen[0].requests, seen[0].processes, seen[0].warmup, seen[0].concurrency) == (12, 240, 1, 0, None)
    assert (seen[0].prompt_tokens * (1 - seen[0].spread), seen[0].output_tokens * (1 + seen[0].spread)) == pytest.approx(
        (140, 360)
    )
    open_loops.warm(load, [6, 36], 5, 3)
    assert [(each.rate, each.requests, each.processes) for each in seen[1:]] == [(36, 180, 3), (6, 30, 3), (36, 180, 3)]
    assert seen[1].seed != seen[2].seed == seen[0].seed
    with pytest.raises(RuntimeError, match="lost"):
        open_loops.warm(load, [6], 5, 3)


def test_each_cold_start_has_caches_of_its_own(tmp_path: Path) -> None:
    caches = open_loops.empty_caches(str(tmp_path))
    assert "TRITON_CACHE_DIR" in caches
    assert len(set(caches.values())) == len(caches)
    assert not any(Path(folder).exists() for folder in caches.values())
