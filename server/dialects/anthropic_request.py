"""What clients send to /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API.

A request becomes a ChatRequest: `system` is its first message, a `tool_result` is a message of the role tool, and `tool_use`
and `thinking` blocks are fields of the assistant's message. The texts of several blocks are joined by line breaks, except for
the assistant's, which are joined without them. Images are parts of a message of the user or of the role tool. If the last
message is one of the assistant, the answer continues its text. Coding agents always send `cache_control`, a budget for thoughts
and an effort; docs/api.md says what the server does with these. Documents, citations and server tools are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic_core import to_json

from ..chat.conversation import (
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from ..images.addresses import MAX_HEAD, media_type_of
from ..schemas import NonEmpty
from ..strict import NOTHING, StrictModel, Unsupported, field_error, known_parts
from .dialect import Translated, by_type, message

CacheControl = Annotated[
    dict[str, Any] | None, Field(description="Accepted, but has no effect: prefixes are cached for every request.")
]


class TextBlock(StrictModel):
    type: Annotated[Literal["text"], known_parts("text")]
    text: str
    cache_control: CacheControl = None

    UNSUPPORTED: ClassVar[Unsupported] = {"citations": ([],)}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True


def _media_type(value: Any) -> Any:
    """The media type, read as in a data URI, because clients write image/jpg as well."""
    return media_type_of(value[:MAX_HEAD]) if isinstance(value, str) else value


class ImageSource(StrictModel):
    type: Literal["base64", "url"]
    media_type: (
        Annotated[Literal["image/png", "image/jpeg", "image/webp", "image/gif"], BeforeValidator(_media_type)] | None
    ) = None
    data: NonEmpty | None = None
    url: NonEmpty | None = None

    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_type(self) -> ImageSource:
        for field, value in (("data", self.data), ("media_type", self.media_type), ("url", self.url)):
            if (value is not None) != (self.type == ("url" if field == "url" else "base64")):
                raise field_error(field, f"must {'' if value is None else 'not '}be given with the type {self.type}")
        return self

    def address(self) -> str:
        return self.url or f"data:{self.media_type};base64,{self.data}"


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl = None

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Not checked.")

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: NonEmpty
    name: NonEmpty
    input: dict[str, Any]
    cache_control: CacheControl = None

    UNSUPPORTED: ClassVar[Unsupported] = {"caller": ({"type": "direct"},), "toolset_name": NOTHING}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    by_type("must be text or image, because this server supports no other blocks in a tool_result"),
]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: NonEmpty
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="If true, the content is prefixed with `Error: `.")
    cache_control: CacheControl = None

    UNSUPPORTED: ClassVar[Unsupported] = {"toolset_name": NOTHING}
    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    def message(self) -> Message:
        """The equivalent message of the role tool."""
        content = self.content if isinstance(self.content, str) else _content(self.content or [])
        if self.is_error:
            mark = "Error: "
            content = mark + content if isinstance(content, str) else [{"type": "text", "text": mark}, *content]
        return message("tool", tool_call_id=self.tool_use_id, content=content)


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type("must be text, image, thinking, tool_use or tool_result, because this server supports no other blocks"),
]
Texts = str | Annotated[list[TextBlock], Field(fail_fast=True)]
ALLOWED = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}  # types of blocks by the role of their message


class Turn(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]

    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_blocks(self) -> Turn:
        allowed = ALLOWED[self.role]
        for number, block in enumerate(self._blocks()):
            if block.type not in allowed:
                raise field_error(f"content[{number}].type", f"must be {' or '.join(allowed)} in {self.role} messages")
        return self

    def _blocks(self) -> list[Any]:
        return [] if isinstance(self.content, str) else self.content

    def messages(self) -> list[Message]:
        """The equivalent messages of a chat."""
        if isinstance(self.content, str):
            return [message(self.role, content=self.content)]
        if self.role == "assistant":
            return [self._assistant()]
        messages: list[Message] = []
        parts: list[TextBlock | ImageBlock] = []
        for block in self.content:
            if isinstance(block, TextBlock | ImageBlock):
                parts.append(block)
                continue
            if parts:
                messages.append(message(self.role, content=_content(parts)))
                parts = []
            assert isinstance(block, ToolResultBlock)  # by _check_blocks
            messages.append(block.message())
        if parts:
            messages.append(message(self.role, content=_content(parts)))
        return messages

    @property
    def can_be_continued(self) -> bool:
        """Whether this turn is a message of the assistant that the answer can continue."""
        kinds = ["text"] if isinstance(self.content, str) else [block.type for block in self.content]
        return self.role == "assistant" and "text" in kinds and "tool_use" not in kinds

    def image_places(self, place: str) -> list[str]:
        """The places of this turn's images, in the order of `messages`. place: the place of this turn in the request"""
        return _image_places(self._blocks(), f"{place}.content")

    def _assistant(self) -> Message:
        by_kind: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
        for block in self._blocks():
            by_kind[block.type].append(block)
        calls = [
            ToolCall(
                id=block.id,
                type="function",
                function=CalledFunction(name=block.name, arguments=to_json(block.input).decode()),
            )
            for block in by_kind["tool_use"]
        ]
        return message(
            "assistant",
            content="".join(block.text for block in by_kind["text"]),
            tool_calls=calls or None,
            reasoning_content="\n".join(block.thinking for block in by_kind["thinking"]) or None,
        )


