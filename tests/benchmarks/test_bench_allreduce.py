"""The benchmark of sums over ranks runs from start to end on a CPU, and reports nothing if results are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.attention import bench_allreduce
from fa_serve.ops.collectives.all_reduce import AllReduce, listen

CASES = [f"{size} {what} 2 ranks gloo" for size in bench_allreduce.TINY_SIZES for what in ("sum", "norm")]


def test_every_case_is_measured_after_the_gate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.attention.bench_allreduce", "--tiny", "--out", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    lines = [json.loads(line) for line in (tmp_path / "allreduce.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == CASES
    assert all(line["ours"] > 0 and set(line["peers"]) == {"gloo"} and line["unit"] == "us" for line in lines)
    assert printed.index("gate: results are right") < printed.index(CASES[0])


@pytest.mark.parametrize("wrong", ["ours", "theirs"])
@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
def test_a_wrong_result_is_found(wrong: str, norm: bool, monkeypatch) -> None:
    all_reduce = AllReduce(listen(1)[0], 0, 1, torch.device("cpu"))
    try:
        rank = bench_allreduce.Rank(all_reduce, 0, 1, torch.device("cpu"), 64)
        rank.check(1024, norm=norm)
        compute = getattr(rank, wrong)

        def broken(x: torch.Tensor, y: torch.Tensor, *, norm: bool) -> object:
            return compute(x, 1.01 * y, norm=norm)

        broken.__name__ = wrong
        monkeypatch.setattr(rank, wrong, broken)
        with pytest.raises(AssertionError, match=wrong):
            rank.check(1024, norm=norm)
    finally:
        all_reduce.close()


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_allreduce.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        bench_allreduce.main()
    assert "--ranks must be at most 1, the number of GPUs; --tiny needs none" in capsys.readouterr().err
