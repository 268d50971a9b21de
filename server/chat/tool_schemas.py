"""JSON schemas of tool calls, for answers that must be, or may be, calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_serve.engine.request.params import MAX_STRUCTURED, schema_length

from ..errors import BadRequest
from .conversation import Tool


def call_schemas(tools: Sequence[Tool], arguments_key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One schema for each tool's call, {"name": ..., arguments_key: ...}, and the definitions that the schemas refer to.

    Raises BadRequest for more than MAX_STRUCTURED characters, before anything is copied.
    """
    if sum(schema_length(tool.parameters(), MAX_STRUCTURED) for tool in tools) > MAX_STRUCTURED:
        message = f"tools must have schemas of at most {MAX_STRUCTURED} characters in total if the answer must follow them."
        raise BadRequest(message, param="tools", code="invalid_value")
    calls = []
    definitions = {}
    for tool in tools:
        name = tool.function.name
        place = f"#/$defs/{name}"
        definitions[name] = _moved(tool.parameters(), place)
        properties = {"name": {"const": name}, arguments_key: {"$ref": place}}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    return calls, definitions


def call_list_schema(tools: Sequence[Tool], arguments_key: str, single: bool) -> dict[str, Any]:
    """The schema of a non-empty list of calls; with `single`, of exactly one call."""
    calls, definitions = call_schemas(tools, arguments_key)
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if single:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, place: str) -> Any:
    """The schema as a part of a larger document, at `place`: references to its root become references to `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
