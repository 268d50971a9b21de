"""Grammars for answers with several parts: free thoughts, then what the request asks for, or tool calls.

    start, rules = call_rules(tool_format, tools, single, special_token, with_text=False)
    text = compose(f"answer | {start}", [f"answer: {rule(structured)}", *rules], thoughts, special_token)
    StructuredOutput(grammar=text)

A structured output of the engine constrains the whole answer. A model that thinks first, or that may call a tool instead,
needs a grammar that is composed of these parts. The grammars are in llguidance's dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A marker that is a special token of the vocabulary is
written by its id, because no text matches it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fa_serve.engine import StructuredOutput
from fa_serve.engine.structured.grammars import WHITESPACE
from fa_serve.engine.structured.schema_numbers import narrow_numbers
from fa_serve.engine.structured.schema_references import check_references

from .conversation import Tool
from .reasoning import CLOSING, OPENING
from .tool_schemas import call_list_schema, call_schemas
from .tools import ToolFormat

SpecialToken = Callable[[str], int | None]  # the id of a marker that is a special token, None for any other text
ANY_TEXT = StructuredOutput(regex="(?s:.*)")


def rule(output: StructuredOutput) -> str:
    """The right side of a rule for this output, which must not be a grammar. Raises ValueError for an invalid schema."""
    if output.choice is not None:
        return " | ".join(map(json.dumps, output.choice))
    if output.regex is not None:
        return f"/{_with_escaped_slashes(output.regex)}/".replace("\n", r"\n")
    if output.json_object:
        return _json({"type": "object"})
    schema = json.loads(output.json_schema) if isinstance(output.json_schema, str) else output.json_schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
    return _json(schema)


def compose(start: str, rules: Sequence[str], thoughts: bool | None, special_token: SpecialToken) -> str:
    """The whole grammar.

    start:    the alternatives after the thoughts
    rules:    the rules that `start` needs
    thoughts: True if the prompt has opened the thoughts, None if the model may open them, False if there are none
    """
    optional = f"({_literal(OPENING, special_token)} thoughts WS)? "
    before = {True: "thoughts WS ", None: optional, False: ""}[thoughts]
    lines = [f"start: {before}({start})", "WS: /[ \\t\\n\\r]{0,20}/", *rules]
    if thoughts is not False:
        lines.append(_until("thoughts", CLOSING, special_token))
    return "\n".join(lines)


def call_rules(
    tool_format: ToolFormat, tools: Sequence[Tool], single: bool, special_token: SpecialToken, with_text: bool
) -> tuple[str, list[str]]:
    """The alternatives of `start` for calls, and the rules that they need.

    single:    at most one call
    with_text: text besides or instead of calls is allowed
    """
    key = "parameters" if tool_format.bare else "arguments"
    call_kinds, definitions = call_schemas(tools, key)
    call = {"anyOf": call_kinds, "$defs": definitions}
    opening = "opening" if with_text else _literal(tool_format.opening, special_token)
    if tool_format.bare:
        start = f"({_literal(tool_format.opening, special_token)} WS)? call" + ("" if single else ' ("; " call)*')
        rules = ["call: " + _json(call), "TEXT: /\\s*[^{\\s](?s:.*)/"]
    elif tool_format.closing:
        start = "call" if single else "call (WS call)*"
        rules = [f"call: {opening} WS body WS {_literal(tool_format.closing, special_token)}", "body: " + _json(call)]
    else:
        start = f"{opening} WS list"
        rules = ["list: " + _json(call_list_schema(tools, key, single))]
    if with_text and not tool_format.bare:
        rules.append(_until("opening", tool_format.opening, special_token))
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(tool_format.opening)}(?s:.*)/")
    return start + (" | TEXT?" if with_text else ""), rules


def _with_escaped_slashes(regex: str) -> str:
    """The same expression with every slash escaped, because a slash ends a regular expression in Lark.

    A slash that is already escaped keeps its one backslash. Escaped backslashes are first replaced by half of a surrogate pair,
    which JSON in UTF-8 cannot contain, so that every remaining backslash escapes the character after it. Calls of replace() are
    fast. A function that is called for each slash would hold up the event loop for up to 50 ms.
    """
    text = regex.replace("\\\\", "\ud800").replace("\\/", "/").replace("/", "\\/")
    return text.replace("\ud800", "\\\\")


def _json(schema: Mapping[str, Any]) -> str:
    """Raises ParameterError for a schema with a reference that never ends, or with a number that llguidance cannot follow."""
    check_references(schema)
    followed = json.loads(json.dumps({**schema, "x-guidance": WHITESPACE}))
    narrow_numbers(followed)
    return "%json " + json.dumps(followed)


def _literal(marker: str, special_token: SpecialToken) -> str:
    token = special_token(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"


def _until(name: str, marker: str, special_token: SpecialToken) -> str:
    """A rule for any text up to and including the marker."""
    if special_token(marker) is None:
        return f"{name}[suffix={json.dumps(marker)}]: /(?s:.*)/"
    return f"{name}: {name.upper()}? {_literal(marker, special_token)}\n{name.upper()}: /(?s:.+)/"
