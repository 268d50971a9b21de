"""The pages that a reader sees, and what the tests read in them: fenced blocks, links, headings.

README.md, CONTRIBUTING.md, CHANGELOG.md and docs/**/*.md. The monthly logs are raw notes of their day: their links are checked,
their snippets and the files that they name are not. Some pages have generated parts, which are compared with what is right now.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs" / "log"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent != LOGS or page.name == "index.md"]

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`\n]+`+")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+?)(?: \{ *#([\w-]+) *\})?$", re.MULTILINE)
_SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent, _, language, body = found.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        yield Block(page, text.count("\n", 0, found.start()) + 1, language.strip(), "".join(lines))


def prose(page: Path) -> str:
    """The page without its fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    return [inline or reference for inline, reference in _LINK.findall(_CODE.sub("", prose(page)))]


def included(page: Path) -> list[str]:
    """The files whose text the site puts into the page."""
    return _SNIPPET.findall(page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    text = prose(page)
    for name in included(page):
        text += (ROOT / name).read_text(encoding="utf-8")
    for heading, given in _HEADING.findall(text):
        shown = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = given or re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = next(n for n in range(len(found) + 1) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def table_cell(text: str) -> str:
    """A text as a cell of a table: <words> in code. The site and GitHub read a bar in code differently, so it is an entity."""
    return re.sub(r"<\S+?>", lambda word: f"<code>{html.escape(word[0])}</code>", text).replace("|", "&#124;")


def check_generated(page: Path, name: str, text: str) -> None:
    """Compare the part of a page between `<!-- name -->` and `<!-- end of name -->` with what it should be.

    FA_SERVE_WRITE_DOCS=1 in the environment writes it there.
    """
    begin = f"<!-- {name} -->"
    end = f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    expected = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    if os.environ.get("FA_SERVE_WRITE_DOCS"):
        page.write_text(expected)
    assert page.read_text() == expected
