"""A chat's answer: the text as the fields of a message, which are thoughts, content and tool calls, streamed or whole.

    reader = MessageReader(thoughts, tools)
    delta = reader.read("<think>Hm")            # {"reasoning_content": "Hm"}
    message = reader.whole(text)                # of a reader that has read nothing yet

The readers of reasoning.py and tools.py do the finding; `MessageReader` puts them in a row, `ChatAnswer` chooses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_serve.engine import RequestOutput, StructuredOutput

from .errors import BadRequest
from .generation import Answer
from .grammar import ANY_TEXT, calls, compose, rule
from .logprobs import for_chat
from .reasoning import OPENING, ThoughtReader, opened_by
from .replies import ToolCallDelta
from .sampling import Constraint
from .schemas import ChatRequest
from .service import Service
from .tools import FORMATS, REQUIRED, ToolReader, new_call


class MessageReader:
    """Of one answer. `function`: the answer is nothing but the arguments of this one (a template may want ids of a length)."""

    def __init__(
        self,
        thoughts: ThoughtReader | None = None,
        tools: ToolReader | None = None,
        function: str | None = None,
        id_length: int | None = None,
    ):
        self._thoughts = thoughts
        self._tools = tools
        self._function = function
        self._id_length = id_length
        self._named = False

    def read(self, text: str, last: bool = False) -> dict[str, Any]:
        """A delta of what is certain by now; with `last`, of all that is left."""
        thoughts = ""
        calls: list[ToolCallDelta] = []
        if self._thoughts is not None:
            thoughts, text = self._thoughts.read(text, last)
        if self._function is not None and text:
            call: ToolCallDelta = {"index": 0, "function": {"arguments": ""}}
            calls = [call if self._named else new_call(0, self._function, self._id_length)]
            calls[0]["function"]["arguments"], text, self._named = text, "", True
        if self._tools is not None:
            text, calls = self._tools.read(text, last)
        delta = {"reasoning_content": thoughts, "content": text, "tool_calls": calls}
        return {name: value for name, value in delta.items() if value}

    def whole(self, text: str) -> dict[str, Any]:
        delta = self.read(text, last=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        return {"role": "assistant", "content": None if delta else "", "refusal": None} | delta

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI says "stop" after the call of a function that was named in the request."""
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.num_calls else reason


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    _prompt_field = "messages"
    _body: ChatRequest

    def __init__(self, body: ChatRequest, service: Service, key: str | None):
        super().__init__(body, service, key)
        self._tools = body.offered_tools()
        self._readers = dict[int, MessageReader]()
        self._template = service.template(body, self._tools)
        chosen = service.settings.tool_call_parser
        self._format = self._template.tool_format if chosen == "auto" else FORMATS[chosen]
        held = self._constraint
        setting = service.settings.reasoning_parser
        self._free = bool(self._tools) and (held is None or held.field != "tool_choice")  # to call tools or not
        thinks = self._template.thinks if setting == "auto" else setting == "think"
        self._thinks = thinks and not (held and held.output.grammar)  # a grammar of the request's own has no place for it
        if self._free and held is None and any(tool.function.strict for tool in self._tools):
            self._constraint = Constraint("tools", ANY_TEXT)
        if self._free and held is not None and held.output.grammar is not None:
            raise BadRequest(f"{held.field} leaves no room for tools, unless tool_choice is none.", param=held.field)
        if self._free and self._format is None and self._template.takes("tools"):
            raise BadRequest(
                "This model's chat template does not tell how it writes tool calls; the operator can, with --tool-call-parser. "
                'Only tool_choice "required", or a named function, works without.',
                param="tools",
            )
        if body.reasoning_effort is not None and not self._template.takes("reasoning_effort"):
            raise BadRequest("This model's chat template has no use for it.", param="reasoning_effort")

    def _count(self) -> int:
        return 1

    async def _encode(self) -> list[list[int]]:
        variables = dict(self._body.chat_template_kwargs or {})
        if self._body.reasoning_effort is not None:
            variables["reasoning_effort"] = self._body.reasoning_effort
        tokens, self._text = await self._service.encode_chat(self._template, self._body, self._tools, variables)
        return [tokens]

    def _structured(self) -> StructuredOutput | None:
        """What is wanted alone if that is all there can be, else together with thoughts before it and calls in its place."""
        thoughts = opened_by(self._text) if self._thinks else False
        if self._constraint is None or (thoughts is False and not self._free):
            return super()._structured()
        rules: list[str] = []
        mark = self._service.special_tokens.get
        free_text = self._constraint.output is ANY_TEXT
        try:
            start = "" if free_text else "answer"
            rules = [] if free_text else [f"answer: {rule(self._constraint.output)}"]
        except ValueError as error:
            raise BadRequest(f"{self._constraint.field} is no JSON schema: {error}.", param=self._constraint.field) from None
        if self._free and self._format is not None:
            single = self._body.parallel_tool_calls is False
            called, more = calls(self._format, self._tools, single, mark, text=free_text)
            start = f"{start} | {called}" if start else called
            rules = rules + more
        return StructuredOutput(grammar=compose(start, rules, thoughts, mark))

    def _skip_special_tokens(self) -> bool | None:
        """In some vocabularies the markers of tool calls and thoughts are special tokens, which are no text otherwise."""
        markers = {self._format.opening} if self._free and self._format else set()
        markers |= {OPENING} if self._thinks else set()
        return False if markers & self._service.special_tokens.keys() else self._body.skip_special_tokens

    def _reader(self, index: int) -> MessageReader:
        if index not in self._readers:
            thoughts = ThoughtReader(opened_by(self._text)) if self._thinks else None
            named = self._body.named_tool()
            id_length = self._format.id_length if self._format else None
            tools = None
            if self._tools and named is None:
                style = self._format if self._free and self._format else replace(REQUIRED, id_length=id_length)
                offered = [tool.function.name for tool in self._tools]
                tools = ToolReader(style, offered, single=self._body.parallel_tool_calls is False)
            function = named.function.name if named is not None else None
            self._readers[index] = MessageReader(thoughts, tools, function, id_length)
        return self._readers[index]

    def _max_tokens(self) -> int | None:
        return self._body.max_completion_tokens or self._body.max_tokens

    def _default_max_tokens(self, room: int) -> int:
        return room

    def _logprobs(self) -> int | None:
        return (self._body.top_logprobs or 0) if self._body.logprobs else None

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = self._reader(index).whole(output.text)
        return self._common(index, output) | {"message": message}

    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        return reply | {"prompt_logprobs": self._prompt_scores(sums[0])}

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """All of them at the first: openai-python's reader of streams takes choices in their order only."""
        delta = {"role": "assistant", "content": ""}
        return [] if self._readers else [self._common(each) | {"delta": delta} for each in range(self._n)]

    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = self._reader(index).read(output.text, output.finished)
        return self._common(index, output) | {"delta": delta}

    def _common(self, index: int, output: RequestOutput | None = None) -> dict[str, Any]:
        common = super()._common(index, output)
        if output is not None:
            common["finish_reason"] = self._reader(index).finish_reason(output.finish_reason)
        if output is not None and output.logprobs:
            common["logprobs"] = {"content": for_chat(self._service.token_texts, output.logprobs), "refusal": None}
        return common
