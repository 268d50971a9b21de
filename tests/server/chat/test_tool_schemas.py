"""Schemas of tool calls."""

from fa_serve.server.chat.conversation import Tool
from fa_serve.server.chat.tool_schemas import call_schemas


def test_references_move_with_their_schema():
    inner = {"$defs": {"N": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/N"}, "b": {"items": [{"$ref": "#"}]}}}
    calls, definitions = call_schemas(
        [Tool(**{"type": "function", "function": {"name": "f", "parameters": inner}})], "arguments"
    )
    assert calls[0]["properties"] == {"name": {"const": "f"}, "arguments": {"$ref": "#/$defs/f"}}
    moved = definitions["f"]["properties"]
    assert moved == {"a": {"$ref": "#/$defs/f/$defs/N"}, "b": {"items": [{"$ref": "#/$defs/f"}]}}
