"""Applies the chat template of a request, in a process of the engine's trial_process.py, which loads this file alone.

A template can loop without an end, multiply texts until the memory is full, and raise numbers to powers that keep the
interpreter's lock for hours. The sandbox of jinja2 forbids none of that.

`bound_output` and `first_showing` are for the templates of models and operators as well, which templates.py applies in the
server's process: their output may be much longer than what they get.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_REASON = 400  # characters of an error


class OutputTooLongError(Exception):
    """The template has written more characters than a prompt can have."""


def bound_output(text: str, max_chars: int) -> None:
    """Let transformers' compiled form of this template stop as soon as it has written more characters.

    jinja2 joins what a template, a macro or a block has written with the function `concat` of its environment, which is one
    for each compiled template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def concat(parts: Iterable[str]) -> str:
        written = []
        length = 0
        for part in parts:
            length += len(part)
            if length > max_chars:
                raise OutputTooLongError
            written.append(part)
        return "".join(written)

    _compile_jinja_template(text).environment.concat = concat  # compiled once and kept by transformers


def first_showing(
    render: Callable[[Any], str | None], groups: Sequence[Sequence[Any]], words: Sequence[str]
) -> list[int | None]:
    """Of each group of conversations, the number of the first one in whose text a word is; None if there is none.

    A text may be as long as a prompt: it is gone before the next one is written, and what follows the first is not written.
    render: what the template makes of a conversation; None if it refuses it
    """

    def shows(conversation: Any) -> bool:
        text = render(conversation)
        return text is not None and any(word in text for word in words)

    return [next((number for number, each in enumerate(group) if shows(each)), None) for group in groups]


def prepare(given: dict[str, Any]) -> Callable[[bytes], bytes]:
    """The function takes a template, messages, tools, variables and the `end` (`PromptEnd` of conversation.py), and returns the
    text or an error, in JSON. With `groups` of conversations and `words` in the place of messages and tools it returns what
    `first_showing` finds.

    given: max_chars, the characters that a prompt can have; a longer text is null
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template([[]], chat_template="")  # loads jinja2
    max_chars = given["max_chars"]

    def render(messages: Any, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            bound_output(asked["template"], max_chars)
            rendered: Any = render_jinja_template(
                [messages],
                asked.get("tools"),
                chat_template=asked["template"],
                **asked["end"],
                **asked["variables"],
            )
        except MemoryError:
            raise
        except OutputTooLongError:
            return {"text": None}
        except Exception as error:  # what a client's program can raise
            return {"error": f"{error!s:.{MAX_REASON}}"}
        [text], _ = rendered  # of one conversation, and where its answers are
        return {"text": text}

    def work(request: bytes) -> bytes:
        asked = json.loads(request)
        if "groups" in asked:
            found = first_showing(lambda each: render(each, asked).get("text"), asked["groups"], asked["words"])
            return json.dumps({"found": found}).encode()
        return json.dumps(render(asked["messages"], asked)).encode()

    return work
