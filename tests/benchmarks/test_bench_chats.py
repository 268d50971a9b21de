"""The benchmark of chats runs from start to end on a CPU, and fails where a turn finds nothing in the prefix cache."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import bench_chats
from benchmarks.engine.engine_workloads import make_model
from benchmarks.measure import Results
from fa_serve.engine import EngineConfig

OPTIONS = Namespace(device="cpu", tiny=True)


def test_chats_have_a_line_for_each_measure(tmp_path: Path) -> None:
    results = Results("chats", tmp_path)
    bench_chats.measure(results, "tiny", make_model("tiny", "cpu", dtype="float32"), OPTIONS, bench_chats.TINY)
    found = {line["case"]: line for line in results.lines}
    assert [*found] == ["tiny hit rate", "tiny computed", "tiny first", "tiny no hits"]
    # prompts of 80, 104 and 128 tokens; an answer's last token is in no cache, so that a page of 16 is computed again
    assert found["tiny computed"]["ours"] == 24.0
    assert found["tiny hit rate"]["ours"] == pytest.approx(80 / 104, abs=1e-4)
    assert (tmp_path / "chats.jsonl").exists()


def test_a_turn_without_hits_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = EngineConfig.__init__
    monkeypatch.setattr(EngineConfig, "__init__", lambda self, **given: make(self, **given | {"prefix_caching": False}))
    sizes = replace(bench_chats.TINY, fresh=1)
    with pytest.raises(RuntimeError, match="a turn has found nothing in the prefix cache"):
        bench_chats.measure(Results("chats", tmp_path), "tiny", make_model("tiny", "cpu", dtype="float32"), OPTIONS, sizes)
