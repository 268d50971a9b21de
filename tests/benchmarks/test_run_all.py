"""The script that runs every benchmark: how it merges results, what it leaves out, and that its command lines exist."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import run_all


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Five benchmarks: three write a line, one writes a line and fails, one would take too long."""
    writes = (
        "import json, os, sys\n"
        "folder = sys.argv[sys.argv.index('--out') + 1]\n"
        "line = {'case': sys.argv[1], 'ours': 2, 'gpu': os.environ['CUDA_VISIBLE_DEVICES']}\n"
        "open(folder + '/bench.jsonl', 'w').write(json.dumps(line) + '\\n')\n"
        "print('measured', sys.argv[1:2], '--peer-path' in sys.argv, os.environ['PYTHONPATH'])\n"
        "sys.exit(sys.argv[1] == 'broken')\n"
    )
    (tmp_path / "bench.py").write_text(writes)
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(
        run_all,
        "JOBS",
        {
            "fast": run_all.Job(1, "bench.py fast", "path"),
            "broken": run_all.Job(2, "bench.py broken", "import"),
            "endless": run_all.Job(1000, "bench.py endless"),
            "host": run_all.Job(50, "bench.py host", quiet=True),
            "both": run_all.Job(3, "bench.py both", gpus=2),
        },
    )
    (tmp_path / "logs").mkdir()
    return argparse.Namespace(seconds=60.0, peer_path="/peers", logs=tmp_path / "logs", out=tmp_path / "results")


def test_lines_take_their_places_and_what_failed_or_had_no_time_is_named(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir()
    kept = arguments.out / "bench.jsonl"
    kept.write_text("".join(json.dumps({"case": case, "ours": 1}) + "\n" for case in ("fast", "other")))
    run = run_all.Run(list(run_all.JOBS), arguments)
    run.work([3])
    assert (run.failed, run.waiting) == (["broken"], ["endless", "host", "both"]), "the others wait for their stages"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        {"case": "fast", "ours": 2, "gpu": "3"},
        {"case": "other", "ours": 1},
        {"case": "broken", "ours": 2, "gpu": "3"},
    ]
    fast, broken = ((arguments.logs / f"{name}.log").read_text().split("] ")[1].split() for name in ("fast", "broken"))
    # the first gets the peers' path as a flag, the second in PYTHONPATH
    assert (fast[0], "/peers" in fast[1].split(":")) == ("True", False)
    assert (broken[0], broken[1].split(":")[-1]) == ("False", "/peers")

    run.stage = run_all.Stage.SEVERAL_GPUS
    run.work([0])
    assert "both" in run.waiting, "one GPU is not enough"
    run.work([0, 1])
    assert json.loads(kept.read_text().splitlines()[-1]) == {"case": "both", "ours": 2, "gpu": "0,1"}

    run.stage = run_all.Stage.HOST
    run.work([0])
    assert run.waiting == ["endless"]


@pytest.mark.parametrize("name", run_all.JOBS)
def test_every_command_names_a_bench_and_flags_that_exist(name: str) -> None:
    script, *words = run_all.JOBS[name].command.split()
    text = (run_all.HERE / script).read_text()
    assert all(f'"{word}"' in text for word in words if word.startswith("--")), words


def test_by_default_what_can_run_is_run() -> None:
    needs_two = {name for name, job in run_all.JOBS.items() if job.gpus == 2}
    assert {"tensor_parallel", "vllm_plugin"} < needs_two
    assert set(run_all.default_jobs(1, "/peers")) == set(run_all.JOBS) - needs_two
    assert set(run_all.default_jobs(2, "")) == set(run_all.JOBS) - {"vllm_plugin"}
    assert run_all.default_jobs(2, "/peers") == list(run_all.JOBS)
