"""The answer to /v1/chat/completions: messages with thoughts, content and tool calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_serve.engine import RequestOutput, StructuredOutput
from fa_serve.engine.request.params import ComposedGrammar
from fa_serve.spec import ParameterError

from ..answers.answer import Answer
from ..answers.constraints import Constraint
from ..answers.logprobs import for_chat
from ..answers.size import CHAT_LOGPROB, PROMPT_LOGPROB, AnswerSize
from ..errors import BadRequest, parameter_refused
from ..service import Service
from .conversation import ChatRequest
from .grammar import ANY_TEXT, call_rules, compose, rule
from .messages import MessageReader
from .reasoning import CLOSING, OPENING, ThoughtReader, opened_by
from .tool_schemas import call_list_schema
from .tools import FORMATS, REQUIRED, ToolReader


class ChatAnswer(Answer):
    """
    _tools:       the tools that this request offers to the model
    _tool_format: how the model writes calls, or None if that is not known
    _may_call:    whether the model decides about calling tools: they are offered, and no call is forced
    _thinks:      whether the answer may begin with thoughts
    _continued:   the text of the last message, if the answer continues it
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"
    _prompt_field = "messages"
    _body: ChatRequest

    def __init__(self, body: ChatRequest, service: Service, key: str | None):
        super().__init__(body, service, key)
        self._tools = body.offered_tools()
        self._continued = body.messages[-1].last_text if body.continue_final_message else None
        self._readers: dict[int, MessageReader] = {}
        self._template = self._tokenization.template(body, self._tools)
        parser = service.settings.tool_call_parser
        self._tool_format = self._template.tool_format if parser == "auto" else FORMATS[parser]
        asked = self._constraint
        self._may_call = bool(self._tools) and (asked is None or asked.field != "tool_choice")
        reasoning = service.settings.reasoning_parser
        thinks = self._template.thinks if reasoning == "auto" else reasoning == "think"
        self._thinks = thinks and not (asked and asked.output.grammar)  # the request's grammar constrains the whole answer
        self._check_tools()
        if self._may_call and asked is None and any(tool.function.strict for tool in self._tools):
            self._constraint = Constraint("tools", ANY_TEXT)

    def _check_tools(self) -> None:
        asked = self._constraint
        if self._may_call and asked is not None and asked.output.grammar is not None:
            message = (
                f"{asked.field} must not be given with tools unless tool_choice is none, because a grammar cannot include tool "
                "calls."
            )
            raise BadRequest(message, param=asked.field)

    def _check_template(self) -> None:
        if self._body.reasoning_effort is not None and not self._template.reads("reasoning_effort"):
            message = "reasoning_effort must be null: this model's chat template does not read it."
            raise BadRequest(message, param="reasoning_effort")
        if self._may_call and self._tool_format is None and self._template.reads("tools"):
            raise BadRequest(
                "This model's chat template does not show how the model writes tool calls. The operator can set "
                '--tool-call-parser. Without it, tool_choice must be "required" or name a function.',
                param="tools",
            )

    def _constraints(self) -> dict[str, dict[str, Any]]:
        body = self._body
        asked = super()._constraints()
        if body.response_format is not None:
            schema = body.response_format.json_schema
            asked["response_format"] = {
                "json_object": body.response_format.type == "json_object",
                "json_schema": None if schema is None else schema.schema_ or {},
            }
        tool = body.named_tool()
        if tool is not None:
            asked["tool_choice"] = {"json_schema": tool.parameters()}
        elif body.tool_choice == "required":
            single = body.parallel_tool_calls is False
            asked["tool_choice"] = {"json_schema": call_list_schema(body.offered_tools(), "parameters", single)}
        return asked

    def _num_prompts(self) -> int:
        return 1

    async def _encode(self) -> list[list[int]]:
        await self._tokenization.read_template(self._template, self._body, self._key)
        self._check_template()
        for field in ("truncate_prompt_tokens", "use_beam_search", "prompt_logprobs"):
            if getattr(self._body, field) and any(message.images() for message in self._body.messages):
                raise BadRequest(f"{field} is not allowed with images.", param=field, code="invalid_value")
        encode = self._tokenization.encode_chat
        salt = self._service.isolation.cache_salt(self._key, self._body.cache_salt)
        found = await encode(self._template, self._body, self._tools, self._variables(), self._key, salt)
        self._text = found.text
        self._images = found.images
        return [found.tokens]

    def _variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        variables = dict(self._body.chat_template_kwargs or {})
        if self._body.reasoning_effort is not None:
            variables["reasoning_effort"] = self._body.reasoning_effort
        return variables

    def _structured(self) -> StructuredOutput | None:
        """The request's own structured output, or a grammar in which thoughts precede it and calls may replace it."""
        thoughts = opened_by(self._text, self._continued) if self._thinks else False
        asked = self._constraint
        if asked is None or (thoughts is False and not self._may_call):
            return super()._structured()
        special_token = self._tokenization.special_tokens.get
        free_text = asked.output is ANY_TEXT
        start = "" if free_text else "answer"
        rules: list[str] = []
        parts = [] if free_text else [asked.output]
        try:
            if not free_text:
                rules.append(f"answer: {rule(asked.output)}")
        except ParameterError as error:
            raise parameter_refused(error, asked.field) from None
        except ValueError as error:
            raise BadRequest(f"{asked.field} must be a JSON schema: {error}.", param=asked.field) from None
        if self._may_call and self._tool_format is not None:
            single = self._body.parallel_tool_calls is False
            try:
                called, more = call_rules(self._tool_format, self._tools, single, special_token, with_text=free_text)
            except ParameterError as error:
                raise parameter_refused(error, "tools") from None
            start = f"{start} | {called}" if start else called
            rules += more
            parts.append(StructuredOutput(json_schema=call_list_schema(self._tools, "parameters", single)))
        try:
            return ComposedGrammar(grammar=compose(start, rules, thoughts, special_token), parts=tuple(parts))
        except ParameterError as error:
            kind = parts[0].kind
            rule_of_whole = f"{error.rule} together with the grammar of thoughts and calls"
            raise parameter_refused(ParameterError(kind, rule_of_whole, getattr(parts[0], kind)), asked.field) from None

    def _skip_special_tokens(self) -> bool | None:
        """False if a marker of tool calls or thoughts is a special token: the readers need to see it in the text."""
        markers = {self._tool_format.opening} if self._may_call and self._tool_format else set()
        if self._thinks:
            markers |= {OPENING, CLOSING}  # the prompt may already contain OPENING
        return False if markers & self._tokenization.special_tokens.keys() else self._body.skip_special_tokens

    def _stop_token_ids(self) -> tuple[int, ...]:
        """The request's stop tokens, and the token with which the chat template ends a message.

        That token is left out if the model's files name it as an end token anyway, or if the request ignores end tokens.
        """
        given = super()._stop_token_ids()
        end = self._tokenization.chat_end
        return given if end is None or self._body.ignore_eos or end in given else (*given, end)

    def _reader(self, index: int) -> MessageReader:
        if index not in self._readers:
            self._readers[index] = self._new_reader()
        return self._readers[index]

    def _new_reader(self) -> MessageReader:
        inside = opened_by(self._text, self._continued)
        thoughts = ThoughtReader(inside, begun=self._continued is not None) if self._thinks else None
        id_length = self._tool_format.id_length if self._tool_format else None
        named = self._body.named_tool()
        if named is not None:
            return MessageReader(thoughts, function=named.function.name, id_length=id_length)
        if not self._tools:
            return MessageReader(thoughts)
        tool_format = self._tool_format if self._may_call else None
        tool_format = tool_format or replace(REQUIRED, id_length=id_length)
        offered = [tool.function.name for tool in self._tools]
        return MessageReader(thoughts, ToolReader(tool_format, offered, single=self._body.parallel_tool_calls is False))

    def _size(self) -> AnswerSize:
        size = super()._size()
        body = self._body
        scored = CHAT_LOGPROB * ((body.top_logprobs or 0) + 1) if body.logprobs else 0
        once = 0 if body.prompt_logprobs is None else PROMPT_LOGPROB * (body.prompt_logprobs + 1)
        return replace(size, once=once, per_token=size.per_token + scored)

    def _max_tokens(self) -> int | None:
        return self._body.max_completion_tokens or self._body.max_tokens

    def _default_max_tokens(self, room: int) -> int:
        return room

    def _logprobs(self) -> int | None:
        return (self._body.top_logprobs or 0) if self._body.logprobs else None

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = self._reader(index).whole(output.text)
        return self._common(index, output) | {"message": message}

    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        return reply | {"prompt_logprobs": self._prompt_scores(sums[0])}

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The first output of any choice opens all choices: openai-python's stream reader needs them in the order of index."""
        if self._readers:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._common(each) | {"delta": delta} for each in range(self._n)]

    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = self._reader(index).read(output.text, output.finished)
        return self._common(index, output) | {"delta": delta}

    def _common(self, index: int, output: RequestOutput | None = None) -> dict[str, Any]:
        common = super()._common(index, output)
        if output is not None:
            common["finish_reason"] = self._reader(index).finish_reason(output.finish_reason)
        if output is not None and output.logprobs:
            scores = for_chat(self._tokenization.token_texts, output.logprobs, bool(self._body.return_tokens_as_token_ids))
            common["logprobs"] = {"content": scores, "refusal": None}
        return common
