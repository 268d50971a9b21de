"""Keeps answers that do not depend on who asks, so that repeated requests for them cost next to nothing.

The pages, /version and /openapi.json never change. /health and /ready have one answer while the server is healthy; otherwise
FastAPI answers them. All of these are kept as FastAPI answered them the first time. /metrics changes all the time
(metrics.ScrapedText).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette import types as asgi

from .service import Service

# by path, whether a GET or HEAD gets the usual answer at the moment
USUAL: dict[str, Callable[[Service], bool]] = {
    "/": lambda _: True,
    "/docs": lambda _: True,
    "/openapi.json": lambda _: True,
    "/version": lambda _: True,
    "/health": lambda service: service.sickness() is None,
    "/ready": lambda service: service.refusal_reason() is None,
}


@dataclass(frozen=True)
class _Answer:
    """A kept answer. start: the message that begins the response; route: FastAPI's route, whose path the metrics count"""

    start: dict[str, Any]
    body: bytes
    route: Any


class KeptAnswers:
    """Middleware around FastAPI. make_schema: makes the schema for /openapi.json, which takes half a second the first time"""

    def __init__(self, app: asgi.ASGIApp, service: Service, make_schema: Callable[[], Any]):
        self._app = app
        self._service = service
        self._make_schema = make_schema
        self._kept: dict[tuple[str, str], _Answer] = {}
        self._making: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        is_usual = USUAL.get(scope.get("path", ""))
        if scope["type"] != "http" or is_usual is None or scope["method"] not in ("GET", "HEAD") or not is_usual(self._service):
            await self._app(scope, receive, send)
            return
        name = (scope["method"], scope["path"])
        answer = self._kept.get(name)
        if answer is None:
            async with self._making[name]:  # requests that arrive meanwhile wait for the first one
                answer = self._kept.get(name) or await self._make(name, scope, receive)
        scope["route"] = answer.route
        await send(dict(answer.start))
        await send({"type": "http.response.body", "body": answer.body})

    async def _make(self, name: tuple[str, str], scope: asgi.Scope, receive: asgi.Receive) -> _Answer:
        """Let FastAPI answer, and keep the answer if it is the usual one."""
        if scope["path"] == "/openapi.json":
            await asyncio.to_thread(self._make_schema)
        sent: list[asgi.Message] = []

        async def note(message: asgi.Message) -> None:
            sent.append(message)

        await self._app(scope, receive, note)  # collected first: nobody waits for this client to read it
        start, *parts = sent
        body = b"".join(part.get("body", b"") for part in parts)
        answer = _Answer(dict(start), body, scope.get("route"))
        if start["status"] == 200:
            self._kept[name] = answer
        return answer
