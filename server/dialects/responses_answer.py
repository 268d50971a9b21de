"""The answer to /v1/responses: a response with reasoning, message and function_call items, or the events that build it.

The sequence of events is response.created and response.in_progress; then for each item response.output_item.added, the events
of its content, and response.output_item.done; then response.completed, response.incomplete or response.failed. Events are
numbered from 0.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from fa_serve.engine import RequestOutput

from ..errors import ApiError
from ..service import Service
from .dialect import DialectAnswer, Part, event
from .responses_replies import ItemStatus, ResponseObject, ResponseUsage
from .responses_request import ResponsesRequest

PREFIXES = {"thoughts": "rs", "text": "msg", "call": "fc"}  # of the ids of items, by the kind of a part
DELTAS = {
    "thoughts": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}  # by the kind of a part, the events that fill it


class ResponsesAnswer(DialectAnswer):
    prefix = "resp_"
    FIELDS: ClassVar = {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
    }
    _prompt_field = "input"

    def __init__(self, request: ResponsesRequest, service: Service, key: str | None):
        self._request = request
        self._number = 0  # the number of the next event
        super().__init__(request, service, key)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                if not self._number:
                    response = self._response("in_progress")
                    yield self._event("response.created", {"response": response})
                    yield self._event("response.in_progress", {"response": response})
                for change, part, text in self._changes:
                    for each in self._events(change, part, text, self._status(part, output)):
                        yield each
                if output.finished:
                    response = self._finished(output)
                    yield self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        response["output"] = [self._item(part, "incomplete") for part in self._parts.all]  # type: ignore[misc]
        return self._event("response.failed", {"response": response})

    def _wants_thoughts(self) -> bool | None:
        effort = self._wanted_effort()
        return None if effort is None else effort != "none"

    def _wanted_effort(self) -> str | None:
        return None if self._request.reasoning is None else self._request.reasoning.effort

    def _reply(self, sums: dict[int, RequestOutput]) -> dict[str, Any]:
        [output] = sums.values()
        return dict(self._finished(output))

    def _finished(self, output: RequestOutput) -> ResponseObject:
        cut = output.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["completed_at"] = None if cut else int(time.time())
        response["output"] = [self._item(part, self._status(part, output)) for part in self._parts.all]  # type: ignore[misc]
        response["usage"] = self._usage_of(output)
        return response

    def _status(self, part: Part, output: RequestOutput) -> ItemStatus:
        """The status of a part when it has ended."""
        cut = output.finish_reason == "length" and part.number == len(self._parts.all) - 1
        return "incomplete" if cut else "completed"

    def _usage_of(self, output: RequestOutput) -> ResponseUsage:
        num_prompt_tokens = len(self._prompts[0])
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thought_tokens},
            "total_tokens": num_prompt_tokens + output.num_output_tokens,
        }

    def _response(self, status: Any) -> ResponseObject:
        """The response without its output, with the fields of the request."""
        request = self._request
        given = request.returned
        default = self._service.engine.default_params
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given["instructions"],
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self._head["model"],
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": given["reasoning"] or {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": default.temperature if request.temperature is None else request.temperature,
            "text": _without_nulls(given["text"] or {}) or {"format": {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_p": default.top_p if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def _item_id(self, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self._head['id'].removeprefix(self.prefix)}{part.number:02}"

    def _content(self, part: Part) -> dict[str, Any]:
        """The content of a text or of thoughts, so far."""
        if part.kind == "text":
            return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": part.text}

    def _item(self, part: Part, status: ItemStatus) -> dict[str, Any]:
        """The item of a part. An item in progress has no content yet."""
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        content = [] if status == "in_progress" else [self._content(part)]
        if part.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        if part.kind == "thoughts":
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return item | {"type": "function_call", "call_id": part.identity, "name": part.name, "arguments": part.text}

    def _events(self, change: str, part: Part, text: str, status: ItemStatus) -> Iterator[bytes]:
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.number}
        has_content = part.kind != "call"
        if has_content:
            place["content_index"] = 0
        scored: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if change == "begin":
            item = self._item(part, "in_progress")
            yield self._event("response.output_item.added", {"output_index": part.number, "item": item})
            if has_content:
                yield self._event("response.content_part.added", place | {"part": self._content(part)})
        elif change == "more":
            yield self._event(f"{DELTAS[part.kind]}.delta", place | {"delta": text} | scored)
        else:
            whole = {"text": part.text} if has_content else {"arguments": part.text, "name": part.name}
            yield self._event(f"{DELTAS[part.kind]}.done", place | whole | scored)
            if has_content:
                yield self._event("response.content_part.done", place | {"part": self._content(part)})
            item = self._item(part, status)
            yield self._event("response.output_item.done", {"output_index": part.number, "item": item})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number = self._number
        self._number += 1
        return event(name, {"sequence_number": number} | fields)


def _without_nulls(value: Any) -> Any:
    return {k: _without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
