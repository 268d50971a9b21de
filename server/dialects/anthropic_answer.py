"""The answer to /v1/messages: a message with thinking, text and tool_use blocks, or the events that build it.

The sequence of events is message_start, then content_block_start, content_block_delta and content_block_stop for each block,
then message_delta and message_stop. A failure is an event `error`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

from pydantic_core import from_json

from fa_serve.engine import RequestOutput

from ..errors import ApiError
from ..service import Service
from .anthropic_replies import MessageReply, MessageUsage, StopReason
from .anthropic_request import CountTokensRequest
from .dialect import DialectAnswer, Part, event

SIGNATURE = "unsigned"  # of thoughts: clients expect a signature, and this server checks none
DELTAS = {
    "thoughts": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesAnswer(DialectAnswer):
    prefix = "msg_"
    FIELDS: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    _clips = True

    def __init__(self, request: CountTokensRequest, service: Service, key: str | None):
        self._thinking = request.thinking
        self._effort = None if request.output_config is None else request.output_config.effort
        super().__init__(request, service, key)

    async def count_tokens(self) -> int:
        """The tokens of the prompt, without an answer."""
        with self._renamed(), self._service.reserve(1, self._key):
            [tokens] = await self._encode()
        return len(tokens)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                if not begun:
                    begun = True
                    start = self._message([], None, None, {**self._usage_of(output), "output_tokens": 0})
                    yield event("message_start", {"message": start})
                for change in self._changes:
                    for each in self._events(*change):
                        yield each
                if output.finished:
                    reason, string = self._stop(output)
                    delta = {"stop_reason": reason, "stop_sequence": string}
                    yield event("message_delta", {"delta": delta, "usage": self._usage_of(output)})
        yield event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return event("error", error.anthropic_body())

    def _wants_thoughts(self) -> bool | None:
        return None if self._thinking is None else self._thinking.type != "disabled"

    def _wanted_effort(self) -> str | None:
        return self._effort

    def _reply(self, sums: dict[int, RequestOutput]) -> dict[str, Any]:
        [output] = sums.values()
        reason, string = self._stop(output)
        content = [self._block(part) for part in self._parts.all]
        return dict(self._message(content, reason, string, self._usage_of(output)))

    def _message(self, content: list[Any], reason: StopReason | None, string: str | None, usage: MessageUsage) -> MessageReply:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": string,
            "usage": usage,
        }

    def _usage_of(self, output: RequestOutput) -> MessageUsage:
        cached = output.num_cached_tokens
        return {
            "input_tokens": len(self._prompts[0]) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thought_tokens},
        }

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        if output.finish_reason == "length":
            whole = output.num_output_tokens >= (self._max_tokens() or 0)
            return "max_tokens" if whole else "model_context_window_exceeded", None
        if output.stop_string is not None:
            return "stop_sequence", output.stop_string
        called = any(part.kind == "call" for part in self._parts.all)
        return "tool_use" if called else "end_turn", None

    def _block(self, part: Part) -> dict[str, Any]:
        """The block of a part, with its text so far."""
        if part.kind == "text":
            return {"type": "text", "text": part.text, "citations": None}
        if part.kind == "thoughts":
            return {"type": "thinking", "thinking": "" if self._omits_thoughts else part.text, "signature": SIGNATURE}
        return {"type": "tool_use", "id": part.identity, "name": part.name, "input": _input(part.text)}

    @property
    def _omits_thoughts(self) -> bool:
        return self._thinking is not None and self._thinking.display == "omitted"

    def _events(self, change: str, part: Part, text: str) -> list[bytes]:
        index = part.number
        if change == "begin":
            block = self._block(part) | ({"signature": ""} if part.kind == "thoughts" else {})
            return [event("content_block_start", {"index": index, "content_block": block})]
        if change == "more":
            if part.kind == "thoughts" and self._omits_thoughts:
                return []
            kind, field = DELTAS[part.kind]
            return [event("content_block_delta", {"index": index, "delta": {"type": kind, field: text}})]
        stop = event("content_block_stop", {"index": index})
        if part.kind != "thoughts":
            return [stop]
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        return [event("content_block_delta", {"index": index, "delta": signed}), stop]


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. A call that was cut off gives what is complete; other text becomes the field `arguments`."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
