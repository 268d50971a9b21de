"""Every script of examples/ answers --help, says what it does, and computes nothing for it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from documentation import ROOT

SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_answers_help(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {path.name}")
    first = path.read_text().removeprefix('"""').split("\n")[0].split()
    assert " ".join(first) in " ".join(shown.split())


def test_all_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 11
