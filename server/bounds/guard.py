"""The middleware before the routes: request ids and the access log, host names, API keys, the size of a body.

It is plain ASGI middleware, because FastAPI's `@app.middleware("http")` hides a client's disconnection from the handlers. It
wraps FastAPI's own layers, so that POSTs need not pass them (bodies.BodyRoutes). The access log has the method, path, status
and time of a request, its id, the client's address, the beginning of its key's hash, and the `user` that it names; it never
contains a prompt or a key. API keys are compared by their SHA-256 in constant time. A key is a bearer token, the header
x-api-key of Anthropic's clients or, for a browser that opens the page at `/`, the password of basic authentication.
`scope["state"]` hands `request_id` and `key` (the key's hash) to the handlers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette import types as asgi
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from ..errors import INTERNAL_ERROR, ApiError, TooLarge, TooManyRequests, Unauthorized, WrongHost, is_anthropic
from .costs import Costs

log = logging.getLogger("fa_serve.server")
access_log = logging.getLogger("fa_serve.access")
REQUEST_ID = re.compile(r"[!-~]{1,128}")
KEY_CHARACTERS = 8  # leading characters of a key's hash, which identify the key in the log
SMALL_BODY = 1 << 16  # bytes; a body up to this size takes the event loop up to ten milliseconds to parse and validate
ADDRESS = re.compile(r"(?P<v4>[\d.]+)(:\d{1,5})?|\[(?P<bracketed>[\da-fA-F:.]+)\](:\d{1,5})?|(?P<bare>[\da-fA-F:.]+)", re.ASCII)
PROBES = frozenset({"/health", "/ready", "/metrics"})  # requested every few seconds: successes are logged only at debug
CLIENT_GONE = 499  # the status in the log of a request whose client left before the response began


class RequestIds:
    """Takes X-Request-Id from the client or makes one, sends it back, and logs and counts the response when it has ended.

    The cost of the request is then charged to the client that `Clients` has found.

    An unexpected failure ends here: its traceback goes to the log with the request's id, and the client gets a 500.
    """

    def __init__(self, app: asgi.ASGIApp, count: Callable[[str, int], None], costs: Costs):
        self._app = app
        self._count = count
        self._costs = costs

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{os.urandom(16).hex()}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0
        begin = time.perf_counter()

        async def send_with_id(message: asgi.Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                identity = request_id.encode()
                names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
                message["headers"] = [*message.get("headers", ()), *[(name, identity) for name in names]]
                bill = state.get("bill")
                if bill is not None and not bill.had_turn:
                    try:
                        await self._costs.take_turn(bill, receive)
                    except TooManyRequests:  # too late to refuse: the answer exists, so it is sent
                        message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # the client left while it was sending its body
        except Exception:
            log.exception("request %s failed", request_id)
            if not status:
                await ApiError(INTERNAL_ERROR).response(scope)(scope, receive, send_with_id)
        finally:
            status = status or CLIENT_GONE
            self._count(getattr(scope.get("route"), "path", "other"), status)
            if "bill" in state:  # `Clients` has opened it
                self._costs.settle(state["bill"], unpaid=status >= 400 or scope["method"] != "POST")
            level = logging.DEBUG if status == 200 and scope["path"] in PROBES else logging.INFO
            if access_log.isEnabledFor(level):
                _log_access(level, scope, state, status, time.perf_counter() - begin)


def _log_access(level: int, scope: asgi.Scope, state: dict[str, Any], status: int, seconds: float) -> None:
    """One line for people, and the same as fields for the JSON log. The path is quoted, so it cannot begin a new line."""
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 3),
        "request_id": state["request_id"],
        "user": state.get("user"),
        "client": _address(scope),
        "key": state.get("key", "")[:KEY_CHARACTERS] or None,
    }
    origin = fields["client"] + (f" key={fields['key']}" if fields["key"] else "")
    user = f" user={state['user']!r}" if state.get("user") else ""
    line = f"{scope['method']} {quote(scope['path'])} {status} {seconds:.3f}s {state['request_id']} {origin}{user}"
    access_log.log(level, "%s", line, extra={"fields": fields})


class Hosts:
    """Answers 421 to a request for a host name that this server does not have.

    A web page can make its own name resolve to 127.0.0.1, and then call a local server as if it were the page's own. Such a
    request has a foreign name in `Host`. Numeric addresses always pass, because no name was resolved.

    names: the names that are allowed; "*" allows every name, "*.example.org" every name below example.org
    """

    def __init__(self, app: asgi.ASGIApp, names: Sequence[str]):
        self._app = app
        self._names = frozenset(name.lower() for name in names if not name.startswith("*."))
        self._ends = tuple(name[1:].lower() for name in names if name.startswith("*."))

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "http":
            name = _host_name(header(scope, b"host"))
            if name and name not in self._names and not name.endswith(self._ends or ("\n",)) and not is_address(name):
                message = (
                    f"This server does not serve the host name {name[:100]!r}. The operator can allow it with --allowed-hosts."
                )
                await WrongHost(message).response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host_name(header: str) -> str:
    """The name or address in a Host header, without the port."""
    header = header.strip().lower()
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0].rstrip(".")


def is_address(text: str | bytes) -> bool:
    """Whether this is an IP address: IPv4 with or without a port, or IPv6, which must be in brackets if it has a port."""
    text = text.decode("latin-1").strip() if isinstance(text, bytes) else text
    found = ADDRESS.fullmatch(text)
    if found is None:
        return False
    name = found["v4"] or found["bracketed"] or found["bare"]
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in name else socket.AF_INET, name)
    except (OSError, ValueError):
        return False
    return True


PEEKED_KEY = re.compile(rb"\r\n(?:authorization: *bearer +|x-api-key: *)(\S+)[ \t]*\r\n", re.IGNORECASE)


class ClientNames:
    """`client_of(sent, address)` names the client of a connection: a known key in the bytes that it has sent, or the address.

    The name decides only whose turn it is and gives no access, so not every form of sending a key need be recognised.
    """

    def __init__(self, keys: tuple[str, ...]):
        self._known = {hashlib.sha256(key.encode()).digest() for key in keys}

    def __call__(self, sent: bytes, address: str) -> str:
        found = PEEKED_KEY.search(sent) if self._known else None
        if found and (digest := hashlib.sha256(found[1]).digest()) in self._known:
            return digest.hex()
        return network_of(address)


class Clients:
    """Identifies the client of a request, and opens the request's bill (costs.py).

    A client is one of the keys or, without a valid key, the address that the request comes from.
    """

    def __init__(self, app: asgi.ASGIApp, keys: tuple[str, ...], costs: Costs):
        self._app = app
        self._costs = costs
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        if self._hashes:
            digest = hashlib.sha256(_credential(Headers(scope=scope))).digest()
            # sum() compares with every key, so the time does not tell which key matches
            if sum(hmac.compare_digest(digest, known) for known in self._hashes):
                state["key"] = digest.hex()
        state["bill"] = self._costs.open(state.get("key") or network_of(_address(scope)))
        await self._app(scope, receive, send)


class Keys:
    """Answers 401 unless `Clients` has found one of the keys. The open paths need no key."""

    def __init__(self, app: asgi.ASGIApp, open_paths: frozenset[str]):
        self._app = app
        self._open = open_paths

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open and "key" not in scope["state"]:
            error = Unauthorized("A valid API key is required. Send the header Authorization: Bearer KEY.")
            response = error.response(scope)
            if "text/html" in header(scope, b"accept"):
                response.headers["www-authenticate"] = 'Basic realm="fa_serve: the password is an API key"'
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


class WeightVersion:
    """Adds the header x-weight-version to every response: the version of the weights when the response began.

    version: returns the version of the weights, or None while there is no engine
    """

    def __init__(self, app: asgi.ASGIApp, version: Callable[[], int | None]):
        self._app = app
        self._version = version

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        async def send_with_version(message: asgi.Message) -> None:
            if message["type"] == "http.response.start" and (version := self._version()) is not None:
                message["headers"] = [*message.get("headers", ()), (b"x-weight-version", str(version).encode())]
            await send(message)

        await self._app(scope, receive, send_with_version)


def _credential(headers: Headers) -> bytes:
    """The key, from Authorization or, without that header, from x-api-key, which is Anthropic's."""
    if "authorization" not in headers:
        return headers.get("x-api-key", "").encode("latin-1")
    scheme, _, value = headers["authorization"].partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # headers are decoded as latin-1
    with suppress(ValueError):
        if scheme.lower() == "basic":
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


