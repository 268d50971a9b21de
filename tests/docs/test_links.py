"""Links and file names in the documentation lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from documentation import GUIDES, LOGS, PAGES, ROOT, anchors, included, links, prose

SOURCES = ("fa_serve", "server", "tests", "benchmarks", "examples", "deploy", "docs")
# `fa_serve/hf/adapter/masks.py`, also as a part of a command or with a function: `fa_serve/api.py:attention`
_FILE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(SOURCES)})/[\w./-]*\w\.(?:py|md|yaml|yml|conf|service|json|svg|html))\b")


def ids(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", ids(PAGES))
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads to no file"
        assert ROOT in target.parents, f"{link} leads out of the repository"
        if anchor and target.suffix == ".md":
            made = anchors(target) | set(re.findall(r"^::: ([\w.]+)$", target.read_text(), re.MULTILINE))
            assert anchor in made, f"{link} leads to no heading"


@pytest.mark.parametrize("page", ids(GUIDES))
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in sorted({*_FILE.findall(prose(page)), *included(page)}):
        assert (ROOT / name).exists(), name


OTHERS = {"ragged_tma.py", "python/triton/tools/ragged_tma.py", "test_modeling_common.py"}
"""Files of Triton and of transformers."""


def test_short_names_of_files_are_ends_of_paths() -> None:
    """`launching/launch.py` or `pages.py` on a page that says in which room it is; the changelog names files of their day."""
    paths = [f"/{path.relative_to(ROOT)}" for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    named = [(page.name, name) for page in GUIDES for name in re.findall(r"`([\w/]+\.py)(?::[\w.]+)?`", prose(page))]
    assert len(named) > 200
    known = {name for _, name in named if any(path.endswith(f"/{name}") for path in paths)}
    assert {(page, name) for page, name in named if page != "CHANGELOG.md" and name not in known | OTHERS} == set()


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods that a module defines or imports: `f`, `C`, `C.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_functions_that_the_architecture_names_exist() -> None:
    """The lists of calls in docs/architecture.md, `file:function`."""
    named = re.findall(r"`((?:fa_serve|server)/[\w/]+\.py):([\w.]+)`", prose(ROOT / "docs" / "architecture.md"))
    assert len(named) > 20
    for file, name in named:
        assert name in names_in(ROOT / file), f"{file}:{name}"


def test_pages_of_the_site_link_within_the_site() -> None:
    """What a page of docs/ links to is a part of the site; files outside are named, not linked."""
    docs = ROOT / "docs"
    for page in PAGES:
        if docs in page.parents:
            targets = [link.partition("#")[0] for link in links(page) if not re.match(r"https?:", link)]
            assert all(docs in (page.parent / path).resolve().parents for path in targets if path), page


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Takes mkdocs.yml as it is, Python's own tags for mkdocs included."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)

    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [name for part in parts for name in files(part)]  # type: ignore[attr-defined]

    pages = {page for page in PAGES if ROOT / "docs" in page.parents}
    logs = {page for page in pages if page.parent == LOGS}
    assert {ROOT / "docs" / name for name in files(config["nav"])} == pages - logs
    assert config["not_in_nav"].split() == ["log/*.md"]
    assert config["strict"] is True
    assert config["theme"]["font"] is False, "the build must not need a network"


def test_a_page_is_not_too_long_to_read() -> None:
    """A page that grows is divided by its subjects. The three lists are generated, and are searched instead of read."""
    lists = {"models.md", "messages.md", "api-fields.md"}
    pages = [page for page in GUIDES if ROOT / "docs" in page.parents and page.name not in lists]
    words = {page.name: len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).split()) for page in pages}
    assert len(words) > 40
    assert {name: count for name, count in words.items() if count > 3000} == {}


def test_the_search_leaves_records_out() -> None:
    """What is long and dated would come before the guides in every search."""
    for page in (*sorted(LOGS.glob("*.md")), ROOT / "docs" / "changelog.md"):
        assert page.read_text().startswith("---\nsearch:\n  exclude: true\n---\n"), page
