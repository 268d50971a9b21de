"""Applies the chat template of a request in a process of fa_serve/sandbox/trial_process.py, which loads only this file.

A template can loop forever, multiply texts until the memory is full, and raise numbers to powers that hold the interpreter's
lock for hours. The sandbox of jinja2 prevents none of this.

`bound_output` and `first_showing` also serve the templates of models and operators, which templates.py applies in the server's
process, because the output of any template may be much longer than its input.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_REASON = 400  # characters of an error


class OutputTooLongError(Exception):
    """The template has written more characters than a prompt can have."""


def bound_output(text: str, max_chars: int) -> None:
    """Make transformers' compiled form of this template stop as soon as it has written more than `max_chars` characters.

    jinja2 joins what a template, a macro or a block has written with the function `concat` of its environment. Each compiled
    template has its own environment.
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
    """For each group of conversations, the index of the first one whose text contains one of the words; None if there is none.

    A text may be as long as a prompt, so it is dropped before the next one is written. Conversations after the first one with a
    word are not rendered.

    render: returns the text that the template makes of a conversation; None if the template refuses it
    """

    def shows(conversation: Any) -> bool:
        text = render(conversation)
        return text is not None and any(word in text for word in words)

    return [next((number for number, each in enumerate(group) if shows(each)), None) for group in groups]


def prepare(given: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the function that trial_process.py calls for each request. Requests and replies are JSON.

    A request has a template, messages, tools, variables and the `end` (`PromptEnd` of conversation.py). The reply has the text,
    an error, or the error `invalid` of a template that is refused for any messages. A request with `groups` of conversations
    and `words` instead of messages and tools gets the result of `first_showing`.

    given: max_chars, the most characters that a prompt can have; in place of a longer text, the reply has null
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template([[]], chat_template="")  # loads jinja2
    from jinja2 import TemplateSyntaxError

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
        except TemplateSyntaxError as error:
            return {"invalid": f"{error!s:.{MAX_REASON}}"}
        except Exception as error:  # whatever a client's template raises
            return {"error": f"{error!s:.{MAX_REASON}}"}
        [text], _ = rendered  # the text of the one conversation, and where its answers are
        return {"text": text}

    def work(request: bytes) -> bytes:
        asked = json.loads(request)
        if "groups" in asked:
            found = first_showing(lambda each: render(each, asked).get("text"), asked["groups"], asked["words"])
            return json.dumps({"found": found}).encode()
        return json.dumps(render(asked["messages"], asked)).encode()

    return work
