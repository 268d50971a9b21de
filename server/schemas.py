"""What clients send: OpenAI's objects, field for field.

Requests are strict pydantic models. A field is honoured or refused, never ignored: unknown ones are an error, and those of
OpenAI's that this service cannot honour are listed under `UNSUPPORTED` with the values that ask for nothing (null always
does), which clients send as defaults. Fields beyond OpenAI's are spelled as vLLM spells them. Left out: defaults of sampling,
which are `SamplingParams`' own, and what clients get (replies.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

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
                complaint = {"field": field, "rule": "is not supported by this server"}
                raise PydanticCustomError("unsupported", "{field} {rule}", complaint)
        return kept


def _one_complaint(rule: str) -> WrapValidator:
    """A union fails with one sentence, not with one for each of its arms."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "must be {rule}", {"rule": rule}) from None

    return WrapValidator(validate)


def _wrong(field: str, rule: str) -> PydanticCustomError:
    """The complaint of a validator that looks at several fields, about one of them."""
    return PydanticCustomError("field", "{field} {rule}", {"field": field, "rule": rule})


NonEmpty = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Stop = Annotated[
    NonEmpty | Annotated[list[NonEmpty], Field(max_length=16)],
    _one_complaint("a non-empty string or a list of up to 16 of them"),
]
Prompt = Annotated[
    # the first that fits is taken, and those before it give up at the first item: tokens are many
    Annotated[str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")],
    _one_complaint("a string, a list of strings, a list of token ids, or a list of such lists"),
]


JsonSchema = Annotated[dict[str, Any] | str, _one_complaint("a JSON schema, as an object or as a string")]


class StreamOptions(Request):
    include_usage: bool | None = None

    UNSUPPORTED = {"include_obfuscation": (False,)}


class StructuredOutputs(Request):
    json_: JsonSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: list[NonEmpty] | None = Field(None, min_length=1)
    grammar: NonEmpty | None = Field(None, description="Context-free, in Lark's notation.")


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
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Not in a stream.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: list[NonEmpty] | None = Field(None, min_length=1)
    guided_grammar: NonEmpty | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise _wrong("prompt_logprobs", "is only allowed when stream is not true")
        return self


class CompletionRequest(SamplingRequest):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    best_of: int | None = Field(None, ge=1, description="Not in a stream.")

    UNSUPPORTED = {"suffix": NOTHING}

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise _wrong("best_of", "must be at least n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise _wrong("best_of", "above n is only allowed when stream is not true")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The batch, whichever way it was spelled."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Request):
    type: Literal["text"]
    text: str


class CalledFunction(Request):
    name: NonEmpty
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, text: str) -> str:
        try:
            if isinstance(from_json(text or "{}"), dict):
                return text
        except ValueError:
            pass
        raise PydanticCustomError("arguments", "must be a JSON object")


class ToolCall(Request):
    id: NonEmpty
    type: Literal["function"]
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Templates want the arguments as values."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


class Message(Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="For the chat template, which may leave old thoughts out.")

    UNSUPPORTED = {"annotations": ([],), "audio": NOTHING, "function_call": NOTHING, "refusal": NOTHING}

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise _wrong("content", "must be given")
        for field in ("tool_calls", "reasoning_content"):
            if getattr(self, field) and self.role != "assistant":
                raise _wrong(field, "is for messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise _wrong("tool_call_id", "must be given with the role tool, and with no other")
        return self

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it: one string of content, and the older word for developer."""
        content = self.content or ""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        others = ("name", "tool_call_id", "reasoning_content")
        return message | {field: value for field in others if (value := getattr(self, field)) is not None}


class Function(Request):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; none is an object without properties.")
    strict: bool | None = None


class Tool(Request):
    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.parameters()}}

    def parameters(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class FunctionName(Request):
    name: str


class NamedTool(Request):
    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(Request):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The answer is held to the schema in any case.")


class ResponseFormat(Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong("json_schema", "must be given with the type json_schema, and with no other")
        return self


class Conversation(Request):
    """What becomes a prompt by the chat template."""

    tools: list[Tool] | None = Field(None, max_length=128)
    chat_template: NonEmpty | None = Field(None, description="Used instead of the model's own, if the server allows that.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("names", "must have different names")
        return tools


class ChatRequest(Conversation, SamplingRequest):
    messages: list[Message] = Field(min_length=1)
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool,
            _one_complaint('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: NonEmpty | None = Field(None, description="For the chat template, if it has a use for it.")
    safety_identifier: str | None = Field(None, max_length=512, description="Written to the access log, as user is.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    UNSUPPORTED = {
        "audio": NOTHING,
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": NOTHING,
        "prediction": NOTHING,
        "prompt_cache_key": NOTHING,
        "prompt_cache_options": NOTHING,
        "prompt_cache_retention": NOTHING,
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": NOTHING,
        "web_search_options": NOTHING,
    }

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise _wrong("max_tokens", "must not differ from max_completion_tokens, of which it is the old name")
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", "is only allowed when logprobs is true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise _wrong("tool_choice", "is only allowed with tools")
        if isinstance(self.tool_choice, NamedTool) and self.named_tool() is None:
            raise _wrong("tool_choice", "must name one of the tools")
        return self

    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    def named_tool(self) -> Tool | None:
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return next((tool for tool in self.tools or () if tool.function.name == name), None)


class TokenizeRequest(Conversation):
    """A prompt as it is, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Of a prompt: what the tokenizer adds to plain text.")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "must be given, or messages, and not both")
        if self.messages is not None and self.add_special_tokens is not None:
            raise _wrong("add_special_tokens", "is for a prompt; the chat template writes its own")
        for field in Conversation.model_fields:
            if self.prompt is not None and getattr(self, field) is not None:
                raise _wrong(field, "is for messages")
        return self


class DetokenizeRequest(Request):
    model: str | None = None
    tokens: TokenIds
