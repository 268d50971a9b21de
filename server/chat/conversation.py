"""What clients send in a chat: messages, tools, and the fields of /v1/chat/completions and /tokenize.

`rendered()` gives the form that chat templates expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from fa_serve.engine.request.params import schema_length

from ..images.addresses import RequestImage
from ..schemas import NonEmpty, SamplingRequest
from ..strict import NOTHING, StrictModel, Unsupported, field_error, known_parts, one_error

MAX_ARGUMENTS = 1 << 17  # characters of the arguments of one call
MAX_CALLS = 1024
MARKUP = 32  # characters that a chat template adds to a message
IMAGE_ROLES = ("user", "tool")  # the roles whose messages may have images


class ImageUrl(StrictModel):
    url: NonEmpty = Field(
        description="A data URI of PNG, JPEG, WebP or GIF, or an https address if the server allows its host."
    )
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        None, description="Has no effect: the model's own processor decides the size."
    )

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class Part(StrictModel):
    type: Annotated[Literal["text", "image_url"], known_parts("text", "image_url")]
    text: str | None = None
    image_url: ImageUrl | None = None

    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_type(self) -> Part:
        for field, value in (("text", self.text), ("image_url", self.image_url)):
            if (self.type == field) != (value is not None):
                raise field_error(field, f"must be given with the type {field}, and with no other type")
        return self

    def rendered(self) -> dict[str, Any]:
        """The form that chat templates know."""
        return {"type": "image"} if self.text is None else {"type": "text", "text": self.text}


def _json_object(text: str, info: ValidationInfo) -> str:
    """JSON inside a text was not counted with the body. If the validation's context has a JsonTotal, it counts this text."""
    if info.context and "arguments" in info.context:
        info.context["arguments"].add(text)
    try:
        if isinstance(from_json(text or "{}"), dict):
            return text
    except ValueError:
        pass
    raise PydanticCustomError("arguments", "must be a JSON object")


Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS), AfterValidator(_json_object)]


class CalledFunction(StrictModel):
    name: NonEmpty
    arguments: Arguments

    PART_OF_A_CONVERSATION: ClassVar[bool] = True


class ToolCall(StrictModel):
    id: NonEmpty
    type: Literal["function"]
    function: CalledFunction

    PART_OF_A_CONVERSATION: ClassVar[bool] = True

    def length(self) -> int:
        return MARKUP + len(self.id) + len(self.function.name) + len(self.function.arguments)

    def rendered(self) -> dict[str, Any]:
        """Templates expect the arguments as an object, not as text."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


class Message(StrictModel):
    role: str = Field(
        pattern=r"^[a-zA-Z0-9_.-]{1,64}$",
        description="system, developer, user, assistant, tool, or another role that the chat template supports.",
    )
    content: str | Annotated[list[Part], Field(min_length=1, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="Passed to the chat template, which may omit earlier thoughts.")

    PART_OF_A_CONVERSATION: ClassVar[bool] = True
    UNSUPPORTED: ClassVar[Unsupported] = {"annotations": ([],), "audio": NOTHING, "function_call": NOTHING, "refusal": NOTHING}

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise field_error("content", "must be given unless there are tool_calls")
        if self.images() and self.role not in IMAGE_ROLES:
            got = f"got the role {self.role!r}"
            raise field_error("content", f"may have images only in messages of the roles user and tool, {got}")
        for field in ("tool_calls", "reasoning_content"):
            if getattr(self, field) and self.role != "assistant":
                raise field_error(field, "is only allowed in assistant messages")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise field_error("tool_call_id", "must be given with the role tool, and with no other role")
        return self

    def length(self) -> int:
        """About how many characters a chat template gets of this message: all of its texts count."""
        content = self.content or ""
        texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
        length = MARKUP + sum(map(len, texts))
        for text in (self.name, self.tool_call_id, self.reasoning_content):
            length += len(text or "")
        return length + sum(call.length() for call in self.tool_calls or ())

    @property
    def last_text(self) -> str | None:
        """The text with which its content ends; None if there is none."""
        return self.content[-1].text if isinstance(self.content, list) else self.content

    @property
    def role_of_template(self) -> str:
        """The name of the role that chat templates know."""
        return "system" if self.role == "developer" else self.role

    def images(self) -> list[tuple[int, str]]:
        """The index and the address of each part that is an image, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [(number, part.image_url.url) for number, part in enumerate(self.content) if part.image_url is not None]

    def rendered(self, in_parts: bool = False) -> dict[str, Any]:
        """The form that chat templates know. The role developer becomes system, its older name.

        Without images, the content is one string; with images, it is a list of parts.

        in_parts: whether the content is always a list of parts, for a chat template that takes no string
        """
        content = self.content or ""
        rendered: str | list[dict[str, Any]]
        if isinstance(content, str):
            rendered = [{"type": "text", "text": content}] if in_parts else content
        elif in_parts or self.images():
            rendered = [part.rendered() for part in content]
        else:
            rendered = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {"role": self.role_of_template, "content": rendered}
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        return message


