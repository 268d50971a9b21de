"""Chat templates turn conversations into prompts, and the text of a template tells what the template can do.

    template = Template(tokenizer, text)
    if template.reads("tools"): ...
    prompt = template.render(messages, tools, {"enable_thinking": False})

A template silently leaves out what it does not know: tools, tool calls, names, variables. Such a request is refused here.
transformers renders templates in jinja2's sandbox. Templates of requests are rendered in another process (template_process.py).
Which template a request gets is decided in tokenization.py.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cached_property
from typing import Any

import jinja2
from pydantic_core import to_json

from fa_serve.engine.trials import Trial

from ..errors import BadRequest
from .reasoning import CLOSING
from .template_process import MAX_REASON
from .tools import ToolFormat, detect_format

MESSAGE_NAME = re.compile(r"""message(\.name|\[['"]name['"]|\.get\(['"]name['"])""")
ROLES = {"system", "user", "assistant", "tool"}  # which every template knows or refuses
PROBE = "Goodbye"  # the content of a message whose end is looked for
RESERVED = {"conversation", "messages", "self", "tools"}
# what a template can raise for a conversation or a variable that is not of the kind that it expects
FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Template:
    def __init__(self, tokenizer: Any, text: str):
        self._tokenizer = tokenizer
        self._text = text

    @cached_property
    def names(self) -> set[str]:
        """The names in the template, variables and others. Finding them takes 0.1 s for a hostile template."""
        try:
            return {value for _, kind, value in jinja2.Environment().lex(self._text) if kind == "name"}
        except jinja2.TemplateSyntaxError as error:
            raise BadRequest(f"The chat template is not valid: {error}.", param="chat_template") from None

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self.names

    @cached_property
    def _reads_message_names(self) -> bool:
        return MESSAGE_NAME.search(self._text) is not None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        return detect_format(self._text)

    @cached_property
    def thinks(self) -> bool:
        return CLOSING in self._text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        trial: Trial | None = None,
    ) -> str:
        """The prompt, up to the point where the assistant's answer begins. Raises BadRequest, which names the field.

        trial: where the template runs, with TrialError if it takes too much; without one, it runs in this thread
        """
        if tools and not self.reads("tools"):
            raise BadRequest("This model's chat template does not support tools.", param="tools", code="unsupported_parameter")
        for message in messages:
            if "name" in message and not self._reads_message_names:
                raise BadRequest("This model's chat template does not support names in messages.", param="messages")
            if ("tool_calls" in message or message["role"] == "tool") and "tool_calls" not in self._text:
                raise BadRequest("This model's chat template does not support tool calls in messages.", param="messages")
        self._check_variables(variables)
        try:
            if trial is None:
                apply = self._tokenizer.apply_chat_template
                text = apply(messages, tools, chat_template=self._text, tokenize=False, add_generation_prompt=True, **variables)
            else:
                text = self._render_on_trial(messages, tools, variables, trial)
        except FAILURES as error:
            refusal = f"The chat template refuses these messages: {error!s:.{MAX_REASON}}."
            raise BadRequest(refusal, param="messages") from None
        prompt = str(text)
        _require_unusual_roles(messages, prompt)
        return prompt

    def closing(self) -> str:
        """What the template writes behind a message of the assistant; "" if it takes no such message."""
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self._tokenizer.apply_chat_template(messages, chat_template=self._text, tokenize=False)
        except FAILURES:
            return ""
        return str(text).rpartition(PROBE)[2] if PROBE in str(text) else ""

    def _render_on_trial(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any], trial: Trial
    ) -> str:
        given = {
            "template": self._text,
            "messages": messages,
            "tools": tools,
            "variables": self._tokenizer.special_tokens_map | variables,
        }
        reply = json.loads(trial.run(to_json(given)))
        if "error" in reply:
            raise jinja2.TemplateError(reply["error"])
        return str(reply["text"])

    def _check_variables(self, variables: dict[str, Any]) -> None:
        if not variables:
            return
        reserved = RESERVED | inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        for name in variables:
            if name in reserved or not self.reads(name):
                message = f"chat_template_kwargs must hold variables that the chat template reads, got {name!r}."
                raise BadRequest(message, param="chat_template_kwargs")


def _require_unusual_roles(messages: list[dict[str, Any]], prompt: str) -> None:
    """Raise BadRequest if the template has left out a message of a role that not every template knows.

    Each message is looked for behind the one before, because 5,000 searches of a long prompt from its beginning take seconds.
    """
    position = 0
    for message in messages:
        if message["role"] in ROLES:
            continue
        content = message["content"].strip()
        found = prompt.find(content, position)
        if found < 0:  # the template may have changed the order
            found = prompt.find(content)
        if found < 0:
            text = f"This model's chat template leaves out messages of the role {message['role']!r}."
            raise BadRequest(text, param="messages", code="invalid_value")
        position = found + len(content)
