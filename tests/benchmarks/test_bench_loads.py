"""The benchmark of mixed loads over HTTP: its requests, who sends them and when, and a whole run on a CPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sampled_cases import whole_runs

from benchmarks.engine import bench_loads, simulate_scheduler
from benchmarks.engine.simulate_scheduler import Arrival

ROOT = Path(__file__).parents[2]


@whole_runs
def test_every_load_is_offered_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.engine.bench_loads", "--shape", "tiny", "--device", "cpu", "--requests", "3"]
    command += ["--longest", "64", "--tokens", "2048", "--clients", "2", "--out", str(tmp_path), "--no-starts"]
    command += ["--loads", "sampled,long,answers,prefixes,logprobs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("warm-up", "sampled", "long", "answers", "prefixes", "logprobs"):
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{name}, fa_serve: ")]
        assert "late compilations 0" in line
    assert not list(tmp_path.glob("*.jsonl")), "figures of a CPU are not kept"


def test_a_body_has_the_tokens_of_its_arrival_within_the_vocabulary_and_the_options_of_its_load() -> None:
    arrival = Arrival(0.5, [3, 1000, 2**29], 7, n=4)
    body = json.loads(bench_loads.body_of(arrival, 100, bench_loads.OPTIONS["answers"], 32))
    assert body["prompt"] == [8, 5 + 1000 % 95, 5 + 2**29 % 95]
    assert (body["n"], body["max_tokens"], body["temperature"]) == (4, 7, 1.0)
    penalties = json.loads(bench_loads.body_of(arrival, 100, bench_loads.OPTIONS["sampled"], 2))
    assert len(penalties["prompt"]) == 2
    assert (penalties["presence_penalty"], penalties["repetition_penalty"]) == (0.5, 1.1)


def test_closed_loads_have_a_number_at_once_and_open_ones_their_times() -> None:
    closed = simulate_scheduler.closed(5, 2, 4, 4)(random.Random(0))
    assert bench_loads.schedule(closed) == (2, [])
    timed = [Arrival(0.0, [1], 1), Arrival(0.25, [2], 1)]
    assert bench_loads.schedule(timed) == (None, [0.0, 0.25])


def test_every_load_of_the_issue_is_in_the_order_and_known() -> None:
    kinds = {name.removesuffix(" again") for name in bench_loads.ORDER}
    assert kinds == set(simulate_scheduler.LOADS)
    assert bench_loads.ORDER.index("sampled") == 0, "its first requests must find servers that have seen plain requests alone"


def test_keys_and_values_of_a_token() -> None:
    assert bench_loads.kv_bytes("llama8b") == 2 * 32 * 8 * 128 * 2


def test_the_first_failed_request_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"2 of 2 requests failed: .*no connection"):
        bench_loads.offer("http://127.0.0.1:9", [b"{}", b"{}"], None, [0.0, 0.0], 2)
