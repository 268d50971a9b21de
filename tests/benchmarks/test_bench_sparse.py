"""The benchmark of token-sparse attention runs on a CPU, and its check sees a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.attention import bench_sparse
from fa_serve import ops


def test_small_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_sparse.py", "--tiny", "--out", str(tmp_path)])
    bench_sparse.main()
    lines = [json.loads(line) for line in (tmp_path / "sparse_mla.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == [
        "attend 2 heads prefill 5 of 20",
        "choose prefill 5 of 20",
        "attend 2 heads decode 3 x 20",
        "choose decode 3 x 20",
    ]
    assert all(line["ours"] > 0 for line in lines)


def test_a_wrong_result_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.sparse_attention
    monkeypatch.setattr(ops, "sparse_attention", lambda *args, **options: own(*args, **options) * 1.1)
    monkeypatch.setattr("sys.argv", ["bench_sparse.py", "--tiny", "--out", str(tmp_path)])
    with pytest.raises(AssertionError, match="attend 2 heads prefill 5 of 20: error"):
        bench_sparse.main()
