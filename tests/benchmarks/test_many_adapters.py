"""A second of the long run of many adapters, and what it sees."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.soak import many_adapters
from fa_serve.engine.lora.pool import LoraPool


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--shape", "tiny", "--device", "cpu", "--seconds", "1", "--adapters", "24", "--slots", "4", "--alive", "12"]
    monkeypatch.setattr(sys, "argv", ["many_adapters", *words])


@pytest.mark.slow
def test_every_answer_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--results", str(tmp_path)])
    many_adapters.main()
    report = json.loads(capsys.readouterr().out.splitlines()[0])
    assert report["answers"] > 24
    assert 0 < report["of the base"] < report["answers"]
    assert report["loads"] > 24, "adapters go in and out"
    [line] = (tmp_path / "soak.jsonl").read_text().splitlines()
    assert json.loads(line)["case"] == "24 adapters, 4 in memory, tiny, cpu"


def test_a_mixed_up_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = LoraPool.slot
    monkeypatch.setattr(LoraPool, "slot", lambda self, adapter: (slot(self, adapter) + (self.num_loads > 17)) % self.num_slots)
    with pytest.raises(AssertionError, match=r"adapter \d+ answered"):
        many_adapters.main()
