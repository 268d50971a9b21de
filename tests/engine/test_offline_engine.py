"""The offline example runs unchanged on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_engine.py"


def test_the_offline_example(model_folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(model_folder)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("--- length") + printed.count("--- stop") == 6
    assert "0 tokens of the prompt from the cache" in printed
    assert "48 tokens of the prompt from the cache" in printed
    assert printed.split("--- structured\n")[1].startswith("{")
    assert "--- streamed" in printed
