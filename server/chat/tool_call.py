"""A single tool call, parsed one character at a time.

parser = CallParser()
for character in '{"name": "add", "arguments": {"a": 1}}':
    parser.feed(character)
parser.name, parser.take_arguments(), parser.complete       # "add", '{"a": 1}', True
"""

from __future__ import annotations

import json
import uuid

from ..replies import ToolCallDelta

KEYS = {"name", "arguments", "parameters", "type", "id"}
ARGUMENT_KEYS = ("arguments", "parameters")


class CallParser:
    """Parses {"name": ..., "arguments": ...}, or only the arguments if the name is known already.

    Raises ValueError at the first character that shows that the text is not a call. The arguments are kept exactly as the model
    writes them. Some models wrap them in a string; then they are the content of the string.

    name:      the tool's name, once it has been read
    announced: for the use of `ToolReader`: whether the first delta of this call has been made
    complete:  whether the call's last character has been read
    """

    def __init__(self, name: str | None = None):
        self.name = name
        self.announced = False
        self.complete = False
        self._only_arguments = name is not None
        self._key = "" if name is None else "arguments"
        self._closers = [] if name is None else ["}"]  # the closing brackets of all open brackets, the innermost last
        self._quoted = False
        self._escaped = False
        self._item: list[str] = []  # the characters of the key or value of the call's own object that is being read
        self._first = ""  # the first of these characters that is not white space
        self._arguments: list[str] | None = None
        self._num_taken = 0

    def take_arguments(self) -> str:
        """The characters that the arguments have gained since the last call of this method."""
        new = (self._arguments or [])[self._num_taken :]
        self._num_taken += len(new)
        return "".join(new)

    def feed(self, character: str) -> None:
        depth = len(self._closers)
        quoted = self._quoted
        self._track_nesting(character)
        if depth == 0:
            return
        if depth == 1 and not quoted and character in ":,}":
            self._end_item(character)
            return
        if not self._first and not character.isspace():
            self._first = character
        if self._key in ARGUMENT_KEYS and self._first in ("{", "["):
            if depth > 1 or len(self._closers) > 1:
                if self._arguments is None:
                    self._arguments = []
                self._arguments.append(character)
            self.complete = self._only_arguments and len(self._closers) == 1
            return
        self._item.append(character)
        if not self._key and self._first not in ("", '"'):
            raise ValueError("a key must be a string")

    def _track_nesting(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
        elif character in "}]":
            if self._closers[-1:] != [character]:
                raise ValueError(f"unexpected {character}")
            self._closers.pop()

    def _end_item(self, character: str) -> None:
        key = self._key
        item = "".join(self._item)
        self._key = ""
        self._item = []
        self._first = ""
        if character == ":":
            self._begin_value(key, json.loads(item))
        elif key == "name":
            name = json.loads(item)
            if not isinstance(name, str) or not name:
                raise ValueError("a name must be a string")
            self.name = name
        elif key in ARGUMENT_KEYS:
            if self._arguments is None:
                self._arguments = [_scalar_arguments(item)]
        elif item.strip():
            json.loads(item)
        if character == "}":
            if self.name is None:
                raise ValueError("a call must have a name")
            self._arguments = ["{}"] if self._arguments is None else self._arguments
            self.complete = True

    def _begin_value(self, previous: str, key: str) -> None:
        repeated = key in ARGUMENT_KEYS and self._arguments is not None
        if previous or key not in KEYS or repeated:
            raise ValueError(f"unexpected {key}")
        self._key = key


def _scalar_arguments(item: str) -> str:
    """Arguments that are neither an object nor a list: the content of a string, {} for null, other values as they are."""
    value = json.loads(item)
    if isinstance(value, str):
        return value
    return "{}" if value is None else item.strip()


def new_call(index: int, name: str, id_length: int | None = None) -> ToolCallDelta:
    """The delta that begins a call. `id_length`: characters of its id, None for OpenAI's form."""
    identity = uuid.uuid4().hex[:id_length] if id_length else f"call_{uuid.uuid4().hex[:24]}"
    return {"index": index, "id": identity, "type": "function", "function": {"name": name, "arguments": ""}}
