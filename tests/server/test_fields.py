"""docs/api.md has a table with every field of every request, generated from the schemas, and no field of OpenAI's is missing.

To generate the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/server/test_fields.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fa_serve.server import schemas
from fa_serve.server.chat import conversation
from fa_serve.server.strict import StrictModel
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_params

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES = {
    "/v1/chat/completions": conversation.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/tokenize": conversation.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
PARTS = {
    "Message": conversation.Message,
    "ToolCall": conversation.ToolCall,
    "Tool": conversation.Tool,
    "Function": conversation.Function,
    "ResponseFormat": conversation.ResponseFormat,
    "JsonSchemaFormat": conversation.JsonSchemaFormat,
    "StructuredOutputs": schemas.StructuredOutputs,
    "StreamOptions": schemas.StreamOptions,
}
OURS = {"speculative"}
OPENAIS = {
    "/v1/chat/completions": {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "/v1/completions": {*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "Message": set().union(
        *(
            getattr(chat, f"ChatCompletion{role}MessageParam").__annotations__
            for role in ("Assistant", "Developer", "System", "Tool", "User")
        )
    ),
    "Function": {"name", "description", "parameters", "strict"},
    "StreamOptions": {*chat.ChatCompletionStreamOptionsParam.__annotations__},
}


def kind(schema: dict[str, Any]) -> str:
    """A JSON schema in words. Null is the same as absent, so it is not mentioned."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        most = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{most}: {kind(schema['items'])}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    words = schema.get("type", "anything")
    if low is not None and abs(low) < 2**31 and high is not None:
        return f"{words}, {'above ' if 'exclusiveMinimum' in schema else ''}{low:g} to {high:g}"
    if low is not None and abs(low) < 2**31:
        return f"{words}, at least {low:g}"
    if schema.get("pattern"):
        return f"{words}, `{schema['pattern']}`"
    return words + (", not empty" if schema.get("minLength") else "")


def table(name: str, model: type[StrictModel]) -> str:
    shown = model.model_json_schema()
    openais = OPENAIS.get(name, set())
    rows = [f"### `{name}`", "", "| field | values | |", "|---|---|---|"]
    for field, schema in shown["properties"].items():
        notes = ["required"] if field in shown.get("required", ()) else []
        notes += ["fa_serve's" if field in OURS else "vLLM's"] if openais and field not in openais else []
        text = "; ".join([*notes, *([schema["description"].rstrip(".")] if "description" in schema else [])])
        rows.append(f"| `{field}` | {kind(schema).replace('|', '&#124;')} | {text} |")
    for field, values in sorted(model.UNSUPPORTED.items()):
        passing = ", ".join(f"`{json.dumps(value)}`" for value in (None, *values))
        rows.append(f"| `{field}` | {passing} | **refused** otherwise |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", OPENAIS)
def test_none_of_openais_fields_is_forgotten(name):
    """The fields that openai-python knows are honoured, or refused by their names."""
    model = (ROUTES | PARTS)[name]
    assert OPENAIS[name] - model.model_json_schema()["properties"].keys() - model.UNSUPPORTED.keys() == set()


def test_the_documented_fields_are_the_fields():
    everything = ROUTES | PARTS
    before, rest = DOCUMENT.read_text().split("<!-- fields -->\n")
    after = rest.split("<!-- end of fields -->")[1]
    tables = "\n".join(table(name, model) for name, model in everything.items())
    expected = f"{before}<!-- fields -->\n\n{tables}\n<!-- end of fields -->{after}"
    if os.environ.get("FA_SERVE_WRITE_DOCS"):
        DOCUMENT.write_text(expected)
    assert DOCUMENT.read_text() == expected
