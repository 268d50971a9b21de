"""Docstrings of the house become Markdown lists, and `make check` builds the site from them."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
from documentation import ROOT

import fa_serve
from fa_serve import engine

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


def test_the_page_describes_all_that_is_exported() -> None:
    """Each name of `__all__` has an entry, under the name by which it is imported, and no other has one."""
    text = (ROOT / "docs" / "python-api.md").read_text()
    headings = re.findall(r"^::: ([\w.]+)\n    options:\n      heading: ([\w.]+)$", text, re.MULTILINE)
    exported = {f"fa_serve.{name}" for name in fa_serve.__all__} | {f"fa_serve.engine.{name}" for name in engine.__all__}
    assert sorted(heading for _, heading in headings) == sorted(exported)
    for path, heading in headings:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is getattr(
            engine if heading.startswith("fa_serve.engine.") else fa_serve, name
        )


@pytest.mark.parametrize(
    "function", [fa_serve.attention, fa_serve.attention_varlen, fa_serve.attention_paged, fa_serve.store_kv]
)
def test_each_parameter_is_described_under_its_signature(function: Callable[..., object]) -> None:
    """As an item of the list, also under a name such as `max_seqlen_*`, or in the item of another one."""
    items = re.findall(r"^- `([^`]+)`: (.+)$", to_markdown(inspect.getdoc(function) or ""), re.MULTILINE)
    named = {name.strip() for names, _ in items for name in names.split(",")}
    text = " ".join(described for _, described in items)
    missing = [
        name
        for name in inspect.signature(function).parameters
        if not any(fnmatchcase(name, known) for known in named)
        and not re.search(rf"\b{name}\b(?:: \(| has|: the same| likewise| \(batch)", text)
    ]
    assert missing == []


def test_check_builds_the_site_strictly() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check = re.search(r"^check: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert check is not None
    assert "docs" in check[1].split()
    assert "mkdocs build" in makefile
    assert re.search("^strict: true$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
