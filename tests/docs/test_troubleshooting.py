"""The messages that docs/troubleshooting.md quotes are messages of the source, and the source has none that it leaves out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from documentation import ROOT, prose

PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"  # where a message has a value
SOURCES = sorted(path for folder in ("fa_serve", "server") for path in (ROOT / folder).rglob("*.py"))
# Errors that a user meets. Internal ones are left out: RuntimeError of pages.py, NotFusedError, which is only logged, ...
RAISED = {
    "UnsupportedModelError",
    "UnsupportedError",
    "QueueFullError",
    "EngineDeadError",
    "BadRequest",
    "NotFound",
    "Unavailable",
    "TooManyRequests",
    "Unauthorized",
}
TENSOR_CHECKS = ("api.py", "argument_checks.py", "backends/__init__.py")


def quotes() -> list[str]:
    """The code in the columns "message" and "rule" of the page's tables."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", prose(PAGE), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        for title in {"message", "rule"}.intersection(head):
            for row in rows:
                found += re.findall(r"`([^`]+)`", row[head.index(title)])
    return list(dict.fromkeys(found))


def text_of(node: ast.AST) -> str | None:
    """A literal or f-string, with a hole for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    return None


@cache
def literals() -> tuple[str, ...]:
    found: dict[str, None] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = text_of(node)
            if text:
                # logging's own holes, and the ones of pydantic's messages
                found[re.sub(r"%[sd]|\{\w+\}", HOLE, text)] = None
    return tuple(found)


def pattern(quote: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part.strip()) for part in quote.split("...")), re.DOTALL)


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_in_the_source(quote: str) -> None:
    wanted = pattern(quote)
    assert any(wanted.search(text) for text in literals()), f"no message in the source reads {quote!r}"


def test_a_quote_is_more_than_a_name() -> None:
    """A name alone would stand for every message that has it, and hide one that the page leaves out."""
    assert [quote for quote in quotes() if " " not in quote] == []


def messages(path: Path) -> list[tuple[int, str]]:
    """The messages that a module raises to its users."""
    checks = str(path).endswith(TENSOR_CHECKS)
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            place = 1 if name in ("ParameterError", "RequestError", "_require") else 0
            if name == "_require":
                place = 2
            elif name not in RAISED | {"ParameterError", "RequestError"} and not (
                checks and name in ("ValueError", "TypeError")
            ):
                continue
            text = text_of(node.args[place]) if len(node.args) > place else None
            if text and re.search("[a-z]{4}", text):  # else it is made of other messages
                found.append((node.lineno, text))
    return found


# types of single fields, which the rules name in full: "be an integer"
OBVIOUS = re.compile(
    "be (an integer|a number|True or False|a dict or a text|a text that is not empty|a tuple of texts that are not empty"
    "|a SamplingParams|a StructuredOutput|a tuple of token ids, which are integers|at least 1)$|hold a token id$"
)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in SOURCES])
def test_no_message_is_left_out(path: Path) -> None:
    known = [pattern(quote) for quote in quotes()]
    for line, text in messages(path):
        # a quote may be shorter than the message, or a part of it
        covered = OBVIOUS.match(text) or any(wanted.search(text) for wanted in known)
        assert covered, f"{path.name}:{line} says {text.replace(HOLE, '...')!r}, which docs/troubleshooting.md does not explain"
