"""The messages that users meet, read from the places that raise or log them, as docs/messages.md lists them.

    FA_SERVE_WRITE_DOCS=1 pytest tests/docs/test_troubleshooting.py     # writes the list on the page again

A message is the text of an exception that is raised, a line of the log at the level WARNING or above, or the reason for which a
backend refuses a call. `...` stands for a value. Left out: exceptions that other code of fa_serve catches, and messages without
a text in the source, which are made of other messages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from documentation import ROOT
from fa_serve.server import errors

HOLE = "..."
STATUS = {
    name: kind.status for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ApiError)
}
STATUS["HTTPException"] = errors.BadRequest.status
PARAMETER = "ParameterError"
WITH_FIELD = {PARAMETER: (0, "must "), "_require": (1, "must "), "refuse": (0, "must "), "field_error": (0, "")}
"""Calls with a field and a rule: the place of the field, and what is said between both."""
REQUEST = "RequestError"
"""Why a request that had been accepted ended: its code and a sentence."""
ENDS = {"_fail": "exit", "exit": "exit"}
"""Calls that end a command with a text."""
CAUGHT = (
    "NotFusedError",
    "NotCompiledError",
    "TrialError",
    "ClientGone",
    "AttributeError",
    "TemplateError",
    "PydanticCustomError",
)
"""Exceptions that end in another message or in none."""
LOGGED = ("warning", "error", "exception")
SECTIONS = {
    "Attention functions": ("fa_serve/",),
    "Other libraries": ("fa_serve/adapters", "fa_serve/flash_attn", "fa_serve/vllm", "fa_serve/sglang", "fa_serve/diffusers"),
    "Models and masks": ("fa_serve/hf",),
    "Engine": ("fa_serve/engine", "fa_serve/ops", "fa_serve/launching", "fa_serve/sandbox"),
    "Server and commands": ("server/", "fa_serve/client", "fa_serve/__main__"),
}
"""The title of a list, and what the paths of its modules begin with; the longest beginning counts."""
HTTP = "HTTP errors"
REASONS = "No backend can serve the call"
LOG = "Warnings in the log"


Known = dict[str, list[ast.expr]]
"""What the names of a function and of its module are set to."""


class Message(NamedTuple):
    """section: the list that it stands in. shown: how it reads. kind: the exception, or the status of HTTP."""

    section: str
    shown: str
    kind: str


@cache
def messages() -> tuple[Message, ...]:
    found: dict[Message, None] = {}
    for folder in ("fa_serve", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(dict.fromkeys(messages_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))))
    return tuple(found)


def messages_of(name: str, source: str) -> Iterator[Message]:
    """The messages of one module."""
    places = [(len(start), title) for title, starts in SECTIONS.items() for start in starts if name.startswith(start)]
    body = ast.parse(source).body
    constants = _assigned([statement for statement in body if isinstance(statement, ast.Assign | ast.AnnAssign)])
    yield from _block(body, constants, max(places)[1], name.startswith("fa_serve/backends"), gives_reason=False)


def _assigned(body: Sequence[ast.AST]) -> Known:
    """What each name is set to in these statements and in those that they contain."""
    found: Known = {}
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def _block(body: Sequence[ast.AST], known: Known, section: str, is_backend: bool, gives_reason: bool) -> Iterator[Message]:
    """The messages of statements that follow each other. A name is what was assigned last, or in any branch before."""
    known = dict(known)
    for statement in body:
        blocks = [each for field in ("body", "orelse", "finalbody", "handlers", "cases") for each in _list_of(statement, field)]
        expressions = [node for child in ast.iter_child_nodes(statement) if child not in blocks for node in ast.walk(child)]
        for node in expressions:
            if isinstance(node, ast.Call):
                yield from _called(node, known, section)
        if gives_reason and isinstance(statement, ast.Return) and statement.value is not None:
            yield from (Message(REASONS, text, "") for text in texts(statement.value, known))
        inside = gives_reason
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = is_backend and statement.returns is not None and ast.unparse(statement.returns) == "str | None"
        yield from _block(blocks, known, section, is_backend, inside)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            known |= _assigned([statement])
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known |= {name: [*known.get(name, []), *values] for name, values in _assigned(blocks).items()}


def _list_of(statement: ast.AST, field: str) -> list[ast.AST]:
    value = getattr(statement, field, [])
    return value if isinstance(value, list) else []


def _called(call: ast.Call, known: Known, section: str) -> Iterator[Message]:
    """What a call makes: an exception, an error of an accepted request, a line of the log, or the end of a command."""
    name = ast.unparse(call.func).rpartition(".")[2]
    place, verb = WITH_FIELD.get(name, (0, ""))
    if name in WITH_FIELD and len(call.args) > place + 1:
        kind, where = (PARAMETER, section) if verb else (str(errors.BadRequest.status), HTTP)
        fields_and_rules = product(*(_texts(argument, known) for argument in call.args[place : place + 2]))
        yield from (Message(where, f"{field} {verb}{rule}", kind) for field, rule in fields_and_rules if _has_words(rule))
    elif name in LOGGED and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "log" and call.args:
        yield from (Message(LOG, _tidy(re.sub(r"%(\.\d+)?[sdgfr]", HOLE, text)), "") for text in texts(call.args[0], known))
    elif (name in STATUS or name in ENDS or name.endswith("Error")) and name not in CAUGHT:
        place = 1 if name in (REQUEST, "HTTPException") else 0
        kind = str(STATUS.get(name, ENDS.get(name, name)))
        for argument in call.args[place : place + 1]:
            yield from (Message(HTTP if name in STATUS else section, text, kind) for text in texts(argument, known))


def texts(node: ast.expr, known: Known) -> list[str]:
    """The texts that an expression may give, without those that have no words."""
    return [text for text in _texts(node, known) if _has_words(text)]


def _texts(node: ast.expr, known: Known) -> list[str]:
    """The texts that an expression may give, each with `...` for a value."""
    return list(dict.fromkeys(_tidy(text) for text in _unfolded(node, known)))


def _unfolded(node: ast.expr, known: Known) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(each) for each in product(*(_unfolded(part, known) for part in parts))]
        case ast.FormattedValue(value=ast.Name() as value):
            found = _unfolded(value, known)
            return found if len(found) == 1 else [HOLE]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [_unfolded(left, known)[0] + _unfolded(right, known)[0]]
        case ast.IfExp(body=body, orelse=other):
            return [*_unfolded(body, known), *_unfolded(other, known)]
        case ast.Name(id=name):
            values = [value for value in known.get(name, []) if isinstance(value, ast.Constant | ast.JoinedStr | ast.IfExp)]
            others = {key: value for key, value in known.items() if key != name}
            return [text for value in values for text in _unfolded(value, others)] or [HOLE]
        case _:
            return [HOLE]


def _tidy(text: str) -> str:
    """On one line; neighbouring values are one."""
    return re.sub(r"\.{4,}", HOLE, " ".join(text.split()))


def _has_words(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) > 1


def lists() -> str:
    """The part of the page: a table for each section."""
    found = messages()
    parts = []
    for title in (*SECTIONS, HTTP, REASONS, LOG):
        rows = sorted({(m.shown, m.kind) for m in found if m.section == title}, key=lambda row: (row[0].lower(), row[1]))
        has_kinds = any(kind for _, kind in rows)
        lines = ["| message | raised as |" if has_kinds else "| message |", "|---|---|" if has_kinds else "|---|"]
        for shown, kind in rows:
            code = (f"`` {shown} ``" if "`" in shown else f"`{shown}`").replace("|", "\\|")
            lines.append(f"| {code} | {kind} |" if has_kinds else f"| {code} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
