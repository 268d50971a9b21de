"""Benches run to their end on a CPU, and report nothing if results are wrong: latent and sparse calls, and gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path

import backward_problem
import bench_attention
import latent_problem
import pytest
import sparse_problem

CASES = {
    "latent": {"h4_1_of_70x3", "h4_2_of_50x1", "h4_1_of_70x3_float8"},
    "sparse": {"d64_full_512_25%", "d64_causal_512_25%"},
    "backward": {f"d64_{mask}_{seqlen}" for mask in ("full", "causal") for seqlen in (64, 256)},
}
CELLS = {"latent": [], "sparse": ["--cells", "25%"], "backward": []}
PEERS = {"latent": set(), "sparse": {"flex", "dense"}, "backward": {"math"}}


def run(bench: str, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict]:
    # compiled, FlexAttention takes seconds for each cell
    monkeypatch.setattr(sparse_problem.SparseProblem, "flex", lambda problem: problem.ours("sdpa"))
    command = ["bench_attention.py", bench, "--tiny", "--head-dims", "64", "--out", str(out), *options]
    monkeypatch.setattr("sys.argv", command)
    bench_attention.main()
    return [json.loads(line) for line in (out / f"{bench}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("bench", CASES)
def test_every_cell_is_measured_after_the_gate(bench: str, tmp_path: Path, monkeypatch, capsys) -> None:
    lines = run(bench, tmp_path, monkeypatch, *CELLS[bench])
    assert {line["case"] for line in lines} == CASES[bench]
    assert all(line["ours"] > 0 and set(line["peers"]) == PEERS[bench] for line in lines)
    printed = capsys.readouterr().out
    assert printed.index("the gate holds") < printed.index(lines[0]["case"])
    assert "lack of time" not in printed


def test_no_cell_is_begun_after_the_budget(tmp_path: Path, monkeypatch, capsys) -> None:
    assert run("backward", tmp_path, monkeypatch, "--budget", "0", "--cells", "causal") == []
    assert "not measured for lack of time: d64_causal_256, d64_causal_64" in capsys.readouterr().out


@pytest.mark.parametrize("bench", CASES)
def test_a_wrong_result_ends_the_bench(bench: str, tmp_path: Path, monkeypatch) -> None:
    module = {"latent": latent_problem, "sparse": sparse_problem, "backward": backward_problem}[bench]
    name = "attention_paged" if bench == "latent" else "attention"
    compute = getattr(module.fa_serve, name)
    monkeypatch.setattr(module.fa_serve, name, lambda *args, **options: 1.01 * compute(*args, **options))
    with pytest.raises(AssertionError):
        run(bench, tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())


def test_options_of_other_benches_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run("prefill", tmp_path, monkeypatch)
    assert "are for latent, sparse, backward and fp8, got prefill" in capsys.readouterr().err


def test_the_ideas_of_float8_inputs_lower_the_error(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention.py", "fp8", "--tiny", "--head-dims", "128", "--out", str(tmp_path)])
    bench_attention.main()
    printed = capsys.readouterr().out
    errors = {name: float(value) for name, value in re.findall(r"([a-z0-9 ]+) (\d\.\d+e-\d+)", printed)}
    errors = {name.strip(): value for name, value in errors.items()}
    assert errors["bf16"] < 0.1 * errors["both ideas"]
    assert errors["both ideas"] < 0.9 * errors["no rotation"]
    assert errors["both ideas"] < 0.8 * errors["neither"]
    assert "needles found: bf16 100%" in printed
