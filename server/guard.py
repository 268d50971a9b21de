"""What stands before the routes: request ids and the access log, API keys, the size of a body.

Plain ASGI middleware, because FastAPI's `@app.middleware("http")` hides a client that leaves from the handlers behind it.
The access log has method, path, status, time, the request's id and the `user` it named; never a prompt. Keys are compared by
their SHA-256 in constant time, as a bearer token or, for a browser that opens the page at `/`, as the password of basic
authentication. `scope["state"]` carries `request_id` and `key` (the key's hash) to the handlers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import UNFORESEEN, ApiError, TooLarge, Unauthorized

log = logging.getLogger("fa_serve.server")
access_log = logging.getLogger("fa_serve.access")
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """Takes X-Request-Id from the client or makes one, returns it, and logs and counts the response when it has ended.

    A failure that nobody foresaw ends here: its traceback goes to the log under the request's id, and the client gets a 500.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]):
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0
        begin = time.perf_counter()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except ClientDisconnect:
            pass  # in the middle of its body
        except Exception:
            log.exception("request %s failed", request_id)
            if not status:
                await ApiError(UNFORESEEN).response()(scope, receive, tagged)
        finally:
            seconds = time.perf_counter() - begin
            status = status or 499
            self._count(getattr(scope.get("route"), "path", "other"), status)
            if access_log.isEnabledFor(logging.INFO):
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(seconds, 3),
                    "request_id": request_id,
                    "user": state.get("user"),
                }
                user = f" user={state['user']!r}" if state.get("user") else ""
                line = f"{scope['method']} {quote(scope['path'])} {status} {seconds:.3f}s {request_id}{user}"
                access_log.info("%s", line, extra={"fields": fields})


class Keys:
    """401 for every path but the open ones unless the request carries one of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]):
        self._app = app
        self._open = open_paths
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            headers = Headers(scope=scope)
            digest = hashlib.sha256(_credential(headers.get("authorization", ""))).digest()
            if not sum(hmac.compare_digest(digest, known) for known in self._hashes):  # all of them, whatever the first says
                response = Unauthorized("A valid API key is required: Authorization: Bearer KEY.").response()
                if "text/html" in headers.get("accept", ""):
                    response.headers["www-authenticate"] = 'Basic realm="fa_serve: the password is an API key"'
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = digest.hex()
        await self._app(scope, receive, send)


def _credential(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # as which headers are read
    with suppress(ValueError):
        if scheme.lower() == "basic":
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


class BodyLimit:
    """413 for a body above the limit, whether its length is announced or found out while reading."""

    def __init__(self, app: ASGIApp, limit: int):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"The body may have {self._limit} bytes."
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._limit:
            await TooLarge(message).response()(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            event = await receive()
            read += len(event.get("body", b""))
            if read > self._limit:
                raise TooLarge(message)
            return event

        await self._app(scope, counted, send)
