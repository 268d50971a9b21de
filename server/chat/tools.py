"""Finds the tool calls in a model's text, in the formats that chat templates teach, while the text arrives.

    reader = ToolReader(FORMATS["hermes"], offered=["add"])
    pieces = reader.read('I add. <tool_call>{"name": "add", "arguments": {"a"')
    pieces = reader.read(': 1}}</tool_call>', last=True)

A piece is content, or a delta of a call as OpenAI streams it: the first delta of a call has its id and name, the following ones
have the arguments, character by character and unchanged. Pieces are in the order in which the model has written them. The
result does not depend on where the text is cut, so a plain reply equals the sum of its stream. Text that looks like a call but
is not one becomes content. White space around calls is dropped.

Formats:
- hermes, which Qwen uses too: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them
- llama3_json: {"name": ..., "parameters": ...} at the very start of the answer or after <|python_tag|>, separated by ";"
- mistral: [TOOL_CALLS] and a list of such objects, or name[ARGS]{...}

Formats that are not JSON are not supported. grammar.py makes a model keep to one of these formats.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

from ..replies import ToolCallDelta
from .reasoning import held_back
from .tool_call import CallParser, new_call


@dataclass(frozen=True)
class ToolFormat:
    """
    opening:   the marker before calls; empty if the whole answer consists of calls
    closing:   the marker after a call, or empty
    bare:      whether an object at the very start of an answer may also be a call, if it names an offered tool
    named:     whether a call may be the tool's name followed by the arguments
    id_length: characters of a call's id, if the chat template checks their number
    """

    opening: str
    closing: str = ""
    bare: bool = False
    named: bool = False
    id_length: int | None = None


Piece = str | ToolCallDelta
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", named=True, id_length=9),
}
REQUIRED = ToolFormat("")  # what the grammar of a forced tool_choice makes a model write


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, or None if it is not one of `FORMATS`."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return FORMATS["hermes"]
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return FORMATS["llama3_json"]
    return None


class ToolReader:
    """The calls of one answer.

    offered:   the names of the tools
    single:    calls after the first are left out
    num_calls: calls that have begun so far, including those left out

    The reader is a state machine. Each state is a method that looks at the beginning of the text that has not been read. It
    returns False if more text is needed to decide what the beginning is. Each character is read once and copied only a few
    times, because a model may write a hundred thousand markers.
    """

    NAMED_HEADER = re.compile(r"([\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}")
    PARTIAL_HEADER = re.compile(r"[\w.\-\[\]\s]{1,256}")
    MAX_HEADER = 256

    def __init__(self, tool_format: ToolFormat, offered: Collection[str], single: bool = False):
        self._format = tool_format
        self._offered = offered
        self._single = single
        if tool_format.bare:
            self._state = self._read_start
        elif tool_format.opening:
            self._state = self._read_content
        else:
            self._state = self._read_between_calls
        self._text = ""
        self._position = 0  # in `_text`: what comes before it has been read
        self._raw: list[str] | None = []  # read, and content if it is not a call; None from an announced call to the next
        self._space: list[str] = []  # white space that is content if more content follows
        self._marked = False  # a marker has been seen
        self._after_call = False  # a call has ended and no content has followed
        self._call = CallParser()
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def read(self, text: str, last: bool = False) -> list[Piece]:
        """The pieces that are certain by now. With `last`, everything that is left."""
        self._text = self._text[self._position :] + text
        self._position = 0
        self._pieces = []
        while self._position < len(self._text) and self._state():
            pass
        if last:
            if self._format.opening:  # otherwise what is left is a call that was cut off before its name
                self._add_content("".join(self._raw or ()) + self._text[self._position :])
            if not self.num_calls:
                self._pieces += self._space
            self._text = ""
            self._position = 0
            self._raw = []
            self._space = []
        return _joined(self._pieces)

    def _advance(self, end: int) -> str:
        """Read the text up to this position."""
        begin = self._position
        self._position = end
        return self._text[begin:end]

    def _read_start(self) -> bool:
        text = self._text
        begin = self._position
        while begin < len(text) and text[begin].isspace():
            begin += 1
        self._keep(self._advance(begin))
        if begin == len(text):
            return False
        if text[begin] == "{":
            self._state = self._read_between_calls
        else:
            self._end_group()
        return True

    def _read_content(self) -> bool:
        opening = self._format.opening
        found = self._text.find(opening, self._position) if opening else -1
        certain = found
        if found < 0:
            end = self._text[max(self._position, len(self._text) - len(opening)) :]
            certain = len(self._text) - held_back(end, opening)
        self._add_content(self._advance(certain))
        if found >= 0:
            self._raw = [*self._space, self._advance(found + len(opening))]
            self._space = []
            self._state = self._read_between_calls
            self._marked = True
        return found >= 0

    def _read_between_calls(self) -> bool:
        """Before the first call of a group, between its calls, or after its last."""
        position = self._position
        for marker in filter(None, (self._format.closing, self._format.opening)):
            if self._text.startswith(marker, position):
                self._keep(self._advance(position + len(marker)))
                self._marked = True
                if marker == self._format.closing:
                    self._end_group()
                return True
            if len(self._text) - position < len(marker) and marker.startswith(self._text[position:]):
                return False
        first = self._text[position]
        if first.isspace() or first in "[],;":
            self._keep(self._advance(position + 1))
            return True
        if first == "{":
            self._call = CallParser()
            self._state = self._read_call
            if self._raw is None:
                self._raw = []
            return True
        return self._read_named_header()

    def _read_named_header(self) -> bool:
        """A call that begins with its name, if the format has such calls; otherwise the group ends here."""
        if not self._format.named:
            self._end_group()
            return True
        begin = self._position
        brace = self._text.find("{", begin, begin + self.MAX_HEADER)
        match = self.NAMED_HEADER.fullmatch(self._text, begin, brace) if brace >= 0 else None
        if match:
            if self._raw is None:
                self._raw = []
            self._keep(self._advance(brace))
            self._call = CallParser(match[1])
            self._state = self._read_call
        elif brace < 0 and self.PARTIAL_HEADER.fullmatch(self._text, begin):
            return False
        else:
            self._end_group()
        return True

    def _read_call(self) -> bool:
        call = self._call
        text = self._text
        for position in range(self._position, len(text)):
            try:
                call.feed(text[position])
                if call.name is not None and not call.announced:
                    self._begin_call(call, call.name)
            except ValueError:
                self._take_in(position)
                self._end_group()
                return True
            if call.complete:
                self._take_in(position + 1)
                self._state = self._read_between_calls
                return True
        self._take_in(len(text))
        return False

    def _take_in(self, end: int) -> None:
        """Read the text up to `end`, which was fed to the call. Before the call is announced, this text is kept; after that, it
        adds to the arguments.
        """
        self._keep(self._advance(end))
        if self._call.announced:
            self._add_arguments(self._call.take_arguments())

    def _end_group(self) -> None:
        """The text between markers ends here. If it was no call, it is content."""
        raw = "".join(self._raw or ())
        self._raw = []
        self._state = self._read_content
        self._add_content(raw)

    def _keep(self, text: str) -> None:
        if self._raw is not None:
            self._raw.append(text)

    def _add_content(self, text: str) -> None:
        if self._after_call:  # then `_space` is empty
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._pieces += [*self._space, kept]
            self._space = []
            self._after_call = False
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _begin_call(self, call: CallParser, name: str) -> None:
        if not self._marked and self._format.bare and name not in self._offered:
            raise ValueError(f"no tool is called {name}")
        call.announced = True
        self._raw = None
        self._after_call = True
        self.num_calls += 1
        if self.num_calls == 1 or not self._single:
            self._pieces.append(new_call(self.num_calls - 1, name, self._format.id_length))

    def _add_arguments(self, text: str) -> None:
        index = self.num_calls - 1
        if not text or (index and self._single):
            return
        newest = self._pieces[-1] if self._pieces else ""
        if isinstance(newest, str) or newest["index"] != index:
            newest = {"index": index, "function": {"arguments": ""}}
            self._pieces.append(newest)
        newest["function"]["arguments"] += text


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces with each run of contents as one. Joining them as they arrive would copy a long text many times."""
    found: list[Piece] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        members = list(group)
        found += ["".join(map(str, members))] if is_text else members
    return found
