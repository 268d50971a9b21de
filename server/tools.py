"""Tool calls in a model's text, in the formats that chat templates teach, found as the text comes.

    reader = ToolReader(FORMATS["hermes"], offered=["add"])
    content, calls = reader.read('<tool_call>{"name": "add", "arguments": {"a"')
    content, calls = reader.read(': 1}}</tool_call>', last=True)

`calls` are deltas as OpenAI streams them: the first of a call has its id and name, the arguments follow as the model writes
them, character by character and unchanged. What is found does not depend on where the text was cut: a plain reply is the sum
of its stream. Text that looked like a call and is none becomes content. White space around calls is nobody's.

Formats: hermes, which Qwen uses too: <tool_call>{"name": ..., "arguments": ...}</tool_call>, one after the other; llama3_json:
{"name": ..., "parameters": ...} at the very start of the answer or after <|python_tag|>, several apart by ";"; mistral:
[TOOL_CALLS] and a list of such objects, or name[ARGS]{...}. Left out: formats that are not JSON, and what holds a model to
one of these (grammar.py).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from .reasoning import held_back
from .replies import ToolCallDelta

KEYS = {"name", "arguments", "parameters", "type", "id"}


@dataclass(frozen=True)
class ToolFormat:
    """opening:   what calls begin with; empty: the answer is nothing but calls
    closing:   what they end with, if with anything
    bare:      an object at the very start of an answer may be a call as well, of a tool that was offered
    named:     a call may be its name followed by its arguments
    id_length: characters of an id, where the template checks that
    """

    opening: str
    closing: str = ""
    bare: bool = False
    named: bool = False
    id_length: int | None = None


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", named=True, id_length=9),
}
REQUIRED = ToolFormat("")  # what a forced tool_choice makes a model write


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, None if it is none of ours."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return FORMATS["hermes"]
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return FORMATS["llama3_json"]
    return None


class ToolReader:
    """One answer's calls. `offered`: the tools' names; `single`: calls after the first are left out; `num_calls`: so far."""

    HEADER = re.compile(r"([\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}")

    def __init__(self, style: ToolFormat, offered: Collection[str], single: bool = False):
        self._style = style
        self._offered = offered
        self._single = single
        self._step = self._start if style.bare else self._outside if style.opening else self._between
        self._text = ""  # not looked at yet
        self._raw: str | None = ""  # looked at, and content if it turns out to be no call; None between calls
        self._space = ""  # content if more content follows
        self._marked = False  # a marker has been seen
        self._after_call = False  # and no content yet
        self._call = _Call()
        self._content = ""
        self._deltas: list[ToolCallDelta] = []
        self.num_calls = 0

    def read(self, text: str, last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Content and calls that are certain by now; with `last`, all that is left."""
        self._text += text
        self._content = ""
        self._deltas = []
        while self._text and self._step():
            pass
        if last:
            self._say((self._raw or "") + self._text)
            self._content += "" if self.num_calls else self._space
            self._text = self._raw = self._space = ""
        return self._content, self._deltas

    # Each step looks at the beginning of the text, and says whether to go on: not if more text must decide what it is.

    def _start(self) -> bool:
        beginning = self._text.lstrip()
        if beginning.startswith("{"):
            self._raw = self._text[: -len(beginning)]
            self._text = beginning
            self._step = self._between
        elif beginning:
            self._step = self._outside
        return bool(beginning)

    def _outside(self) -> bool:
        opening = self._style.opening
        found = self._text.find(opening) if opening else -1
        known = found if found >= 0 else len(self._text) - held_back(self._text, opening)
        self._say(self._text[:known])
        self._text = self._text[known:]
        if found >= 0:
            self._raw = self._space + opening
            self._space = ""
            self._text = self._text[len(opening) :]
            self._step = self._between
            self._marked = True
        return found >= 0

    def _between(self) -> bool:
        """Among calls: before, between or after them."""
        for marker in filter(None, (self._style.closing, self._style.opening)):
            if self._text.startswith(marker):
                self._text = self._text[len(marker) :]
                self._marked = True
                self._keep(marker)
                if marker == self._style.closing:
                    self._give_up()
                return True
            if marker.startswith(self._text):
                return False
        first = self._text[0]
        if first.isspace() or first in "[],;":
            self._keep(first)
            self._text = self._text[1:]
        elif first == "{":
            self._call = _Call()
            self._step = self._inside
            self._raw = self._raw or ""
        else:
            header, brace, _ = self._text.partition("{")
            match = self.HEADER.fullmatch(header) if self._style.named and brace else None
            if match:
                self._raw = (self._raw or "") + header
                self._text = self._text[len(header) :]
                self._call = _Call(match[1])
                self._step = self._inside
            elif self._style.named and not brace and re.fullmatch(r"[\w.\-\[\]\s]{1,256}", header):
                return False
            else:
                self._give_up()
        return True

    def _inside(self) -> bool:
        call = self._call
        for position, letter in enumerate(self._text):
            try:
                call.feed(letter)
                if call.name is not None and not call.announced:
                    if not self._marked and self._style.bare and call.name not in self._offered:
                        raise ValueError(f"no tool is called {call.name}")
                    self._begin(call)
            except ValueError:
                self._text = self._text[position:]
                self._give_up()
                return True
            if call.announced:
                self._argue(call.take())
            else:
                self._keep(letter)
            if call.complete:
                self._text = self._text[position + 1 :]
                self._step = self._between
                return True
        self._text = ""
        return False

    def _give_up(self) -> None:
        """What is between markers ends here; if it was no call it is content."""
        raw = self._raw or ""
        self._raw = ""
        self._step = self._outside
        self._say(raw)

    def _keep(self, text: str) -> None:
        if self._raw is not None:
            self._raw += text

    def _say(self, text: str) -> None:
        text = self._space + text
        text = text.lstrip() if self._after_call else text
        kept = text.rstrip()
        self._content = self._content + kept
        self._space = text[len(kept) :]
        self._after_call = self._after_call and not kept

    def _begin(self, call: _Call) -> None:
        call.announced = True
        self._raw = None
        self._after_call = True
        self.num_calls += 1
        if self.num_calls == 1 or not self._single:
            self._deltas.append(new_call(self.num_calls - 1, str(call.name), self._style.id_length))

    def _argue(self, text: str) -> None:
        index = self.num_calls - 1
        if not text or (index and self._single):
            return
        if not self._deltas or self._deltas[-1]["index"] != index:
            self._deltas.append({"index": index, "function": {"arguments": ""}})
        self._deltas[-1]["function"]["arguments"] += text


