"""Generated text as the fields of a chat message, which are thoughts, content and tool calls, for streams and plain replies.

    reader = MessageReader(thoughts, tools)
    delta = reader.read("<think>Hm")            # {"reasoning_content": "Hm"}
    thoughts, pieces = reader.pieces(text)      # the same with contents and calls in the model's order
    message = reader.whole(text)                # from a reader that has read nothing yet

The reader of reasoning.py takes the thoughts out of the text, and the reader of tools.py takes the calls out of the rest.
"""

from __future__ import annotations

from typing import Any

from ..replies import ToolCallDelta
from .reasoning import ThoughtReader
from .tool_call import new_call
from .tools import Piece, ToolReader


class MessageReader:
    """The reader of one answer.

    thoughts:  reader of the thoughts, or None if there are none
    tools:     reader of the calls, or None if there are none
    function:  name of the function if the whole answer is the arguments of one call
    id_length: characters of that call's id, None for OpenAI's form
    """

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
        self._function_begun = False

    def read(self, text: str, last: bool = False) -> dict[str, Any]:
        """The delta with what is certain by now. With `last`, it has everything that is left."""
        thoughts, pieces = self.pieces(text, last)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if not isinstance(piece, str)]
        delta = {"reasoning_content": thoughts, "content": content, "tool_calls": calls}
        return {name: value for name, value in delta.items() if value}

    def pieces(self, text: str, last: bool = False) -> tuple[str, list[Piece]]:
        """The thoughts that are certain by now, and what follows them as the pieces of tools.py. `last`: as in `read`"""
        thoughts = ""
        if self._thoughts is not None:
            thoughts, text = self._thoughts.read(text, last)
        if self._tools is not None:
            return thoughts, self._tools.read(text, last)
        if not text:
            return thoughts, []
        return thoughts, [text if self._function is None else self._arguments(self._function, text)]

    def whole(self, text: str) -> dict[str, Any]:
        """The message of a plain reply."""
        delta = self.read(text, last=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        return {"role": "assistant", "content": None if delta else "", "refusal": None} | delta

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: "tool_calls" if the model has called tools, but "stop" if the request named the function."""
        called = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if reason == "stop" and called else reason

    def _arguments(self, function: str, text: str) -> ToolCallDelta:
        call: ToolCallDelta = {"index": 0, "function": {"arguments": ""}}
        if not self._function_begun:
            call = new_call(0, function, self._id_length)
        self._function_begun = True
        call["function"]["arguments"] = text
        return call
