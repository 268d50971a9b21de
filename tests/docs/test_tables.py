"""Tables have as many cells in each row as in their head, and nothing in a cell is taken for HTML or for a border.

A bar that GitHub reads as text in a cell, \\|, is shown with its backslash in code on the site, so cells have entities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documentation import GUIDES, ROOT, prose, table_cell

CODE = re.compile(r"`+[^`]*`+")
TAG = re.compile(r"<(?!/?(?:code|br|kbd|span|a)\b|!--|https?:)[^\s>]+>")


def tables(page: Path) -> Iterator[list[str]]:
    """The rows of each table."""
    rows: list[str] = []
    for line in [*prose(page).splitlines(), ""]:
        if line.lstrip().startswith("|"):
            rows.append(line.strip())
        elif rows:
            yield rows
            rows = []


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_have_the_cells_of_their_head(page: Path) -> None:
    for rows in tables(page):
        for row in rows:
            assert cells(row) == cells(rows[0]), row
            assert r"\|" not in "".join(CODE.findall(row)), f"the site shows the backslash: {row}"
            assert not TAG.search(CODE.sub("", row)), f"the site takes a word for HTML: {row}"


def test_a_description_becomes_a_cell() -> None:
    assert table_cell("such as <|im_end|>, a|b") == "such as <code>&lt;&#124;im_end&#124;&gt;</code>, a&#124;b"
    assert table_cell("Whether <think> is separated") == "Whether <code>&lt;think&gt;</code> is separated"


def test_a_table_is_found_with_its_rows() -> None:
    found = [len(rows) for rows in tables(ROOT / "docs" / "settings.md")]
    assert len(found) >= 7
    assert all(count >= 3 for count in found)
    assert cells("| a | b `x|y` |") == 3, "a bar in code is a border on GitHub"
