"""Chat templates: conversations become prompts, and a template's own text says what it can do.

    template = Template(tokenizer, text)
    if template.takes("tools"): ...
    prompt = template.render(messages, tools, {"enable_thinking": False})

Whatever a template would leave out without a word is refused here: tools, tool calls, names, variables that it does not know.
transformers renders it, in jinja2's sandbox. Left out: which template is used (service.py).
"""

from __future__ import annotations

import inspect
import re
from functools import cached_property
from typing import Any

import jinja2

from .errors import BadRequest
from .reasoning import CLOSING
from .tools import ToolFormat, detect_format

NAMES = re.compile(r"""message(\.name|\[['"]name['"]|\.get\(['"]name['"])""")
RESERVED = {"conversation", "messages", "self", "tools"}
# what a template can raise over a conversation or a variable of another kind than it expects
FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Template:
    def __init__(self, tokenizer: Any, text: str):
        self._render = tokenizer.apply_chat_template
        self._text = text

    @cached_property
    def _names(self) -> set[str]:
        try:
            return {value for _, kind, value in jinja2.Environment().lex(self._text) if kind == "name"}
        except jinja2.TemplateSyntaxError as error:
            raise BadRequest(f"The chat template is not valid: {error}.", param="chat_template") from None

    def takes(self, variable: str) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self._names

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        return detect_format(self._text)

    @cached_property
    def thinks(self) -> bool:
        return CLOSING in self._text

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]) -> str:
        """The prompt, up to where the assistant speaks. Raises BadRequest, which names the field."""
        if tools and not self.takes("tools"):
            raise BadRequest("This model's chat template has no use for tools.", param="tools", code="unsupported_parameter")
        for message in messages:
            if "name" in message and not NAMES.search(self._text):
                raise BadRequest("This model's chat template has no use for names.", param="messages")
            if ("tool_calls" in message or message["role"] == "tool") and "tool_calls" not in self._text:
                raise BadRequest("This model's chat template has no use for tool calls.", param="messages")
        reserved = RESERVED | inspect.signature(self._render).parameters.keys() if variables else RESERVED
        if unknown := [name for name in variables if name in reserved or not self.takes(name)]:
            raise BadRequest(f"{unknown[0]!r} is not a variable of the chat template.", param="chat_template_kwargs")
        try:
            return str(
                self._render(messages, tools, chat_template=self._text, tokenize=False, add_generation_prompt=True, **variables)
            )
        except FAILURES as error:
            raise BadRequest(f"The chat template refuses these messages: {error}.", param="messages") from None
