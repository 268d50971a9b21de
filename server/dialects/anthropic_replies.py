"""What clients of /v1/messages get: Anthropic's objects with Anthropic's fields, as typed dictionaries for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict


class TextContent(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageTokensDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """`input_tokens` leaves out the tokens that came from the prefix cache, as with Anthropic."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class AnthropicErrorBody(TypedDict):
    type: str
    message: str


class AnthropicErrorReply(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | None
