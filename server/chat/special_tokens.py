"""The names of special tokens in a client's texts stay texts, whatever a chat template does with them.

    tokens = SpecialTokens(["<|im_start|>", "<|im_end|>"])
    prompt = tokens.apply(render, messages, tools, variables)
    ids = reader.encode(prompt.text, False, plain=prompt.plain)

A special token that a template writes begins a turn or ends it. If a user's message could hold one, it could forge a turn of
the system. A tokenizer cannot tell the two apart, because it gets one text, and a template may take a message apart and join
it again. Therefore the conversation is rendered a second time, in which the characters with which special tokens begin are
replaced by others in the client's texts. What is a special token in this prompt as well, the template has written. All others
that are in the first prompt are the client's.

A conversation without such characters is rendered once. If the template decides by these characters, so that the two prompts
differ, the first one is used as long as both have the same special tokens. A message's role is left as it is: templates make
special tokens of it, and it has no other characters than letters, digits and ".", "_" and "-".

Left out: tokens that a tokenizer does not call special, such as <tool_call> of some models; and prompts without a template,
which are texts of the client in which special tokens are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..errors import BadRequest

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Render = Callable[[Messages, Tools, dict[str, Any]], str]
STAND_INS = range(0xF0000, 0x10FFFE)
"""Characters for private use, of which some replace those with which special tokens begin."""
PIECE = 1 << 16
"""Characters of a text that are searched at once."""
KINDS = ("text", "image")
"""Types of parts of a message, which no client writes."""
ALPHABET = 0x400
"""Of the stand-ins, those that are used together."""


class Prompt(NamedTuple):
    """plain: where the text has names of special tokens that are no special tokens, as (begin, end), in order"""

    text: str
    plain: tuple[tuple[int, int], ...] = ()


class SpecialTokens:
    """names: of the special tokens; those of a single character cannot be told from a text and are left out"""

    def __init__(self, names: Iterable[str]):
        known = {name for name in names if len(name) > 1}
        self._firsts = sorted({name[0] for name in known})
        self._longest = max(map(len, known), default=0)
        self._pattern = re.compile(_any_of(known) if known else "(?!)")

    def apply(self, render: Render, messages: Messages, tools: Tools, variables: dict[str, Any]) -> Prompt:
        """The prompt that `render` makes of a conversation. Raises what it raises, and BadRequest."""
        text = render(messages, tools, variables)
        texts = list(_texts_of([messages, tools, variables]))
        present = [first for first in self._firsts if any(first in each for each in texts)]
        if not present:
            return Prompt(text)
        forward, back = _stand_ins(present, texts)

        def replaced(value: Any) -> Any:
            return _replaced(value, forward)

        hidden = render(
            [{name: value if name == "role" else replaced(value) for name, value in each.items()} for each in messages],
            replaced(tools),
            replaced(variables),
        )
        written = list(self._find(hidden))
        shown = _replaced(hidden, back)
        if shown != text:
            if [found[0] for found in self._find(text)] == [found[0] for found in written]:
                return Prompt(text)
            text = shown
        own = {found.span() for found in written}
        return Prompt(text, tuple(found.span() for found in self._find(text) if found.span() not in own))

    def _find(self, text: str) -> Iterator[re.Match[str]]:
        """The names in a text, from left to right. A search is a call in C, so a long text is searched in pieces."""
        position = 0
        while position < len(text):
            end = position + PIECE
            found = self._pattern.search(text, position, end + self._longest)
            if found is None or found.start() >= end:
                position = end
            else:
                yield found
                position = found.end()


def _texts_of(value: Any) -> Iterator[str]:
    """The texts in a JSON value, keys of objects included."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value
            values += value.values()
        elif isinstance(value, list):
            values += value


def _stand_ins(characters: list[str], texts: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What replaces each character, and the other way round. None of the replacements is in the texts."""
    for begin in STAND_INS[::ALPHABET]:
        forward = {character: chr(begin + number) for number, character in enumerate(characters)}
        if not any(stand_in in text for text in texts for stand_in in forward.values()):
            return forward, {stand_in: character for character, stand_in in forward.items()}
    raise BadRequest("messages must leave some of Unicode's characters for private use unused.", param="messages")


def _replaced(value: Any, replacements: dict[str, str]) -> Any:
    """The JSON value with other characters. Letters in keys stay, because templates know the names of fields and types."""
    if isinstance(value, str):
        for character, other in replacements.items():
            value = value.replace(character, other)
        return value
    if isinstance(value, dict):
        in_keys = {character: other for character, other in replacements.items() if not character.isalnum()}
        return {
            _replaced(key, in_keys): each if key == "type" and each in KINDS else _replaced(each, replacements)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_replaced(each, replacements) for each in value]
    return value


def _any_of(names: Iterable[str]) -> str:
    """A regular expression for the longest of these names, in which common beginnings are tried once.

    A model may have a thousand special tokens, and a text a million characters with which they begin.
    """
    tree: dict[str, Any] = {}
    for name in names:
        branch = tree
        for character in name:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _branches(tree)


def _branches(tree: dict[str, Any]) -> str:
    """What may follow in this branch."""
    only = ""
    while len(tree) == 1 and "" not in tree:
        [(character, tree)] = tree.items()
        only += re.escape(character)
    parts = [re.escape(character) + _branches(branch) for character, branch in tree.items() if character]
    if not parts:
        return only
    return f"{only}(?:{'|'.join(parts)}){'?' if '' in tree else ''}"