class ToolDefinition(StrictModel):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(None, description="Inputs always stream as the model writes them.")
    cache_control: CacheControl = None

    UNSUPPORTED: ClassVar[Unsupported] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)
        return Tool(type="function", function=function)


class ToolSelection(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolSelection:
        if (self.type == "tool") != (self.name is not None):
            raise field_error("name", "must be given with the type tool, and with no other type")
        return self

    def choice(self) -> ToolChoice:
        if self.name is not None:
            return NamedTool(type="function", function=FunctionName(name=self.name))
        choices: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
        return choices[self.type]


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, description="Accepted, but has no effect.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Thoughts are returned in full unless this is `omitted`."
    )


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template if it reads reasoning_effort."
    )
    format: OutputFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = Field(None, max_length=512, description="Written to the access log.")


class CountTokensRequest(Translated):
    model: str
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: Texts | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = Field(None, description="Passed to the chat template if it reads enable_thinking.")
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None

    UNSUPPORTED: ClassVar[Unsupported] = {
        "container": NOTHING,
        "context_management": NOTHING,
        "diagnostics": NOTHING,
        "inference_geo": NOTHING,
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": NOTHING,
        "workspace_id": NOTHING,
    }

    @model_validator(mode="after")
    def _check_last(self) -> CountTokensRequest:
        last = self.messages[-1]
        if last.role == "assistant" and not last.can_be_continued:
            raise field_error("messages", "may end with an assistant message only if it has text and no tool_use")
        return self

    def translated(self) -> ChatRequest:
        return ChatRequest(**self._chat_fields())

    def image_places(self) -> list[str]:
        return [place for number, turn in enumerate(self.messages) for place in turn.image_places(f"messages[{number}]")]

    def _chat_fields(self) -> dict[str, Any]:
        messages = [message("system", content=_text(self.system))] if self.system else []
        for turn in self.messages:
            messages += turn.messages()
        chosen = self.tool_choice
        output = self.output_config and self.output_config.format
        schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": output.schema_}} if output else None
        goes_on = self.messages[-1].can_be_continued
        return {
            "model": self.model,
            "messages": messages,
            "tools": [definition.tool() for definition in self.tools or ()],
            "tool_choice": chosen and chosen.choice(),
            "parallel_tool_calls": False if chosen and chosen.disable_parallel_tool_use else None,
            "response_format": schema and ResponseFormat.model_validate(schema),
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
        }


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, description="Lowered to what the model's context has room for.")
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=16, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = None
    metadata: Metadata | None = None

    @property
    def user(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id

    def translated(self) -> ChatRequest:
        return ChatRequest(
            **self._chat_fields(),
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
        )


def _image_places(blocks: Sequence[Any], place: str) -> list[str]:
    """The places of the images in these blocks and in the tool results among them. place: the place of the list"""
    places = []
    for number, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            places.append(f"{place}[{number}].source.{'url' if block.source.url else 'data'}")
        elif isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
            places += _image_places(block.content or (), f"{place}[{number}].content")
    return places


def _content(blocks: list[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """The content of a chat's message: one text, or parts if there are images."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return _text(texts)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": {"url": block.source.address()}}
        for block in blocks
    ]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