def new_call(index: int, name: str, id_length: int | None = None) -> ToolCallDelta:
    """The delta that a call begins with."""
    identity = uuid.uuid4().hex[:id_length] if id_length else f"call_{uuid.uuid4().hex[:24]}"
    return {"index": index, "id": identity, "type": "function", "function": {"name": name, "arguments": ""}}


class _Call:
    """Reads {"name": ..., "arguments": ...}, or the arguments of a name that is known, a character at a time.

    ValueError: it is no call. Arguments are taken as they are, unless they are a string, which some models wrap them in.
    """

    def __init__(self, name: str | None = None):
        self.name = name
        self.announced = False
        self.complete = False
        self._alone = name is not None
        self._key = "arguments" if name is not None else ""
        self._closers = "}" if name is not None else ""  # of the brackets that are open
        self._quoted = self._escaped = False
        self._item = ""  # a key or a value of the object itself
        self._arguments: str | None = None
        self._taken = 0

    def take(self) -> str:
        """What the arguments have gained since the last time."""
        new = (self._arguments or "")[self._taken :]
        self._taken += len(new)
        return new

    def feed(self, letter: str) -> None:
        depth = len(self._closers)
        quoted = self._quoted
        if self._escaped:
            self._escaped = False
        elif quoted:
            self._escaped = letter == "\\"
            self._quoted = letter != '"'
        elif letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._closers += "}" if letter == "{" else "]"
        elif letter in "}]":
            if not self._closers.endswith(letter):
                raise ValueError(f"unexpected {letter}")
            self._closers = self._closers[:-1]
        if depth == 0:
            return
        if depth == 1 and not quoted and letter in ":,}":
            self._end_item(letter)
            return
        self._item += letter
        if self._key in ("arguments", "parameters") and self._item.lstrip()[:1] in ("{", "["):
            if depth > 1 or len(self._closers) > 1:
                self._arguments = (self._arguments or "") + letter
            self._item = self._item.lstrip()[:1]
            self.complete = self._alone and len(self._closers) == 1
        elif not self._key and self._item.strip() and self._item.lstrip()[0] != '"':
            raise ValueError("a key must be a string")

    def _end_item(self, letter: str) -> None:
        key = self._key
        item = self._item
        self._key = ""
        self._item = ""
        if letter == ":":
            self._key = json.loads(item)
            if key or self._key not in KEYS or (self._key in ("arguments", "parameters") and self._arguments is not None):
                raise ValueError(f"unexpected {self._key}")
        elif key == "name":
            self.name = json.loads(item)
            if not isinstance(self.name, str) or not self.name:
                raise ValueError("a name must be a string")
        elif key in ("arguments", "parameters"):
            if self._arguments is None:
                value = json.loads(item)
                self._arguments = value if isinstance(value, str) else item.strip() if value is not None else "{}"
        elif item.strip():
            json.loads(item)
        if letter == "}":
            if self.name is None:
                raise ValueError("a call must have a name")
            self._arguments = "{}" if self._arguments is None else self._arguments
            self.complete = True
