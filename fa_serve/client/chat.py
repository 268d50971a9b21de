"""A conversation in the terminal: `fa-serve chat`.

    with Conversation("http://127.0.0.1:8000") as conversation:
        for text in conversation.ask("What is 17 + 25?"):
            print(text, end="", flush=True)

Answers are printed while they stream. The prompt and the hint on how to leave are for a terminal; other input is read as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import httpx

from .failures import connection_failed, first_model, refusal

COMMANDS = "Ctrl-C stops an answer, Ctrl-D exits, /reset forgets the conversation, /help shows this."


class ChatError(Exception):
    """The server refuses the request, in the server's words, or cannot be reached."""


class Conversation:
    """The messages so far. If an answer is stopped, the part of it that has arrived is kept.

    url, key, model: as in `fa-serve chat`; a model of None takes the first that the server lists
    system:          a system message, which stays after a reset
    options:         further fields of each request; None leaves a field out
    """

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

    def _first_model(self) -> str:
        response = self._client.get("/v1/models")
        try:
            return first_model(response)
        except ValueError as error:
            raise ChatError(str(error)) from None

    def ask(self, question: str) -> Iterator[str]:
        """The answer, in parts as they arrive. Raises ChatError; then the conversation does not contain the question."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        try:
            if self._model is None:
                self._model = self._first_model()
            body = {"model": self._model, "messages": messages, "stream": True, **self._options}
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(refusal(response))
                for line in response.iter_lines():
                    text = _text(line)
                    if text:
                        answer.append(text)
                        yield text
        except httpx.HTTPError as error:
            raise ChatError(connection_failed(self._client.base_url, error)) from None
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


def answer_once(conversation: Conversation, question: str) -> None:
    """Print the answer to one question. Raises ChatError."""
    _print_answer(conversation, question)
    print()


def talk(conversation: Conversation) -> None:
    """Read questions and print answers until the input ends. Empty lines are skipped."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(COMMANDS)
    while True:
        try:
            question = input(prompt)
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        if question == "/reset":
            conversation.reset()
        elif question == "/help":
            print(COMMANDS)
        if not question.strip() or question in ("/reset", "/help"):
            continue
        try:
            _print_answer(conversation, question)
        except ChatError as error:
            print(f"fa-serve: {error}", end="", file=sys.stderr)
        print()


def _print_answer(conversation: Conversation, question: str) -> None:
    try:
        for text in conversation.ask(question):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")


def _text(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ChatError(event["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
