"""Which form of a message's content a chat template reads: one string, or a list of parts.

    forms = find_forms(lambda conversations: [render(each) for each in conversations])
    message.rendered(in_parts=forms.in_parts("user"))

Most templates write a content as it is and expect a string. Those of LLaVA and SmolVLM go through the parts of a content, and
write nothing for a string: its text would be lost without an error. So a template is tried with a probe word in both forms,
once for each role, since some take a string for one role and parts for another one. A role whose string is written keeps it,
so nothing changes for templates of texts. A template that writes the word in neither form, such as one that has no such role,
gets the form of the user's messages.

A content with images is a list of parts in any case. Whether the images of a tool's result are written is tried here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

PROBE = "Xylophone"
"""A word that stands in no chat template."""
CALL_ID = "probe0000"
"""Of nine letters and digits, which the templates of Mistral ask for."""
Conversation = list[dict[str, Any]]
RenderAll = Callable[[Sequence[Conversation]], Sequence[str | None]]
"""What a template makes of each conversation; None if it refuses it."""


class ContentForms(NamedTuple):
    """parts:       by role, whether a content is a list of parts; "user" stands for roles that are not there
    tool_images: what the template writes for an image in a result of a tool, each with other text around it
    """

    parts: dict[str, bool]
    tool_images: tuple[str, ...] = ()

    def in_parts(self, role: str) -> bool:
        return self.parts.get(role, self.parts["user"])

    def content(self, role: str, text: str) -> str | list[dict[str, Any]]:
        """A text as the content of a message of this role."""
        return _content(text, self.in_parts(role))


STRINGS = ContentForms({"user": False})


def shows_probe(text: str | None) -> bool:
    """Whether the probe word is in what a template has written, in capital letters or not."""
    return text is not None and PROBE.lower() in text.lower()


def find_forms(render_all: RenderAll) -> ContentForms:
    """The forms that a template reads."""
    tried = [(role, in_parts, found) for role in CONVERSATIONS for in_parts, found in _trials(role)]
    with_image = [CONVERSATIONS["tool"]("Hello", others, [{"type": "image"}]) for others in (False, True)]
    texts = render_all([*(found for _, _, found in tried), *with_image])
    shown = {(role, in_parts) for (role, in_parts, _), text in zip(tried, texts, strict=False) if shows_probe(text)}
    parts = {"user": ("user", True) in shown and ("user", False) not in shown}
    for role in CONVERSATIONS:
        if (role, False) in shown or (role, True) in shown:
            parts[role] = (role, False) not in shown
    return ContentForms(parts, tuple(filter(None, texts[len(tried) :])))


def _trials(role: str) -> Iterator[tuple[bool, Conversation]]:
    """Conversations with the probe word in a message of this role, as a string and in parts. So are the other messages."""
    for in_parts, others in product((False, True), (False, True)):
        yield in_parts, CONVERSATIONS[role]("Hello", others, _content(PROBE, in_parts))


def _content(text: str, in_parts: bool) -> str | list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if in_parts else text


def _of_user(text: str, others: bool, content: Any) -> Conversation:
    """Some templates want a message of the system first, which the second form of the others has."""
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
