"""Applies the chat template of a request, in a process of the engine's trial_process.py, which loads this file alone.

A template can loop without an end, multiply texts until the memory is full, and raise numbers to powers that keep the
interpreter's lock for hours. The sandbox of jinja2 forbids none of that.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_REASON = 400  # characters of an error


def prepare(given: dict[str, Any]) -> Callable[[bytes], bytes]:
    """The function takes a template, messages, tools and variables, and returns the text or an error, in JSON.

    given: max_chars, the characters that a prompt can have; one more than these is returned at most
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template([[]], chat_template="")  # loads jinja2
    max_chars = given["max_chars"]

    def work(request: bytes) -> bytes:
        asked = json.loads(request)
        try:
            rendered: Any = render_jinja_template(
                [asked["messages"]],
                asked["tools"],
                chat_template=asked["template"],
                add_generation_prompt=True,
                **asked["variables"],
            )
        except MemoryError:
            raise
        except Exception as error:  # what a client's program can raise
            return json.dumps({"error": f"{error!s:.{MAX_REASON}}"}).encode()
        [text], _ = rendered  # of one conversation, and where its answers are
        return json.dumps({"text": text[: max_chars + 1]}).encode()

    return work
