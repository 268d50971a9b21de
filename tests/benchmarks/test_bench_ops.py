"""The benchmark of ops runs from start to end on a CPU, and reports nothing if results are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from product_cases import dense

from benchmarks.attention import bench_ops
from fa_serve.ops.products import table

CASES = {
    "experts": {f"tiny {form} {tokens}" for form in bench_ops.EXPERT_FORMS for tokens in (1, 3)},
    "quantized": {f"64x288 {form} {tokens}" for form in bench_ops.DENSE_FORMS for tokens in (1, 3)},
}
PEERS = {"experts": {"bound", "batched_mm"}, "quantized": {"bound", "linear"}}


@pytest.mark.parametrize("what", CASES)
def test_every_case_is_measured_after_the_gate(what: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_ops.py", what, "--tiny", "--out", str(tmp_path)])
    bench_ops.main()
    lines = [json.loads(line) for line in (tmp_path / f"ops_{what}.jsonl").read_text().splitlines()]
    assert {line["case"] for line in lines} == CASES[what]
    assert all(line["ours"] > 0 and set(line["peers"]) == PEERS[what] and line["unit"] == "us" for line in lines)
    printed = capsys.readouterr().out
    assert printed.index("gate: results are right") < printed.index(lines[0]["case"])


def test_some_cells_and_kernels(tmp_path: Path, monkeypatch) -> None:
    options = ["--shapes", "tiny", "--forms", "matrices,int4", "--tokens", "5", "--kernels", "grouped,dequantise_experts"]
    monkeypatch.setattr("sys.argv", ["bench_ops.py", "experts", "--tiny", *options, "--out", str(tmp_path)])
    rows = table.KERNELS
    bench_ops.main()
    lines = [json.loads(line) for line in (tmp_path / "ops_experts.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["tiny matrices 5", "tiny int4 5 grouped", "tiny int4 5 dequantise_experts"]
    assert table.KERNELS is rows


def test_one_kernel_is_timed_without_its_limits() -> None:
    product = dense("int4", tokens=9000)
    rows = table.KERNELS
    with bench_ops.computed_by("unpack"):
        assert table.select_kernel(product).kernel.name == "unpack"
    assert table.KERNELS is rows
    assert table.select_kernel(product).kernel.name == "dequantise"


@pytest.mark.parametrize("what", CASES)
def test_a_wrong_result_ends_the_benchmark(what: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_ops.py", what, "--tiny", "--out", str(tmp_path)])
    name = "experts" if what == "experts" else "linear"
    compute = getattr(bench_ops.ops, name)
    monkeypatch.setattr(bench_ops.ops, name, lambda *args, **options: 1.01 * compute(*args, **options))
    with pytest.raises(AssertionError):
        bench_ops.main()
    assert not list(tmp_path.iterdir())


def test_the_bound_is_that_of_bytes_or_of_products() -> None:
    machine = bench_ops.Machine("cpu", bandwidth=2e12, rate=1e15)
    assert machine.bound(4e6, 0.0) == pytest.approx(2.0)
    assert machine.bound(0.0, 3e9) == pytest.approx(3.0)
    assert bench_ops.num_bytes(torch.empty(4, 8, dtype=torch.bfloat16)) == 64
    assert bench_ops.num_bytes(bench_ops.random_weight("mxfp4", 2, 256, "cpu")) == 2 * (128 + 8)
