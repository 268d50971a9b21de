"""What the dialects share: a request that becomes a ChatRequest, and a ChatAnswer that writes its answer in another form.

    class Request(Translated): def translated(self) -> ChatRequest: ...
    class Reply(DialectAnswer): ...
    for change, part, text in parts.read(thoughts, pieces): ...

A part of an answer is its thoughts, a text, or a tool call. `Parts` turns what the reader of chat/messages.py returns into
changes of parts, because both dialects announce each part, fill it, and close it before the next one begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Discriminator, PrivateAttr, ValidationError, model_validator
from pydantic_core import to_json

from fa_serve.engine import RequestOutput

from ..chat.answer import ChatAnswer
from ..chat.conversation import ChatRequest, Message
from ..chat.tools import Piece
from ..errors import ApiError, ParameterRefused, parameter_refused
from ..rules import rule_of
from ..service import Service
from ..strict import StrictModel, field_error


def by_type(rule: str, default: str | None = None) -> Discriminator:
    """The discriminator of a union whose members' Tags are their types' names in angle brackets.

    An object of another type gets one error with this rule.

    default: the type of an object without the field `type`
    """

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        # with angle brackets it is not an identifier, so the location of an error leaves it out
        return f"<{kind}>" if isinstance(kind, str) else "<>"

    return Discriminator(tag, custom_error_type="unknown_type", custom_error_message=rule)


def message(role: str, **fields: Any) -> Message:
    return Message.model_validate({"role": role} | fields)


class Translated(StrictModel):
    """A request that becomes a ChatRequest during its validation, so a thread translates it if it is large."""

    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> Translated:
        try:
            self._chat = self.translated()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            context = first.get("ctx", {})
            field = context.get("field") or str(first["loc"][0])
            raise field_error(field, context.get("rule") or rule_of(first)) from None
        self._chat.place_images(self.image_places())
        return self

    @property
    def chat(self) -> ChatRequest:
        return self._chat

    def translated(self) -> ChatRequest:
        """The equivalent request for chat completions. Raises a custom error of pydantic, which names the field."""
        raise NotImplementedError

    def image_places(self) -> list[str]:
        """The fields of this request that hold the images of the ChatRequest, in the order of those images."""
        raise NotImplementedError


@dataclass
class Part:
    """A part of an answer.

    number:         its index among the parts of the answer
    identity, name: the id and the function's name, for a call
    text:           its text so far; for a call, the arguments
    """

    kind: Literal["thoughts", "text", "call"]
    number: int
    identity: str = ""
    name: str = ""
    text: str = ""


Change = tuple[Literal["begin", "more", "end"], Part, str]


class Parts:
    """The parts of one answer. `read` gives the changes that an output makes; a change "more" carries the new text."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open = False

    def read(self, thoughts: str, pieces: Sequence[Piece]) -> Iterator[Change]:
        if thoughts:
            yield from self._text("thoughts", thoughts)
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._text("text", piece)
                continue
            if "id" in piece:
                yield from self._begin(Part("call", len(self.all), piece["id"], piece["function"]["name"]))
            yield from self._more(piece["function"]["arguments"])

    def end(self) -> Iterator[Change]:
        """Close the last part."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""

    def _text(self, kind: Literal["thoughts", "text"], text: str) -> Iterator[Change]:
        if not self._open or self.all[-1].kind != kind:
            yield from self._begin(Part(kind, len(self.all)))
        yield from self._more(text)

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self.end()
        self.all.append(part)
        self._open = True
        yield "begin", replace(part), ""  # a copy, which does not get the text that follows

    def _more(self, text: str) -> Iterator[Change]:
        if text:
            self.all[-1].text += text
            yield "more", self.all[-1], text


class DialectAnswer(ChatAnswer):
    """The answer to a request of a dialect.

    FIELDS: by field of a ChatRequest, its name in the dialect if that is different; used in errors
    _parts: the parts of the answer, which has only one choice
    _changes: the changes that the newest output has made to the parts
    _num_thought_tokens: the number of tokens generated before the first part that is not thoughts
    """

    FIELDS: ClassVar[dict[str, str]]
    event_begin = b"event: "
    stream_end = b""

    def __init__(self, request: Translated, service: Service, key: str | None):
        self._parts = Parts()
        self._changes: list[Change] = []
        self._num_thought_tokens = 0
        with self._renamed():
            super().__init__(request.chat, service, key)

    @contextmanager
    def _renamed(self) -> Iterator[None]:
        """Inside this context, errors name the fields of the dialect."""
        try:
            yield
        except ParameterRefused as error:
            raise parameter_refused(error.cause, self.FIELDS.get(error.field, error.field)) from None
        except ApiError as error:
            error.param = self.FIELDS.get(error.param or "", error.param)
            raise

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        with self._renamed():
            async with aclosing(super()._outputs()) as outputs:
                async for index, output in outputs:
                    self._read(output)
                    yield index, output

    def _constraints(self) -> dict[str, dict[str, Any]]:
        return {self.FIELDS.get(field, field): kinds for field, kinds in super()._constraints().items()}

    def _variables(self) -> dict[str, Any]:
        """Whether to think, and how much, are wishes: they are passed only to a chat template that reads such a variable."""
        wishes = {"enable_thinking": self._wants_thoughts(), "reasoning_effort": self._wanted_effort()}
        given = {name: value for name, value in wishes.items() if value is not None and self._template.reads(name)}
        return super()._variables() | given

    @abstractmethod
    def _wants_thoughts(self) -> bool | None: ...

    @abstractmethod
    def _wanted_effort(self) -> str | None: ...

    def _read(self, output: RequestOutput) -> None:
        self._changes = list(self._parts.read(*self._reader(0).pieces(output.text, output.finished)))
        if self._parts.all and all(part.kind == "thoughts" for part in self._parts.all):
            self._num_thought_tokens = output.num_output_tokens
        if output.finished:
            self._changes += self._parts.end()


def event(name: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event without "event: " at its beginning and without the empty line at its end."""
    return name.encode() + b"\ndata: " + to_json({"type": name} | dict(fields))
