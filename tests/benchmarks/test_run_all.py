"""The script that runs every benchmark: how it merges results, what it leaves out, and that its command lines exist."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all

WRITES = """
import json, os, sys, time
folder = sys.argv[sys.argv.index('--out') + 1]
begin = time.time()
if '--beside' in sys.argv:  # fails unless the other one runs at the same time
    open(sys.argv[0] + sys.argv[1], 'w')
    other = sys.argv[0] + sys.argv[sys.argv.index('--beside') + 1]
    while not os.path.exists(other):
        assert time.time() < begin + 120
        time.sleep(0.01)
gpu = os.environ['CUDA_VISIBLE_DEVICES']
line = {'case': sys.argv[1], 'ours': 2, 'gpu': gpu, 'begin': begin, 'end': time.time()}
open(folder + '/bench.jsonl', 'w').write(json.dumps(line) + '\\n')
print('measured', sys.argv[1:2], '--peer-path' in sys.argv, os.environ['PYTHONPATH'])
print(os.environ.get('FA_SERVE_BENCH_MODELS'))
sys.exit(sys.argv[1] == 'broken')
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Benchmarks that write a line each. One fails after that, one would take too long, one measures the host."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "fake_bench.py").write_text(WRITES)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    jobs = {
        "fast": run_all.Job(1, "fake_bench fast", "path"),
        "host": run_all.Job(50, "fake_bench host", quiet=True),
        "broken": run_all.Job(2, "fake_bench broken", "import"),
        "endless": run_all.Job(1000, "fake_bench endless"),
        "both": run_all.Job(3, "fake_bench both", gpus=2),
    }
    monkeypatch.setattr(run_all, "JOBS", jobs)
    (tmp_path / "logs").mkdir()
    return argparse.Namespace(gpus=1, seconds=300.0, peer_path="/peers", logs=tmp_path / "logs", out=tmp_path / "results")


def results(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    lines = (arguments.out / "bench.jsonl").read_text().splitlines()
    return {line["case"]: line for line in map(json.loads, lines)}


def test_lines_take_their_places_and_what_failed_or_had_no_time_is_named(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir()
    kept = "".join(json.dumps({"case": case, "ours": 1}) + "\n" for case in ("broken", "other"))
    (arguments.out / "bench.jsonl").write_text(kept)
    run = run_all.Run(list(run_all.JOBS), arguments, "")
    run.work()
    assert (run.failed, run.waiting) == (["broken"], ["endless", "both"]), "one had no time, the other no second GPU"
    found = results(arguments)
    assert [(case, line["ours"]) for case, line in found.items()] == [("broken", 2), ("other", 1), ("fast", 2), ("host", 2)]
    fast, broken = ((arguments.logs / f"{name}.log").read_text().split("] ")[1].split() for name in ("fast", "broken"))
    # the first gets the peers' path as a flag, the second in PYTHONPATH
    assert (fast[0], "/peers" in fast[1].split(":")) == ("True", False)
    assert (broken[0], broken[1].split(":")[-1]) == ("False", "/peers")


def test_two_gpus_are_kept_for_what_needs_both_and_the_host_is_measured_last(arguments: argparse.Namespace) -> None:
    arguments.gpus = 3
    run_all.JOBS["both"] = run_all.Job(3, "fake_bench both --beside fast", gpus=2)
    run_all.JOBS["fast"] = run_all.Job(1, "fake_bench fast --beside both")
    run = run_all.Run(list(run_all.JOBS), arguments, "")
    run.work()
    found = results(arguments)
    assert (found["both"]["gpu"], found["fast"]["gpu"]) == ("0,1", "2"), "fast is the first in the order"
    assert max(found[name]["end"] for name in ("fast", "broken", "both")) < found["host"]["begin"]
    assert (run.waiting, run.failed) == (["endless"], ["broken"])


def test_each_gpu_is_taken_if_no_benchmark_needs_two(arguments: argparse.Namespace) -> None:
    arguments.gpus = 2
    run_all.JOBS["fast"] = run_all.Job(1, "fake_bench fast --beside other")
    run_all.JOBS["other"] = run_all.Job(1, "fake_bench other --beside fast")
    run = run_all.Run(["fast", "other"], arguments, "")
    run.work()
    assert {line["gpu"] for line in results(arguments).values()} == {"0", "1"}
    assert run.failed == []


def test_models_that_many_need_are_kept(arguments: argparse.Namespace) -> None:
    run_all.JOBS["fast"] = run_all.Job(1, "fake_bench fast --shapes qwen06,llama8b")
    run_all.JOBS["other"] = run_all.Job(1, "fake_bench other --shapes llama8b,qwen30a3b")
    run_all.Run(["fast", "other"], arguments, "/models").work()
    assert [(arguments.logs / f"{name}.log").read_text().split()[-1] for name in ("fast", "other")] == ["/models", "None"]


@pytest.mark.slow
def test_an_interrupt_ends_what_runs_and_starts_nothing_more(arguments: argparse.Namespace) -> None:
    run_all.JOBS["endless"] = run_all.Job(1, "fake_bench endless --beside nobody")
    run = run_all.Run(["endless", "fast"], arguments, "/models")
    worker = threading.Thread(target=run.work)
    worker.start()
    begun = arguments.logs.parent / "benchmarks" / "fake_bench.pyendless"
    while not begun.exists():
        assert worker.is_alive()
        time.sleep(0.01)
    run.interrupt()
    worker.join(30)
    assert not worker.is_alive()
    assert (run.failed, run.waiting) == (["endless"], ["fast"])


@pytest.mark.parametrize("name", run_all.JOBS)
def test_every_command_names_a_bench_and_flags_that_exist(name: str) -> None:
    job = run_all.JOBS[name]
    script = job.command.split()[0]
    text = (run_all.ROOT / "benchmarks" / script.replace(".", "/")).with_suffix(".py").read_text()
    for peer_path in ("", "/peers"):
        words = job.words("/results", peer_path)
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), words


def test_by_default_what_can_run_is_run() -> None:
    needs_two = {name for name, job in run_all.JOBS.items() if job.gpus == 2}
    assert {"tensor_parallel", "vllm_plugin"} < needs_two
    assert set(run_all.default_jobs(1, "/peers")) == set(run_all.JOBS) - needs_two
    assert set(run_all.default_jobs(2, "")) == set(run_all.JOBS) - {"vllm_plugin"}
    everything = run_all.default_jobs(2, "/peers")
    assert set(everything) == set(run_all.JOBS)
    assert everything == sorted(everything, key=lambda name: -run_all.JOBS[name].seconds), "the longest starts first"
