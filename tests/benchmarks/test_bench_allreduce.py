"""The benchmark of sums over ranks runs from start to end on a CPU, and reports nothing if results are wrong."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from warm_processes import WarmProcess

from benchmarks.attention import bench_allreduce
from fa_serve.ops.collectives.all_reduce import AllReduce, listen

CASES = [f"{size} {what} 2 ranks gloo" for size in bench_allreduce.TINY_SIZES for what in ("sum", "norm")]


@pytest.mark.slow
def test_every_case_is_measured_after_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The other rank is forked. Fresh interpreters are what `listen` and `join` start in tests/ops/collectives."""

    def start(command: list[str]) -> WarmProcess:
        assert command[1:3] == ["-m", "benchmarks.attention.bench_allreduce"]
        return started.enter_context(WarmProcess(bench_allreduce.main, command[3:]))

    monkeypatch.setattr("sys.argv", ["bench_allreduce.py", "--tiny", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(bench_allreduce, "subprocess", SimpleNamespace(Popen=start))
    with ExitStack() as started:
        bench_allreduce.main()
    printed = capsys.readouterr().out
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