class ReceivedBody:
    """The bytes of one body that have arrived and are not parsed yet. `release` gives them back.

    owner: the client that sends it, by its key or its address
    """

    def __init__(self, held: BytesInFlight, owner: str):
        self._held = held
        self.owner = owner
        self.size = 0

    def add(self, size: int) -> None:
        self._held.add(self.owner, size)
        self.size += size

    def release(self) -> None:
        self._held.give_back(self.owner, self.size)
        self.size = 0


class BytesInFlight:
    """The bytes of all bodies that have not been parsed, at most `limit`. One owner may have half of them."""

    def __init__(self, limit: int):
        self._limit = limit
        self._by_owner: Counter[str] = Counter()
        self._total = 0

    def add(self, owner: str, size: int) -> None:
        """Add the bytes. Raises TooManyRequests above a limit, and then adds nothing."""
        if self._by_owner[owner] + size > self._limit // 2 or self._total + size > self._limit:
            message = (
                f"All bodies being read may total at most {self._limit} bytes, and those of one client at most half of that "
                "(--max-body-bytes-in-flight). Try again later."
            )
            raise TooManyRequests(message, code="too_many_body_bytes", retry_after=1)
        self._by_owner[owner] += size
        self._total += size

    def give_back(self, owner: str, size: int) -> None:
        self._total -= size
        self._by_owner[owner] -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class BodyLimit:
    """Answers 413 if a body is above the limit: at once if it announces its length, or else while it is read.

    in_flight: bytes that all bodies may have together until they are parsed; more get a 429
    """

    def __init__(self, app: asgi.ASGIApp, limit: int, in_flight: int):
        self._app = app
        self._limit = limit
        # bytes; a body up to this size that arrives in one piece is not counted here, because it does not wait for more pieces
        self._uncounted = min(limit, SMALL_BODY)
        self._in_flight = BytesInFlight(in_flight)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._too_large().response(scope)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        body = state["received_body"] = ReceivedBody(self._in_flight, state.get("key") or _address(scope))

        async def receive_counted() -> asgi.Message:
            event = await receive()
            size = len(event.get("body", b""))
            if size and (body.size or size > self._uncounted or event.get("more_body")):
                if body.size + size > self._limit:
                    raise self._too_large()
                body.add(size)
            return event

        try:
            await self._app(scope, receive_counted, send)
        finally:
            if body.size:
                body.release()

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body must have at most {self._limit} bytes (--max-body-bytes), got more.")


def header(scope: asgi.Scope, name: bytes) -> str:
    """The value of the first header with this name, in lower case, or "". Starlette's `Headers` takes four times as long."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return ""


def network_of(address: str) -> str:
    """The address or, for IPv6, its network of 2^64 addresses, because one customer gets such a network."""
    if ":" not in address:
        return address
    try:
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()
    except (OSError, ValueError):
        return address


def _address(scope: asgi.Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "unknown"
