"""examples/plugin_transformers.py runs as it stands, on the embedded model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_transformers.py"


def test_the_plugin_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--compare", "eager"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "What is 17 + 25? -> 17 + 25 = 42." in printed
    assert "What is 3 + 99? -> 3 + 99 = 102." in printed
    assert [line.split(",")[0] for line in printed.splitlines() if line.startswith("---")] == ["--- fa_serve", "--- eager"]
    assert "the same answers" in printed
