"""Finds out which form of a message's content a chat template reads: one string, or a list of parts.

    forms = find_forms(lambda groups: first_showing(render, groups, PROBE_FORMS))
    message.rendered(in_parts=forms.in_parts("user"))

Most templates expect a string and write it unchanged. Those of LLaVA and SmolVLM iterate over the parts of a content, and write
nothing for a string: its text would be lost without an error. So each template is tried with a probe word in both forms, for
each role, because some templates take a string for one role and parts for another. If a template writes the string of a role,
that role gets strings, so nothing changes for text-only templates. If a template writes the word in neither form, for example
because it does not know the role, the role gets the form of the user's messages.

A content with images is always a list of parts. `has_image_places` tells whether a template writes something for an image of
the user, and `TOOL_IMAGES` shows whether it writes the images of a tool's result.
Only the results are kept: what a template writes for a probe may be as long as a prompt (template_process.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

PROBE = "Xylophone"
"""A word that occurs in no chat template."""
PROBE_FORMS = (PROBE, PROBE.upper(), PROBE.lower())
"""How a template may have written it."""
CALL_ID = "probe0000"
"""Nine letters and digits, as the templates of Mistral require."""
Conversation = list[dict[str, Any]]
FirstShowing = Callable[[Sequence[Sequence[Conversation]]], Sequence[int | None]]
"""Returns for each group the index of the first conversation whose probe word a template writes, or None."""


class ContentForms(NamedTuple):
    """parts: by role, whether the content is a list of parts; the entry of "user" also holds for roles without an entry"""

    parts: dict[str, bool]

    def in_parts(self, role: str) -> bool:
        return self.parts.get(role, self.parts["user"])

    def content(self, role: str, text: str) -> str | list[dict[str, Any]]:
        """A text as the content of a message of this role."""
        return _content(text, self.in_parts(role))


FORMS = tuple(product((False, True), (False, True)))
"""Whether the content of the probed message is a list of parts, and whether those of the other messages are. Strings come
first, so that a role gets strings if a template writes them."""
STRINGS = ContentForms({"user": False})


def shows_probe(text: str | None) -> bool:
    """Whether the output of a template contains the probe word in one of its forms."""
    return text is not None and any(word in text for word in PROBE_FORMS)


def find_forms(first_showing: FirstShowing) -> ContentForms:
    """The forms that a template reads."""
    found = first_showing([_conversations(role) for role in CONVERSATIONS])
    parts = {"user": False}
    for role, number in zip(CONVERSATIONS, found, strict=True):
        if number is not None:
            parts[role], _ = FORMS[number]
    return ContentForms(parts)


def has_image_places(render: Callable[[Conversation], str | None]) -> bool:
    """Whether a template writes something other than white space for an image in a message of the user.

    A template that expects a string writes the list of parts, which is no place for an image.

    render: returns None for a conversation that the template refuses
    """
    text = {"type": "text", "text": PROBE}
    for others in (False, True):
        written, without = (render(_of_user("Hello", others, [*images, text])) or "" for images in ([{"type": "image"}], []))
        adds = "".join(written.split()) != "".join(without.split())
        if written and adds and WRITTEN_PART.search(written) is None:
            return True
    return False


def _conversations(role: str) -> list[Conversation]:
    """Conversations with the probe word in a message of this role, one for each of `FORMS`."""
    return [CONVERSATIONS[role]("Hello", others, _content(PROBE, in_parts)) for in_parts, others in FORMS]


def _content(text: str, in_parts: bool) -> str | list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if in_parts else text


def _of_user(text: str, others: bool, content: Any) -> Conversation:
    """There is no other message here, so `others` adds a system message, which some templates require."""
    system = [{"role": "system", "content": _content(text, isinstance(content, list))}] if others else []
    return [*system, {"role": "user", "content": content}]


def _of_system(text: str, others: bool, content: Any) -> Conversation:
    return [{"role": "system", "content": content}, {"role": "user", "content": _content(text, others)}]


def _of_assistant(text: str, others: bool, content: Any) -> Conversation:
    asked = {"role": "user", "content": _content(text, others)}
    return [asked, {"role": "assistant", "content": content}, asked]


def _of_tool(text: str, others: bool, content: Any) -> Conversation:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
    return [
        {"role": "user", "content": _content(text, others)},
        {"role": "assistant", "content": _content("", others), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": content},
    ]


CONVERSATIONS: dict[str, Callable[[str, bool, Any], Conversation]] = {
    "user": _of_user,
    "system": _of_system,
    "assistant": _of_assistant,
    "tool": _of_tool,
}
TOOL_IMAGES = [_of_tool("Hello", others, [{"type": "image"}]) for others in (False, True)]
"""Conversations with an image in the result of a tool."""
WRITTEN_PART = re.compile(r"""(?i)['"]type['"]""")
"""What a template writes that takes a list of parts for a string, as Python or as JSON."""
