"""Docstrings of the house become Markdown lists, and `make check` builds the site from them."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documentation import ROOT

pytest.importorskip("griffe", reason="the extra docs is not installed")


def to_markdown(text: str) -> str:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.to_markdown(text))


ALIGNED = """Attention.

q:    (batch, heads)
mask: broadcastable,
      bool or float
a, b: two
num_*: totals
Returns out."""
LISTED = """Attention.


- `q`: (batch, heads)
- `mask`: broadcastable, bool or float
- `a, b`: two
- `num_*`: totals

Returns out."""


def test_aligned_arguments_become_a_list() -> None:
    assert to_markdown(ALIGNED) == LISTED


def test_code_and_sentences_stay_as_they_are() -> None:
    given = "An engine:\n\n    config = Config(a=1)  # one: two\n\nIt ends here. Errors: see above."
    assert to_markdown(given) == given


def test_check_builds_the_site_strictly() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check = re.search(r"^check: ([^#\n]*)", makefile, re.MULTILINE)
    assert check is not None
    assert "docs" in check[1].split()
    assert "mkdocs build" in makefile
    assert re.search("^strict: true$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
