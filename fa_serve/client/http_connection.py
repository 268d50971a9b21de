"""A streaming HTTP connection that does as little as possible while it measures.

    exchange = await exchange_on_connection(url, key, body, idle)
    exchange.arrivals, exchange.tokens, exchange.error

A client in Python is easily slower than the server that it measures. Each connection is therefore one asyncio protocol over
httptools that only notes when events arrive. The events are parsed when the stream has ended, and the connection is used again,
as OpenAI's own client does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

DONE = b"[DONE]"


@dataclass
class Exchange:
    """One request and its answer.

    sent:     when the request was sent
    arrivals: when each event arrived; the last two events are the usage and [DONE]
    events:   the events themselves, until `parse` is called
    status:   the HTTP status, 0 if there was no answer
    tokens:   completion tokens, by the server's count
    error:    why the request failed, or None
    """

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    status: int = 0
    tokens: int = 0
    error: str | None = None

    def parse(self) -> None:
        """Find out whether the stream is complete and how many tokens it had. The events are dropped."""
        if self.error is None and self.status != 200:
            self.error = f"status {self.status}: {b''.join(self.events)[:200].decode(errors='replace')}"
        elif self.error is None and (len(self.events) < 2 or self.events[-1] != DONE):
            self.error = "the stream ended without [DONE]"
        elif self.error is None:
            self.tokens = int((json.loads(self.events[-2]).get("usage") or {}).get("completion_tokens", 0))
        self.events = []

    @property
    def token_arrivals(self) -> list[float]:
        return self.arrivals[:-2]


class Connection(asyncio.Protocol):
    """Sends one request after the other. httptools parses the responses and calls the `on_...` methods."""

    _ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods, but not the base class

    def send(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send a request and fill in the exchange. The future is done when the answer has ended."""
        self._exchange = exchange
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        exchange.sent = time.perf_counter()
        if self.usable:
            self._transport.write(request)
        else:
            self._ended.set_result(None)
        return self._ended

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._exchange.error = f"the answer is not HTTP: {error}"
            self._transport.close()

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        exchange = self._exchange
        if exchange.status != 200:
            exchange.events.append(body)
            return
        *lines, self._rest = (self._rest + body).split(b"\n\n")
        for line in lines:
            exchange.arrivals.append(now)
            exchange.events.append(line.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self._parser.should_keep_alive():
            self._end()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._answer_is_awaited():
            self._exchange.error = f"the connection was lost: {exc}"
        self._end()

    def _answer_is_awaited(self) -> bool:
        return self._ended is not None and not self._ended.done()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def exchange_on_connection(url: str, key: str | None, body: bytes, idle: list[Connection]) -> Exchange:
    """POST a body to /v1/completions on an idle connection, or on a new one if none is usable.

    idle: connections without a request; the connection is appended when the answer has ended
    """
    exchange = Exchange()
    address = urlsplit(url)
    try:
        connection = idle.pop() if idle else None
        if connection is None or not connection.usable:
            connection = await _connect(address)
        await connection.send(_request(address, key, body), exchange)
        if connection.usable:
            idle.append(connection)
    except OSError as error:
        exchange.error = f"no connection ({error.strerror or error})"
    exchange.parse()
    return exchange


def close_all(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()


async def _connect(address: SplitResult) -> Connection:
    secure = address.scheme == "https"
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection,
        address.hostname or address.netloc,
        address.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
    )
    return connection


def _request(address: SplitResult, key: str | None, body: bytes) -> bytes:
    lines = [
        f"POST {address.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body
