"""The rooms of the house as a tree: each package with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from documentation import ROOT

TOP = ("server", "fa_serve")


def rooms() -> list[Path]:
    """The packages, relative to the root, each one behind the one that holds it."""
    found = [path.parent.relative_to(ROOT) for top in TOP for path in (ROOT / top).rglob("__init__.py")]
    return sorted((each for each in found if "server" not in each.parts[1:]), key=lambda each: (TOP.index(each.parts[0]), each))


def subject(room: Path) -> str:
    """The first paragraph of the docstring, without what the room leaves out."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(" Left out: ")[0]


def tree() -> str:
    """The tree in a block of code, the subjects side by side."""
    rows = [(f"{'  ' * (len(each.parts) - 1)}{each.name}/", subject(each)) for each in rooms()]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```", *(f"{name:<{width}}{what}" for name, what in rows), "```"])
