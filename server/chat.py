"""A terminal client: `fa-serve chat`. Answers stream as they come; Ctrl-C stops one, Ctrl-D leaves, /reset forgets.

    with Conversation("http://127.0.0.1:8000") as conversation:
        for text in conversation.ask("What is 17 + 25?"):
            print(text, end="", flush=True)

It speaks OpenAI's API and nothing of ours, so it works with other servers too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import httpx


class ChatError(Exception):
    """The server refused, in its own words, or could not be reached."""


class Conversation:
    """The messages so far; an answer that was stopped is kept as far as it came."""

    def __init__(
        self, url: str, *, key: str | None = None, model: str | None = None, system: str | None = None, **options: Any
    ):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._options = {name: value for name, value in options.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self._model = model
        self.reset()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)

    def ask(self, question: str) -> Iterator[str]:
        """The answer's pieces. Raises ChatError; then the question is not part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        try:
            if self._model is None:
                self._model = _checked(self._client.get("/v1/models")).json()["data"][0]["id"]
            body = {"model": self._model, "messages": messages, "stream": True, **self._options}
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                for line in _checked(response).iter_lines():
                    if text := _text(line):
                        answer.append(text)
                        yield text
        except httpx.HTTPError as error:
            raise ChatError(f"{self._client.base_url}: {error or type(error).__name__}") from None
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {response.status_code}"
        raise ChatError(message)
    return response


def _text(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = json.loads(line[6:])
    if "error" in event:
        raise ChatError(event["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
