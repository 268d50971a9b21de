"""The benchmark of linear attention runs from start to end on a CPU, and reports nothing if results are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.attention import bench_linear


def test_the_cells_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_linear.py", "--tiny", "--out", str(tmp_path)])
    bench_linear.main()
    lines = {line["case"]: line for line in map(json.loads, (tmp_path / "linear.jsonl").read_text().splitlines())}
    assert set(lines) == {
        *(f"prefill {kind} {size}" for kind in ("delta 1/2", "ssd 2") for size in ("1x100", "2x50")),
        *(f"decode {kind} {batch}" for kind in ("conv+delta 1/2", "ssd 2") for batch in (1, 3)),
    }
    assert all(line["ours"] > 0 and line["unit"] == "us" for line in lines.values())
    assert all(set(line["peers"]) == ({"bound"} if "decode" in case else set()) for case, line in lines.items())


def test_tiles_of_decoding_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each tile and cell, and for each of two other forms; on a CPU all are PyTorch's."""
    monkeypatch.setattr("sys.argv", ["bench_linear.py", "--tiny", "--tune", "--cells", "decode"])
    monkeypatch.setattr(bench_linear, "measure", lambda call: 7.0)
    bench_linear.main()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if " 7.0 " in line]) == 4 * (len(bench_linear.DECODE_TILES) + 2)
    assert not any("differs" in line for line in lines)


def test_a_wrong_result_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_linear.py", "--tiny", "--out", str(tmp_path)])
    compute = bench_linear.ops.gated_delta_rule
    monkeypatch.setattr(bench_linear.ops, "gated_delta_rule", lambda *args, **options: _wrong(compute(*args, **options)))
    with pytest.raises(AssertionError, match="differs from float64 by"):
        bench_linear.main()
    assert not list(tmp_path.iterdir())


def _wrong(found):
    out, state = found
    return (out if out.dtype.itemsize == 8 else 1.1 * out), state
