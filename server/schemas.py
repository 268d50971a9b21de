"""What clients send and what they get: OpenAI's objects, field for field.

Requests are strict pydantic models. A field is honoured or refused, never ignored: unknown ones are an error, and those of
OpenAI's that this service cannot honour are listed under `UNSUPPORTED` with the values that ask for nothing (null always
does), which clients send as defaults. Replies are TypedDicts: checked by mypy, shown in /openapi.json, free at run time.
Fields beyond OpenAI's are spelled as vLLM spells them. Left out: defaults of sampling, which are `SamplingParams`' own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

NOTHING: tuple[Any, ...] = ()


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for field in data.keys() & cls.UNSUPPORTED.keys():
            value = kept.pop(field)
            if value is not None and not any(type(value) is type(none) and value == none for none in cls.UNSUPPORTED[field]):
                raise PydanticCustomError("unsupported", "{field} is not supported by this server.", {"field": field})
        return kept


def _one_complaint(rule: str) -> WrapValidator:
    """A union fails with one sentence, not with one for each of its arms."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "must be {rule}", {"rule": rule}) from None

    return WrapValidator(validate)


NonEmpty = Annotated[str, Field(min_length=1)]
TokenIds = list[Annotated[int, Field(ge=0)]]
Stop = Annotated[
    NonEmpty | Annotated[list[NonEmpty], Field(max_length=16)],
    _one_complaint("a non-empty string or a list of up to 16 of them"),
]
Prompt = Annotated[
    str | list[str] | TokenIds | list[TokenIds],
    _one_complaint("a string, a list of strings, a list of token ids, or a list of such lists"),
]


class StreamOptions(Request):
    include_usage: bool | None = None

    UNSUPPORTED = {"include_obfuscation": (False,)}


class SamplingRequest(Request):
    """What /v1/completions and /v1/chat/completions share. Null is the same as absent."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, description="By token id.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the access log.")

    top_k: int | None = Field(None, ge=-1, description="0 and -1 keep every token.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower is served sooner.")
    return_token_ids: bool | None = Field(None, description="Adds prompt_token_ids and token_ids to each choice.")

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    UNSUPPORTED = {"best_of": (1,), "suffix": NOTHING}

    @model_validator(mode="after")
    def _no_prompt_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo and logprobs together are not supported by this server")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The batch, whichever way it was spelled."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Request):
    type: Literal["text"]
    text: str


class Message(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    UNSUPPORTED = {
        "annotations": ([],), "audio": NOTHING, "function_call": NOTHING, "refusal": NOTHING, "tool_calls": ([],),
    }  # fmt: skip

    def rendered(self) -> dict[str, str]:
        """As chat templates expect it: one string of content, and the older word for developer."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(SamplingRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    UNSUPPORTED = {
        "audio": NOTHING, "function_call": ("none",), "functions": ([],), "metadata": ({},), "modalities": (["text"],),
        "moderation": NOTHING, "parallel_tool_calls": (True,), "prediction": NOTHING, "prompt_cache_key": NOTHING,
        "prompt_cache_retention": NOTHING, "reasoning_effort": NOTHING, "response_format": ({"type": "text"},),
        "safety_identifier": NOTHING, "service_tier": ("auto", "default"), "store": (False,), "tool_choice": ("none",),
        "tools": ([],), "verbosity": NOTHING, "web_search_options": NOTHING,
    }  # fmt: skip

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens must not differ; the former is the old name of the latter")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self


class TokenizeRequest(Request):
    """A prompt as it is, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Of a prompt: what the tokenizer adds to plain text.")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt; the chat template writes its own")
        if self.prompt is not None and self.chat_template_kwargs is not None:
            raise ValueError("chat_template_kwargs is for messages")
        return self


class DetokenizeRequest(Request):
    model: str | None = None
    tokens: TokenIds


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(TypedDict):
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
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """In a plain reply whole, and without the index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


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


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


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
