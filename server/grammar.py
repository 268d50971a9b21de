"""Answers that are held to a format in parts: thoughts are free, then comes what was asked for, or calls of tools.

    text = compose(thoughts="<think>", answer=rule(structured), calls=calls(style, tools, single, mark), mark=mark)
    StructuredOutput(grammar=text)

A structured output of the engine holds the whole answer. A model that thinks, or that may call a tool instead, needs one that
is put together, in llguidance's dialect of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A marker
that is a special token of the vocabulary is written by its id, because no text matches it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fa_serve.engine import StructuredOutput
from fa_serve.engine.structured import WHITESPACE

from .reasoning import CLOSING, OPENING
from .sampling import call_schemas
from .schemas import Tool
from .tools import ToolFormat

Mark = Callable[[str], int | None]  # the id of a marker that is a special token
ANY_TEXT = StructuredOutput(regex="(?s:.*)")


def rule(output: StructuredOutput) -> str:
    """The right side of a rule for such an answer, unless it is a grammar. Raises ValueError for a schema that is none."""
    if output.choice is not None:
        return " | ".join(map(json.dumps, output.choice))
    if output.regex is not None:
        escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], output.regex, flags=re.DOTALL)
        return f"/{escaped}/".replace("\n", r"\n")
    if output.json_object:
        return _json({"type": "object"})
    schema = json.loads(output.json_schema) if isinstance(output.json_schema, str) else output.json_schema
    if not isinstance(schema, Mapping):
        raise ValueError("json_schema must be an object")
    return _json(schema)


def compose(start: str, rules: Sequence[str], thoughts: bool | None, mark: Mark) -> str:
    """thoughts: as the prompt leaves it (reasoning.opened_by); False for an answer without any."""
    before = {True: "thoughts WS ", None: f"({_literal(OPENING, mark)} thoughts WS)? ", False: ""}[thoughts]
    lines = [f"start: {before}({start})", "WS: /[ \\t\\n\\r]{0,20}/", *rules]
    return "\n".join(lines if thoughts is False else [*lines, _until("thoughts", CLOSING, mark)])


def calls(style: ToolFormat, tools: Sequence[Tool], single: bool, mark: Mark, text: bool) -> tuple[str, list[str]]:
    """The alternatives of `start` for calls, and for text if there may be any, and the rules they need."""
    kinds, definitions = call_schemas(tools, "parameters" if style.bare else "arguments")
    call = {"anyOf": kinds, "$defs": definitions}
    opening = "opening" if text else _literal(style.opening, mark)
    if style.bare:
        start = f"({_literal(style.opening, mark)} WS)? call" + ("" if single else ' ("; " call)*')
        rules = ["call: " + _json(call), "TEXT: /\\s*[^{\\s](?s:.*)/"]
    elif style.closing:
        start = "call" if single else "call (WS call)*"
        rules = [f"call: {opening} WS body WS {_literal(style.closing, mark)}", "body: " + _json(call)]
    else:
        start = f"{opening} WS list"
        most = {"maxItems": 1} if single else {}
        rules = ["list: " + _json({"type": "array", "items": {"anyOf": kinds}, "minItems": 1, **most, "$defs": definitions})]
    if text and not style.bare:
        rules += [_until("opening", style.opening, mark)]
        rules += [f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(style.opening)}(?s:.*)/"]
    return start + (" | TEXT?" if text else ""), rules


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": WHITESPACE})


def _literal(marker: str, mark: Mark) -> str:
    token = mark(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"


def _until(name: str, marker: str, mark: Mark) -> str:
    """A rule for any text up to and with the marker."""
    if mark(marker) is None:
        return f"{name}[suffix={json.dumps(marker)}]: /(?s:.*)/"
    return f"{name}: {name.upper()}? {_literal(marker, mark)}\n{name.upper()}: /(?s:.+)/"
