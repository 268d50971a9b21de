"""CONTRIBUTING.md is right about the code: its files and `make` targets exist, and a file holds the names in its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = ("py", "md", "toml", "txt", "json", "yml")
IN_TEXT = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
CODE = re.findall(r"`([^`\n]+)`", IN_TEXT)
PATHS = sorted({code for code in CODE if re.fullmatch(rf"[\w./-]+\.({'|'.join(FILES)})|[\w./-]+/", code)})
ROWS = [
    (path, sorted(name for name in re.findall(r"`([A-Za-z_]+)`", row)))
    for path, row in re.findall(r"^\| `([^`]+)` \| (.+) \|$", TEXT, re.MULTILINE)
    if path in PATHS
]
TARGETS = sorted(set(re.findall(r"`make ([\w-]+)`", TEXT)))


def test_the_page_is_read() -> None:
    """The patterns above find what is there."""
    assert {"fa_serve/backends/sdpa.py", "tests/support/cases.py", "CHANGELOG.md"} <= set(PATHS)
    assert ("server/observe/metrics.py", ["Metrics", "_add_engine"]) in ROWS
    assert "release" in TARGETS


@pytest.mark.parametrize("path", PATHS)
def test_every_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "names"), [(path, names) for path, names in ROWS if names], ids=lambda value: str(value))
def test_a_file_holds_the_names_of_its_row(path: str, names: list[str]) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
