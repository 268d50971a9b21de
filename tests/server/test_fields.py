"""docs/api-fields.md has a table with every field of every request, generated from the schemas.

No field of OpenAI's or Anthropic's is missing.

To generate the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/server/test_fields.py
"""

import json
from pathlib import Path
from typing import Any

import anthropic.types as anthropics
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from documentation import check_generated
from fa_serve.server import schemas
from fa_serve.server.chat import conversation
from fa_serve.server.dialects import anthropic_request, responses_request
from fa_serve.server.pooling import requests
from fa_serve.server.strict import StrictModel
from openai.types import chat, completion_create_params, embedding_create_params, responses
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param
from openai.types.shared_params import Reasoning

DOCUMENT = Path(__file__).parents[2] / "docs" / "api-fields.md"
ROUTES = {
    "/v1/chat/completions": conversation.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/responses": responses_request.ResponsesRequest,
    "/v1/messages": anthropic_request.MessagesRequest,
    "/v1/messages/count_tokens": anthropic_request.CountTokensRequest,
    "/v1/embeddings": requests.EmbeddingRequest,
    "/v1/rerank": requests.RerankRequest,
    "/score": requests.ScoreRequest,
    "/classify": requests.ClassifyRequest,
    "/embed": requests.TeiEmbedRequest,
    "/embed_all": requests.TeiInputs,
    "/rerank": requests.TeiRerankRequest,
    "/predict": requests.TeiPredictRequest,
    "/tokenize": conversation.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
PARTS = {
    "RerankDocument": requests.RerankDocument,
    "Message": conversation.Message,
    "Part": conversation.Part,
    "ImageUrl": conversation.ImageUrl,
    "ToolCall": conversation.ToolCall,
    "Tool": conversation.Tool,
    "Function": conversation.Function,
    "ResponseFormat": conversation.ResponseFormat,
    "JsonSchemaFormat": conversation.JsonSchemaFormat,
    "StructuredOutputs": schemas.StructuredOutputs,
    "StreamOptions": schemas.StreamOptions,
    "MessageItem": responses_request.MessageItem,
    "FunctionCallItem": responses_request.FunctionCallItem,
    "FunctionCallOutputItem": responses_request.FunctionCallOutputItem,
    "ReasoningItem": responses_request.ReasoningItem,
    "ContentItem": responses_request.ContentItem,
    "FunctionTool": responses_request.FunctionTool,
    "TextFormat": responses_request.TextFormat,
    "Reasoning": responses_request.Reasoning,
    "Turn": anthropic_request.Turn,
    "TextBlock": anthropic_request.TextBlock,
    "ImageBlock": anthropic_request.ImageBlock,
    "ImageSource": anthropic_request.ImageSource,
    "ThinkingBlock": anthropic_request.ThinkingBlock,
    "ToolUseBlock": anthropic_request.ToolUseBlock,
    "ToolResultBlock": anthropic_request.ToolResultBlock,
    "ToolDefinition": anthropic_request.ToolDefinition,
    "ToolSelection": anthropic_request.ToolSelection,
    "Thinking": anthropic_request.Thinking,
    "OutputConfig": anthropic_request.OutputConfig,
    "Metadata": anthropic_request.Metadata,
}
OURS = {"speculative"}
REMOVED = {"temperature", "top_p", "top_k", "stream"}
"""Fields of Anthropic's API that the SDK's type has no more, or elsewhere."""


def fields_of(*types: Any) -> set[str]:
    return set().union(*(kind.__annotations__ for kind in types))


OPENAIS = {
    "/v1/chat/completions": {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "/v1/completions": {*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "/v1/embeddings": fields_of(embedding_create_params.EmbeddingCreateParams),
    "Message": set().union(
        *(
            getattr(chat, f"ChatCompletion{role}MessageParam").__annotations__
            for role in ("Assistant", "Developer", "System", "Tool", "User")
        )
    ),
    "Function": {"name", "description", "parameters", "strict"},
    "StreamOptions": {*chat.ChatCompletionStreamOptionsParam.__annotations__},
    "/v1/responses": {*fields_of(response_create_params.ResponseCreateParamsBase), "stream"},
    "MessageItem": fields_of(responses.EasyInputMessageParam, responses.ResponseOutputMessageParam),
    "FunctionCallItem": fields_of(responses.ResponseFunctionToolCallParam),
    "FunctionCallOutputItem": fields_of(response_input_item_param.FunctionCallOutput),
    "ReasoningItem": fields_of(responses.ResponseReasoningItemParam),
    "FunctionTool": fields_of(responses.FunctionToolParam),
    "TextFormat": fields_of(responses.ResponseFormatTextJSONSchemaConfigParam),
    "Reasoning": fields_of(Reasoning),
    "/v1/messages": fields_of(message_create_params.MessageCreateParamsBase) | REMOVED,
    "/v1/messages/count_tokens": fields_of(message_count_tokens_params.MessageCountTokensParams),
    "TextBlock": fields_of(anthropics.TextBlockParam),
    "ThinkingBlock": fields_of(anthropics.ThinkingBlockParam),
    "ToolUseBlock": fields_of(anthropics.ToolUseBlockParam),
    "ToolResultBlock": fields_of(anthropics.ToolResultBlockParam),
    "ToolDefinition": fields_of(anthropics.ToolParam),
    "ToolSelection": fields_of(anthropics.ToolChoiceToolParam, anthropics.ToolChoiceAutoParam),
    "Thinking": fields_of(anthropics.ThinkingConfigEnabledParam, anthropics.ThinkingConfigAdaptiveParam),
    "OutputConfig": fields_of(anthropics.OutputConfigParam),
    "Metadata": fields_of(anthropics.MetadataParam),
}


VLLMS = {"/v1/chat/completions", "/v1/completions", "Message", "Function", "StreamOptions"}
"""What vLLM has further fields of."""


def kind(schema: dict[str, Any]) -> str:
    """A JSON schema in words. Null is the same as absent, so it is not mentioned."""
    if parts := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(kind(part) for part in parts if part.get("type") != "null"))
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
    rows = [f"## `{name}`", "", "| field | values | |", "|---|---|---|"]
    for field, schema in shown["properties"].items():
        notes = ["required"] if field in shown.get("required", ()) else []
        if openais and field not in openais and name in VLLMS:
            notes += ["fa_serve's" if field in OURS else "vLLM's"]
        text = "; ".join([*notes, *([schema["description"].rstrip(".")] if "description" in schema else [])])
        rows.append(f"| `{field}` | {kind(schema).replace('|', '&#124;')} | {text} |")
    for field, values in sorted(model.UNSUPPORTED.items()):
        passing = ", ".join(f"`{json.dumps(value)}`" for value in (None, *values))
        rows.append(f"| `{field}` | {passing} | **refused** otherwise |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", OPENAIS)
def test_none_of_the_apis_fields_is_forgotten(name):
    """The fields that openai-python and anthropic know are honoured, or refused by their names."""
    model = (ROUTES | PARTS)[name]
    assert OPENAIS[name] - model.model_json_schema()["properties"].keys() - model.UNSUPPORTED.keys() == set()


def test_the_documented_fields_are_the_fields():
    everything = ROUTES | PARTS
    check_generated(DOCUMENT, "fields", "\n".join(table(name, model) for name, model in everything.items()))
