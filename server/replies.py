"""What clients get: OpenAI's objects with OpenAI's fields, and additional fields with vLLM's names.

They are typed dictionaries: mypy checks them, /openapi.json shows them, and they cost nothing at run time. What clients send
is in schemas.py and chat/conversation.py.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict


class TokenizeReply(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class TokenizerInfo(TypedDict):
    """The other keys are the fields of the tokenizer's configuration."""

    tokenizer_class: str
    chat_template: str | None


class WeightReply(TypedDict):
    """
    is_paused:      whether requests wait, for a pause or because the engine sleeps
    is_sleeping:    whether memory or weights are missing: /wake_up allocates memory, /update_weights supplies weights
    weight_version: how often the weights have been changed
    """

    is_paused: bool
    is_sleeping: bool
    weight_version: int


class WorldSizeReply(TypedDict):
    """world_size: how many ranks of this server take part in a trainer's group"""

    world_size: int


class DetokenizeReply(TypedDict):
    prompt: str


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """The first token of an echoed prompt has null, because no token comes before it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionDelta


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class Reply(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]


class Completion(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    task: str
    input_modalities: list[Literal["text", "image"]]
    parent: NotRequired[str]


class AdapterReply(TypedDict):
    lora_name: str
    status: Literal["loaded", "unloaded"]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    error: ErrorBody
