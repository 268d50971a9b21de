"""Answers that do not depend on who asks are made once and kept, so that asking for them over and over costs next to nothing.

The pages, /version and /openapi.json never change. /health and /ready have one answer while all is well, and FastAPI answers
when it is not. All of these are kept as FastAPI has answered them the first time. /metrics is different at each moment
(metrics.ScrapedText).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette import types as asgi

from .service import Service

# whether the answer to a GET or HEAD of a path is the usual one at the moment
USUAL: dict[str, Callable[[Service], bool]] = {
    "/": lambda _: True,
    "/docs": lambda _: True,
    "/openapi.json": lambda _: True,
    "/version": lambda _: True,
    "/health": lambda service: service.sickness() is None,
    "/ready": lambda service: service.refusal_reason() is None,
}


@dataclass(frozen=True)
class _Kept:
    """route: FastAPI's, whose path is counted"""

    start: dict[str, Any]
    body: bytes
    route: Any


class KeptAnswers:
    """Middleware around FastAPI. make_schema: makes what /openapi.json shows, which takes half a second the first time"""

    def __init__(self, app: asgi.ASGIApp, service: Service, make_schema: Callable[[], Any]):
        self._app = app
        self._service = service
        self._make_schema = make_schema
        self._kept: dict[tuple[str, str], _Kept] = {}

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        is_usual = USUAL.get(scope.get("path", ""))
        if scope["type"] != "http" or is_usual is None or scope["method"] not in ("GET", "HEAD") or not is_usual(self._service):
            await self._app(scope, receive, send)
            return
        name = (scope["method"], scope["path"])
        kept = self._kept.get(name)
        if kept is None:
            await self._keep(name, scope, receive, send)
            return
        scope["route"] = kept.route
        await send(dict(kept.start))
        await send({"type": "http.response.body", "body": kept.body})

    async def _keep(self, name: tuple[str, str], scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Let FastAPI answer, and keep the answer if it is one."""
        if scope["path"] == "/openapi.json":
            await asyncio.to_thread(self._make_schema)
        sent: list[asgi.Message] = []

        async def send_and_note(message: asgi.Message) -> None:
            sent.append(dict(message))  # what is around this middleware adds headers of the request
            await send(message)

        await self._app(scope, receive, send_and_note)
        start, *parts = sent
        if start["status"] == 200:
            body = b"".join(part.get("body", b"") for part in parts)
            self._kept[name] = _Kept(dict(start), body, scope.get("route"))
