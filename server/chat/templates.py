"""Chat templates turn conversations into prompts, and the text of a template tells what the template can do.

    template = Template(tokenizer, text)
    if template.reads("tools"): ...
    prompt = template.render(messages, tools, {"enable_thinking": False})

A template may write a text of the request once for each message, so rendering stops when its output is longer than a prompt can
be. A template silently leaves out what it does not know: tools, tool calls, names, variables. Such a request is refused here.
Whether a template reads contents as strings or as lists of parts is found out once, with the first request at the latest
(content_forms.py). transformers renders templates in jinja2's sandbox. Templates of requests are rendered in another process
(template_process.py). Which template a request gets is decided in tokenization.py.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from pydantic_core import to_json

from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.sandbox.trials import Trial

from ..errors import BadRequest, HttpError, parameter_refused
from .content_forms import PROBE, PROBE_FORMS, STRINGS, TOOL_IMAGES, ContentForms, Conversation, find_forms, has_image_places
from .conversation import PromptEnd
from .reasoning import CLOSING, OPENING
from .template_process import MAX_REASON, OutputTooLongError, bound_output, first_showing
from .tools import ToolFormat, detect_format

MESSAGE_NAME = re.compile(r"""message(\.name|\[['"]name['"]|\.get\(['"]name['"])""")
ROLES = {"system", "user", "assistant", "tool"}  # which every template knows or refuses
ANSWER = PromptEnd()
CLOSED = PromptEnd(add_generation_prompt=False)
LARGE_FACTOR = 10_000_000
RESERVED = {"conversation", "messages", "self", "tools"}
# what a template can raise for a conversation or a variable that is not of the kind that it expects
FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class EncodedChat(NamedTuple):
    """The prompt that the chat template makes from a conversation.

    tokens: the ids of the text, with one image token for each embedding of an image
    """

    tokens: list[int]
    text: str
    images: Sequence[ImageInput] = ()


class Template:
    """One chat template.

    reader: turns prompts into tokens, and knows how long they may be
    writes_images: whether it has places for the images of a user, as `learn` has found out
    fault:  what is wrong with the model's own template, in words that follow "it" ("must accept ..."), and that no request can
            repair; None if no fault is known. May be set later
    """

    def __init__(self, tokenizer: Any, text: str, reader: PromptReader, fault: str | None = None):
        self._tokenizer = tokenizer
        self._text = text
        self._reader = reader
        self.fault = fault
        self.writes_images = False
        self._forms: ContentForms | None = None
        self._writes_tool_images: bool | None = None

    @cached_property
    def names(self) -> set[str]:
        """The names in the template, variables and others. Finding them takes 0.1 s for a hostile template."""
        try:
            return {value for _, kind, value in jinja2.Environment().lex(self._text) if kind == "name"}
        except jinja2.TemplateSyntaxError as error:
            self._refuse_if_broken()
            raise _not_valid(str(error)) from None

    @cached_property
    def holds_the_interpreter(self) -> bool:
        """Whether the template has a power, or a product and a very large number. Each of them is one call into C, which no
        deadline and no signal can end.

        jinja2 evaluates constants when it compiles a template, so compiling such a template may be as slow.
        """
        try:
            found = [(kind, value) for _, kind, value in jinja2.Environment().lex(self._text)]
        except jinja2.TemplateSyntaxError:
            return False  # such a template is never compiled
        if ("operator", "**") in found:
            return True
        numbers = [value.replace("_", "") for kind, value in found if kind == "integer"]
        is_large = any(len(each) > len(str(LARGE_FACTOR)) or not each.isdecimal() for each in numbers)
        return is_large and ("operator", "*") in found

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self.names

    @cached_property
    def _reads_message_names(self) -> bool:
        return MESSAGE_NAME.search(self._text) is not None

    def learn(self) -> None:
        """Find out now what the template does with contents, so that no request waits for it."""
        self.forms()
        self.writes_images = not self.holds_the_interpreter and has_image_places(self._render_probe)

    def forms(self, trial: Trial | None = None) -> ContentForms:
        """The forms of contents that the template reads. They are found out once. trial: as in `render`"""
        if self._forms is None:
            if trial is None and self.holds_the_interpreter:
                return STRINGS  # `render` refuses this template
            self._forms = find_forms(lambda groups: self._first_showing(groups, PROBE_FORMS, trial))
        return self._forms

    def writes_tool_images(self, image_text: str, trial: Trial | None = None) -> bool:
        """Whether the template writes `image_text` for an image in the result of a tool. This is found out once."""
        if self._writes_tool_images is None:
            if trial is None and self.holds_the_interpreter:
                return True  # `render` refuses this template
            self._writes_tool_images = self._first_showing([TOOL_IMAGES], [image_text], trial) != [None]
        return self._writes_tool_images

    def _first_showing(
        self, groups: Sequence[Sequence[Conversation]], words: Sequence[str], trial: Trial | None
    ) -> list[int | None]:
        """The result of `first_showing` of template_process.py, in the trial's process if there is a trial."""
        if trial is None:
            return first_showing(self._render_probe, groups, words)
        variables = self._tokenizer.special_tokens_map
        end = ANSWER._asdict()
        given = {"template": self._text, "groups": groups, "words": words, "variables": variables, "end": end}
        found: list[int | None] = json.loads(trial.run(to_json(given)))["found"]
        return found

    def _render_probe(self, conversation: Conversation) -> str | None:
        try:
            return self._apply(conversation, None, {}, ANSWER)
        except (OutputTooLongError, *FAILURES):
            return None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        return detect_format(self._text)

    @cached_property
    def thinks(self) -> bool:
        """Whether the template knows thoughts. A template that opens them in each prompt need not have the closing tag."""
        return OPENING in self._text or CLOSING in self._text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        trial: Trial | None = None,
        end: PromptEnd = ANSWER,
    ) -> str:
        """The prompt, up to the point where the assistant's answer begins. Raises BadRequest, which names the field.

        end:   where the prompt ends; with `continue_final_message`, nothing follows the text of the last message
        trial: where the template runs, with TrialError if it takes too much; without a trial, it runs in this thread
        """
        if tools and not self.reads("tools"):
            raise BadRequest("This model's chat template does not support tools.", param="tools", code="unsupported_parameter")
        for message in messages:
            if "name" in message and not self._reads_message_names:
                raise BadRequest("This model's chat template does not support names in messages.", param="messages")
            if ("tool_calls" in message or message["role"] == "tool") and "tool_calls" not in self._text:
                raise BadRequest("This model's chat template does not support tool calls in messages.", param="messages")
        self._check_variables(variables)
        if trial is None and end == CLOSED and self.begins_answers:
            rule = "must not be false, because this model's chat template begins the assistant's turn whatever the value is"
            raise BadRequest(f"add_generation_prompt {rule}.", param="add_generation_prompt", code="unsupported_parameter")
        if trial is None and self.holds_the_interpreter:
            self._refuse_if_broken()
            rule = (
                "it must have no power (**), nor a product (*) and a very large number, because nothing could interrupt these"
            )
            raise BadRequest(f"The chat template is refused: {rule}.", param="messages")
        try:
            if trial is None:
                text = self._apply(messages, tools, variables, end)
            else:
                text = self._render_on_trial(messages, tools, variables, end, trial)
        except OutputTooLongError:
            error = self._reader.too_long(f"more than {self._reader.max_chars}")
            raise parameter_refused(error, "messages") from None
        except FAILURES as error:
            self._refuse_if_broken()
            refusal = f"The chat template refuses these messages: {error!s:.{MAX_REASON}}."
            raise BadRequest(refusal, param="messages") from None
        prompt = str(text)
        if self.fault is not None and (not prompt.strip() or any(_left_out(messages, prompt, {"user"}))):
            self._refuse_if_broken()
        for message in _left_out(messages, prompt, {message["role"] for message in messages} - ROLES):
            refusal = f"This model's chat template leaves out messages of the role {message['role']!r}."
            raise BadRequest(refusal, param="messages", code="invalid_value")
        return prompt

    def _apply(
        self, messages: Conversation, tools: list[dict[str, Any]] | None, variables: dict[str, Any], end: PromptEnd
    ) -> str:
        """Render the conversation with transformers, in this thread."""
        bound_output(self._text, self._reader.max_chars)
        apply = self._tokenizer.apply_chat_template
        text = apply(messages, tools, chat_template=self._text, tokenize=False, **end._asdict(), **variables)
        return str(text)

    def _refuse_if_broken(self) -> None:
        if self.fault is not None:
            message = (
                f"This model's chat template is broken: it {self.fault}. The operator can replace it with --chat-template. "
                "/v1/completions needs no template."
            )
            raise HttpError(501, message, code="broken_chat_template")

    def closing(self) -> str:
        """What the template writes after a message of the assistant; "" if it takes no such message."""
        if self.holds_the_interpreter:
            return ""
        return self._written_after_answer()

    @cached_property
    def begins_answers(self) -> bool:
        """Whether each prompt ends with the start of the assistant's turn, although the template does not read
        `add_generation_prompt`.

        Then more than the end of the turn follows an answer at the end of a prompt: it is not what comes before another
        message. A template that only does so after a message of the user is not found.
        """
        if self.reads("add_generation_prompt") or self.holds_the_interpreter:
            return False
        closing = self._written_after_answer()
        return bool(closing.strip()) and not self._written_after_answer("Hello").startswith(closing)

    def _written_after_answer(self, *later: str) -> str:
        """What the template writes after a message of the assistant, with these messages of the user after it."""
        said = [("user", "Hello"), ("assistant", PROBE), *(("user", text) for text in later)]
        messages = [{"role": role, "content": self.forms().content(role, text)} for role, text in said]
        try:
            text = self._tokenizer.apply_chat_template(messages, chat_template=self._text, tokenize=False)
        except FAILURES:
            return ""
        return str(text).rpartition(PROBE)[2] if PROBE in str(text) else ""

    def _render_on_trial(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        end: PromptEnd,
        trial: Trial,
    ) -> str:
        given = {
            "template": self._text,
            "messages": messages,
            "tools": tools,
            "variables": self._tokenizer.special_tokens_map | variables,
            "end": end._asdict(),
        }
        reply = json.loads(trial.run(to_json(given)))
        if "invalid" in reply:
            raise _not_valid(reply["invalid"])
        if "error" in reply:
            raise jinja2.TemplateError(reply["error"])
        if reply["text"] is None:
            raise OutputTooLongError
        return str(reply["text"])

    def _check_variables(self, variables: dict[str, Any]) -> None:
        if not variables:
            return
        reserved = RESERVED | inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        own = {*self._tokenizer.special_tokens_map, *self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        for name in variables:
            if name in own:
                message = f"chat_template_kwargs must not set {name}, which the chat template takes from the tokenizer."
                raise BadRequest(message, param="chat_template_kwargs")
            if name in reserved or not self.reads(name):
                message = f"chat_template_kwargs must hold variables that the chat template reads, got {name!r}."
                raise BadRequest(message, param="chat_template_kwargs")


def _not_valid(reason: str) -> BadRequest:
    return BadRequest(f"The chat template is not valid: {reason}.", param="chat_template", code="invalid_value")


def _left_out(messages: list[dict[str, Any]], prompt: str, roles: set[str]) -> Iterator[dict[str, Any]]:
    """The messages of these roles with a text that the template has left out.

    Each search begins after the previous text, because 5,000 searches of a long prompt from its beginning take seconds.
    """
    position = 0
    for message in messages:
        if message["role"] not in roles:
            continue
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        for text in map(str.strip, texts):
            found = prompt.find(text, position)
            if found < 0:  # the template may have changed the order
                found = prompt.find(text)
            if found < 0:
                yield message
                break
            position = found + len(text)
