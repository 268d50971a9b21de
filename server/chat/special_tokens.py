"""Keeps the names of special tokens in a client's texts plain text, whatever a chat template does with them.

    tokens = SpecialTokens(["<|im_start|>", "<|im_end|>"])
    prompt = tokens.apply(render, messages, tools, variables)
    ids = reader.encode(prompt.text, False, plain=prompt.plain)

A special token that a template writes begins or ends a turn. If a user's message could contain one, it could forge a system
turn. A tokenizer cannot tell the template's special tokens from the client's, because it gets one text, and a template may take
a message apart and join it again. Therefore the conversation is rendered a second time, with the first characters of special
tokens replaced by others in the client's texts. Special tokens that are also in this second prompt come from the template. All
other special tokens in the first prompt come from the client.

A conversation without such characters is rendered once. If a template's decisions depend on these characters, the two prompts
differ. The first prompt is then used if both have the same special tokens, and the second one otherwise, with the original
characters put back. A message's role is left unchanged: templates build special tokens from it, and it consists only of
letters, digits, ".", "_" and "-".

Left out: tokens that a tokenizer does not call special, such as <tool_call> of some models; and prompts without a template,
in which the client may use special tokens.
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
"""Private-use characters. Some of them replace the first characters of special tokens."""
PIECE = 1 << 16
"""Characters of a text that are searched at once."""
KINDS = ("text", "image")
"""Types of the parts of a message. The server writes them, not the client, so they are not replaced."""
ALPHABET = 0x400
"""The size of a set of stand-ins. A conversation uses those of one set."""


class Prompt(NamedTuple):
    """plain: (begin, end) of each name of a special token in the text that stays plain text, in order"""

    text: str
    plain: tuple[tuple[int, int], ...] = ()


class SpecialTokens:
    """names: the names of special tokens; a name of a single character cannot be told from text and is left out"""

    def __init__(self, names: Iterable[str]):
        known = {name for name in names if len(name) > 1}
        self._firsts = sorted({name[0] for name in known})
        self._longest = max(map(len, known), default=0)
        self._pattern = re.compile(_any_of(known) if known else "(?!)")

    def apply(self, render: Render, messages: Messages, tools: Tools, variables: dict[str, Any]) -> Prompt:
        """The prompt that `render` makes of a conversation. Raises what `render` raises, and BadRequest."""
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
    """The stand-in of each character, and the reverse mapping. No stand-in is in the texts.

    Raises BadRequest if there is no such set of stand-ins.
    """
    for begin in STAND_INS[::ALPHABET]:
        forward = {character: chr(begin + number) for number, character in enumerate(characters)}
        if not any(stand_in in text for text in texts for stand_in in forward.values()):
            return forward, {stand_in: character for character, stand_in in forward.items()}
    raise BadRequest(
        "messages must use fewer of Unicode's private-use characters, because the server needs some that are not in them.",
        param="messages",
    )


def _replaced(value: Any, replacements: dict[str, str]) -> Any:
    """The JSON value with replaced characters. Letters in keys stay, because templates know fields and types by their names."""
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
    """A regular expression that finds the longest of these names, and tries common prefixes only once.

    A model may have a thousand special tokens, and a text may have a million characters with which one of them begins.
    """
    tree: dict[str, Any] = {}
    for name in names:
        branch = tree
        for character in name:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _branches(tree)


def _branches(tree: dict[str, Any]) -> str:
    """The regular expression for what may follow in this branch."""
    only = ""
    while len(tree) == 1 and "" not in tree:
        [(character, tree)] = tree.items()
        only += re.escape(character)
    parts = [re.escape(character) + _branches(branch) for character, branch in tree.items() if character]
    if not parts:
        return only
    return f"{only}(?:{'|'.join(parts)}){'?' if '' in tree else ''}"