class Function(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; without one the function has no parameters.")
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.parameters()}}

    def length(self, limit: int) -> int:
        """About how many characters a chat template gets of this tool. Counting stops above the limit."""
        return len(self.function.name) + len(self.function.description or "") + schema_length(self.parameters(), limit)

    def parameters(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The answer follows the schema whether or not this is true.")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error("json_schema", "must be given with the type json_schema, and with no other type")
        return self


class PromptEnd(NamedTuple):
    """Where the prompt of a conversation ends, as arguments of transformers' `apply_chat_template`."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TemplateFields(StrictModel):
    """The fields that the chat template turns into a prompt, in addition to the messages."""

    _image_places: list[str] | None = PrivateAttr(None)  # if the client has sent the request in the form of another API

    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    chat_template: NonEmpty | None = Field(None, description="Replaces the model's chat template, if the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the start of the assistant's turn. Default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of starting a new one. Requires add_generation_prompt: false."
    )

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("names", "must have different names")
        return tools

    @property
    def prompt_end(self) -> PromptEnd:
        return PromptEnd(self.add_generation_prompt is not False, bool(self.continue_final_message))

    def check_prompt_end(self, messages: Sequence[Message]) -> None:
        """Raise an error for fields that contradict each other, and for a last message that cannot be continued."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt is not False:
            raise field_error("continue_final_message", "is only allowed when add_generation_prompt is false")
        if messages[-1].tool_calls or messages[-1].last_text is None:
            raise field_error("continue_final_message", "is only allowed when the last message ends with text")

    def place_images(self, places: list[str]) -> None:
        """Set where the images of this request are in the request that the client has sent."""
        self._image_places = places

    def request_images(self, messages: Sequence[Message]) -> list[RequestImage]:
        """The images of these messages, in order."""
        found = [
            RequestImage(url, f"messages[{index}].content[{number}].image_url.url", message.role == "tool")
            for index, message in enumerate(messages)
            for number, url in message.images()
        ]
        if self._image_places is None:
            return found
        return [each._replace(place=place) for each, place in zip(found, self._image_places, strict=True)]


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    one_error('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


class ChatRequest(TemplateFields, SamplingRequest):
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: NonEmpty | None = Field(
        None, description="Passed to the chat template. Refused if the template does not read it."
    )
    safety_identifier: str | None = Field(None, max_length=512, description="Written to the access log, like user.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    UNSUPPORTED: ClassVar[Unsupported] = {
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
            raise field_error("max_tokens", "is the old name of max_completion_tokens and must not differ from it")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "is only allowed when logprobs is true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise field_error("tool_choice", "is only allowed with tools")
        if isinstance(self.tool_choice, NamedTool) and self.named_tool() is None:
            raise field_error("tool_choice", "must name one of the tools")
        self.check_prompt_end(self.messages)
        return self

    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    def named_tool(self) -> Tool | None:
        """The tool that `tool_choice` forces by its name, or None."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return next((tool for tool in self.tools or () if tool.function.name == name), None)


class TokenizeRequest(TemplateFields):
    """A prompt, or a conversation that the chat template turns into a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether the prompt gets the special tokens that the tokenizer adds to plain text."
    )
    return_token_strs: bool | None = Field(None, description="Adds token_strs, the tokens as the vocabulary writes them.")

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "must be given if messages is not, and must not be given together with it")
        if self.messages is not None and self.add_special_tokens is not None:
            raise field_error("add_special_tokens", "is only allowed with prompt, because chat templates write special tokens")
        for field in TemplateFields.model_fields:
            if self.prompt is not None and getattr(self, field) is not None:
                raise field_error(field, "is only allowed with messages")
        self.check_prompt_end(self.messages or ())
        return self
