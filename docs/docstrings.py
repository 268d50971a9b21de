"""Docstrings of the house as Markdown, for the Python reference (mkdocstrings loads this file, see mkdocs.yml).

A docstring here lists its arguments in aligned lines:

    q:    (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32
    mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k);
          bool keeps where True

Markdown would join such lines to one paragraph. `to_markdown` makes a list of them, one item for each name, and leaves
everything else as it is. Left out: the parsing of types and defaults, which the signature shows.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"(?P<names>[*A-Za-z_][\w*./]*(?:, [*A-Za-z_][\w*]*)*): +(?P<text>\S.*)")
_SENTENCES = ("Raises ", "Returns ", "->")


def to_markdown(text: str) -> str:
    """A list item for each line "name: text" at the left margin, with its indented continuation lines."""
    lines: list[str] = []
    in_item = False
    for line in text.splitlines():
        item = None if line.startswith(" ") else _ITEM.fullmatch(line)
        if item is not None:
            if not in_item:
                lines.append("")
            lines.append(f"- `{item['names']}`: {item['text']}")
            in_item = True
        elif in_item and line.startswith(" "):
            lines[-1] += " " + line.strip()
        else:
            if in_item or line.startswith(_SENTENCES):
                lines.append("")
            lines.append(line)
            in_item = False
    return "\n".join(lines)


class HouseDocstrings(griffe.Extension):
    """Rewrites the docstring of each function, class and module when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
