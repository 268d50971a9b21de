"""What clients send to /v1/responses, OpenAI's Responses API, without state.

A request becomes a ChatRequest: `instructions` are its first message. Reasoning, a message of the assistant and function calls
that follow each other become one message of the assistant, and the output of a function becomes a message of the role tool.
Fields that need stored responses, such as `previous_response_id`, are refused; a client sends the whole conversation each time,
as it does with `store: false`. Images are parts of a message of the user or of the output of a function. Files, references to
items and the built-in tools are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, Tag, model_validator
from pydantic_core import to_json

from ..chat.conversation import (
    Arguments,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from ..schemas import NonEmpty
from ..strict import NOTHING, StrictModel, Unsupported, field_error, known_parts, one_error
from .dialect import Translated, by_type, message

MAX_RETURNED = 1 << 18  # bytes of the request's instructions, tools and schema that each response object may repeat
Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, Field(description="Has no effect.")]
Identity = Annotated[str | None, Field(description="Has no effect.")]


class ContentItem(StrictModel):
    type: Annotated[
        Literal["input_text", "output_text", "input_image"], known_parts("input_text", "output_text", "input_image")
    ]
    text: str | None = None
    image_url: NonEmpty | None = Field(None, description="As in /v1/chat/completions.")
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="Has no effect.")

    UNSUPPORTED: ClassVar[Unsupported] = {
        "annotations": ([],),
        "file_id": NOTHING,
        "logprobs": ([],),
        "prompt_cache_breakpoint": NOTHING,
    }
    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_type(self) -> ContentItem:
        is_image = self.type == "input_image"
        if (self.text is None) != is_image:
            raise field_error("text", "must be given with the types input_text and output_text, and with no other type")
        if (self.image_url is not None) != is_image:
            raise field_error("image_url", "must be given with the type input_image, and with no other type")
        return self

    def part(self) -> dict[str, Any]:
        """The equivalent part of a chat's message."""
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image_url", "image_url": {"url": self.image_url}}


ItemParts = str | Annotated[list[ContentItem], Field(min_length=1, fail_fast=True)]
OutputParts = str | Annotated[list[ContentItem], Field(fail_fast=True)]


class MessageItem(StrictModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemParts
    id: Identity = None
    status: Status = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Has no effect.")

    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_images(self) -> MessageItem:
        if self.role != "user" and _image_places(self.content, ""):
            raise field_error("content", f"may have images only in user messages, got the role {self.role!r}")
        return self


class FunctionCallItem(StrictModel):
    type: Literal["function_call"]
    call_id: NonEmpty
    name: NonEmpty
    arguments: Arguments
    id: Identity = None
    status: Status = None

    UNSUPPORTED: ClassVar[Unsupported] = {"async": (False,), "caller": ({"type": "direct"},), "namespace": NOTHING}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    def call(self) -> ToolCall:
        return ToolCall(id=self.call_id, type="function", function=CalledFunction(name=self.name, arguments=self.arguments))


class FunctionCallOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: NonEmpty
    output: OutputParts
    id: Identity = None
    status: Status = None

    UNSUPPORTED: ClassVar[Unsupported] = {"caller": ({"type": "direct"},), "name": NOTHING, "namespace": NOTHING}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class ReasoningItem(StrictModel):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = Field(None, description="Has no effect.")
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    id: Identity = None
    status: Status = None

    UNSUPPORTED: ClassVar[Unsupported] = {"encrypted_content": NOTHING}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    by_type(
        "must be message, function_call, function_call_output or reasoning, because this server supports no other items",
        default="message",
    ),
]
Input = Annotated[
    NonEmpty | Annotated[list[Item], Field(min_length=1, fail_fast=True)],
    Field(description="A string is treated as a user message."),
]


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Null means false.")

    UNSUPPORTED: ClassVar[Unsupported] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": NOTHING,
    }

    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)
        return Tool(type="function", function=function)


class ChosenFunction(StrictModel):
    type: Literal["function"]
    name: NonEmpty


FunctionChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunction,
    one_error('"none", "auto", "required" or {"type": "function", "name": ...}'),
]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The answer follows the schema whether or not this is true.")

    @model_validator(mode="after")
    def _check_type(self) -> TextFormat:
        for field, value in (("schema", self.schema_), ("name", self.name)):
            if (self.type == "json_schema") != (value is not None):
                raise field_error(field, "must be given with the type json_schema, and with no other type")
        return self

    def response_format(self) -> ResponseFormat:
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchemaFormat.model_validate({"name": self.name, "schema": self.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class TextConfig(StrictModel):
    format: TextFormat | None = None

    UNSUPPORTED: ClassVar[Unsupported] = {"verbosity": ("medium",)}


class Reasoning(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description=(
            "Passed to the chat template if it reads reasoning_effort. If it reads enable_thinking, that is false for none and "
            "true for other values."
        ),
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Has no effect: reasoning is returned in full, without a summary."
    )

    UNSUPPORTED: ClassVar[Unsupported] = {"context": ("auto",), "generate_summary": NOTHING, "mode": ("standard",)}


class ResponsesStreamOptions(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"include_obfuscation": (False,)}


class ResponsesRequest(Translated):
    _returned: dict[str, Any] = PrivateAttr()

    model: str
    input: Input
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Has no effect: reasoning is returned as plain text and may be sent back as plain text."
    )
    prompt_cache_key: str | None = Field(
        None, max_length=512, description="Returned, but has no effect: prefixes are cached for every request."
    )
    user: str | None = Field(None, max_length=512, description="Written to the access log.")
    safety_identifier: str | None = Field(None, max_length=512, description="Written to the access log, like user.")

    UNSUPPORTED: ClassVar[Unsupported] = {
        "access_programs": NOTHING,
        "background": (False,),
        "context_management": ([],),
        "conversation": NOTHING,
        "image": NOTHING,
        "max_tool_calls": NOTHING,
        "metadata": ({},),
        "moderation": NOTHING,
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
        "prompt_cache_options": NOTHING,
        "prompt_cache_retention": NOTHING,
        "service_tier": ("auto", "default"),
        "store": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    @model_validator(mode="after")
    def _check_stream(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "is only allowed when stream is true")
        return self

    @property
    def returned(self) -> dict[str, Any]:
        """The fields that come back with the response, as JSON."""
        return self._returned

    def translated(self) -> ChatRequest:
        fields = {"instructions", "reasoning", "text", "tool_choice", "tools"}
        self._returned = self.model_dump(mode="json", by_alias=True, include=fields)
        if len(to_json(self._returned)) > MAX_RETURNED:
            self._returned |= {"instructions": None, "text": None, "tools": None}
        chosen = self.tool_choice
        choice: ToolChoice | None
        if isinstance(chosen, ChosenFunction):
            choice = NamedTool(type="function", function=FunctionName(name=chosen.name))
        else:
            choice = chosen
        form = self.text and self.text.format
        translated: dict[str, Any] = {
            "messages": self._messages(),
            "tools": [each.tool() for each in self.tools or ()],
            "tool_choice": choice,
            "response_format": form and form.response_format(),
        }
        return ChatRequest(
            model=self.model,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            **translated,
        )

    def image_places(self) -> list[str]:
        places = []
        for number, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if isinstance(item, MessageItem):
                places += _image_places(item.content, f"input[{number}].content")
            elif isinstance(item, FunctionCallOutputItem):
                places += _image_places(item.output, f"input[{number}].output")
        return places

    def _messages(self) -> list[Message]:
        messages = [message("system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, message("user", content=self.input)]
        turn = AssistantTurn()
        for item in self.input:
            if turn.takes(item):
                continue
            messages += turn.end()
            if isinstance(item, MessageItem) and item.role != "assistant":
                messages.append(message(item.role, content=_content(item.content)))
            elif isinstance(item, FunctionCallOutputItem):
                messages.append(message("tool", tool_call_id=item.call_id, content=_content(item.output)))
            else:
                turn.takes(item)
        return messages + turn.end()


class AssistantTurn:
    """Collects the items of one message of the assistant: reasoning, then a text, then calls. Each of these may be absent."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._thoughts: list[str] = []  # joined only at the end, because joining thousands one by one is slow

    def takes(self, item: Any) -> bool:
        """Add the item if it belongs to the same message as the items before it. Return whether it does."""
        fields = self._fields
        if isinstance(item, ReasoningItem) and not {"content", "tool_calls"} & fields.keys():
            self._thoughts += [part.text for part in item.content or ()]
        elif isinstance(item, MessageItem) and item.role == "assistant" and not {"content", "tool_calls"} & fields.keys():
            fields["content"] = _text(item.content)
        elif isinstance(item, FunctionCallItem):
            fields.setdefault("tool_calls", []).append(item.call())
        else:
            return False
        return True

    def end(self) -> list[Message]:
        """The message in a list, which is empty if there is no message. Later items belong to another message."""
        fields = self._fields
        if self._thoughts:
            fields["reasoning_content"] = "".join(self._thoughts)
        self._fields = {}
        self._thoughts = []
        return [message("assistant", **{"content": ""} | fields)] if any(fields.values()) else []


def _image_places(content: str | list[ContentItem], place: str) -> list[str]:
    """The places of the images in a content. place: the place of the content in the request"""
    if isinstance(content, str):
        return []
    return [f"{place}[{number}].image_url" for number, part in enumerate(content) if part.image_url is not None]


def _text(content: str | list[ContentItem]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _content(content: str | list[ContentItem]) -> str | list[dict[str, Any]]:
    """The content of a chat's message: one text, or parts if there are images."""
    if isinstance(content, str) or all(part.image_url is None for part in content):
        return _text(content)
    return [part.part() for part in content]
