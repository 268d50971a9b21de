"""What a connection may cost before its request reaches the application: bytes, seconds and the connection itself.

    protocol = partial(BoundedProtocol, bounds=ConnectionBounds.of(settings), table=ConnectionTable(limit, count))
    uvicorn.Config(app, http=protocol)

uvicorn's parser in C has no limit for the head of a request, reads a URL in quadratic time, queues pipelined requests without
end, and waits forever for a client that sends nothing. This subclass of its protocol counts what arrives, and refuses with
OpenAI's error object. Everything else stays uvicorn's. A request that arrives in one piece costs no timer.

- The URL, the head, and the bytes of a body on the wire (a chunk of one byte takes six) are bounded: 414, 431, 413. A body in
  very small chunks is refused with 400.
- The head and the body have a deadline: 408. Time in which the server does not read does not count, for example while a
  pipelined body waits for a long answer. A connection that has sent nothing is closed without a reply.
- One request may be pipelined after the one that is being answered. If there are more, the connection ends after these two.
- A body whose request was answered before it arrived is read to its end, because most clients send all of it before they read
  the answer. Like all large bodies it is read in turns with the others (read_turns.py).
- Only addresses are kept in X-Forwarded-For. uvicorn believes this header if it comes from a trusted proxy; the address is
  then written to the log, and is charged for the request.
- The number of connections is limited, and stays below the process's limit of open files. At the limit, the connection for
  which the server has waited longest gives way: it is silent, idle, or in the middle of a request. If the server waits for
  none, the new connection gets a 503.
"""

from __future__ import annotations

import logging
import resource
import time
from asyncio import BaseTransport, TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from pydantic_core import to_json

from ..errors import HttpError
from ..settings import Settings
from .guard import is_address
from .half_closed import HalfClosedProtocol
from .read_turns import FairFlow, ReadTurns

log = logging.getLogger("fa_serve.server")
LOG_SECONDS = 60.0  # between two log lines about too many connections
FRAMING_BYTES = 1 << 20  # what the framing of a chunked body may take on the wire
SMALL_PIECE = 64  # the least average bytes of a chunk, because the parser calls Python for each chunk
FREE_PIECES = 1024  # chunks of a body that may be smaller
LINGER_SECONDS = 1.0  # time for a client that is still sending to read that it was refused
LINGER_BYTES = 1 << 20
PAUSE_SECONDS = 0.1  # the least time between two checks of a deadline that has moved because the server did not read
FORWARDED = b"x-forwarded-for"
OWN_FILES = 64  # open files that are not connections: the engine's, the event loop's, logs, libraries


@dataclass(frozen=True)
class ConnectionBounds:
    """Bytes and seconds, by the names of the settings."""

    url_bytes: int
    header_bytes: int
    body_bytes: int
    header_timeout: float
    body_timeout: float

    @classmethod
    def of(cls, settings: Settings) -> ConnectionBounds:
        return cls(
            settings.max_url_bytes,
            settings.max_header_bytes,
            settings.max_body_bytes + FRAMING_BYTES,
            settings.header_timeout,
            settings.body_timeout,
        )


def connection_limit(wanted: int | None) -> int:
    """The number of connections that the limit of open files leaves room for, or `wanted` if that is less."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = 1 << 20
    # connections that are being closed keep their files for a moment, hence a quarter
    room = max(files - max(OWN_FILES, files // 4), 1)
    return room if wanted is None else min(wanted, room)


class ConnectionTable:
    """The open connections of a server, at most `limit`. `count(reason)` counts those that were refused or gave way."""

    def __init__(self, limit: int, count: Callable[[str], None]):
        self._limit = limit
        self.count = count
        self.turns = ReadTurns()
        self._open: set[BoundedProtocol] = set()
        # the connections for which the server waits; the one that has waited longest comes first
        self._waiting: dict[BoundedProtocol, None] = {}
        self._logged = float("-inf")

    @property
    def room(self) -> int:
        """How many more connections there may be before others have to give way."""
        return self._limit - len(self._open)

    @property
    def is_busy(self) -> bool:
        """Whether there is no room, and the server works on the request of every connection."""
        return self.room <= 0 and not self._waiting

    def admit(self, connection: BoundedProtocol) -> bool:
        if self.room <= 0:
            if self.is_busy:
                self._log()
                return False
            longest = next(iter(self._waiting))
            self.leave(longest)
            self.give_way()
            longest.transport.abort()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def works(self, connection: BoundedProtocol) -> None:
        """Record that the connection's request is whole, and that the server works on it."""
        self._waiting.pop(connection, None)

    def waits(self, connection: BoundedProtocol) -> None:
        """Record that the connection's request has been answered, and that the server waits for the next one."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def give_way(self) -> None:
        """Count and log a connection that ends because there are too many."""
        self.count("gave_way")
        self._log()

    def leave(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning(
                "all %d connections are in use (--max-connections, or the limit of open files): new ones replace idle ones; "
                "%d are idle",
                self._limit,
                len(self._waiting),
            )


class RefusedError(Exception):
    """Raised in a callback of the parser, to end the parsing of the data that has arrived."""


class BoundedProtocol(HalfClosedProtocol):
    def __init__(self, *, bounds: ConnectionBounds, table: ConnectionTable, **given: Any):
        super().__init__(**given)
        self._bounds = bounds
        self._table = table
        self._timer: TimerHandle | None = None
        self._deadline = 0.0  # on time.monotonic's clock; the seconds in which the server does not read are added to it
        self._on_wire = 0  # bytes of the current message
        self._head = 0  # bytes of its headers
        self._pieces = 0  # chunks of its body
        self._head_is_whole = False
        self._is_whole = True
        self._said_anything = False
        self._ignores_input = False  # nothing that arrives is parsed
        self._dropped = 0  # bytes that have arrived since then

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow: FairFlow = FairFlow(self.transport, self._table.turns)
        if self._table.admit(self):
            self._set_timer(self._bounds.header_timeout)
        else:
            self._refuse(503, "too_many_connections", "The server has too many connections. Try again later.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.leave(self)
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._said_anything = True
        self._is_whole = False
        self._on_wire += len(data)
        try:
            self.parser.feed_data(data)
            self._check_bytes_on_wire()
        except RefusedError:
            return
        except httptools.HttpParserUpgrade:
            self._is_whole = True
        except httptools.HttpParserError:
            if not self._ignores_input:  # the parser raises this error, too, if a callback raises any
                self._refuse(400, "invalid_http", "The request is not valid HTTP.")
            return
        if self._is_whole:
            self._disarm()
            return
        if self._timer is None:
            seconds = self._bounds.body_timeout if self._head_is_whole else self._bounds.header_timeout
            self._set_timer(seconds)
        if self._is_answered():  # what follows is discarded
            self.flow.pause_reading()
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._on_wire = self._head = self._pieces = 0
        self._head_is_whole = self._is_whole = False

    def on_url(self, url: bytes) -> None:
        limit = self._bounds.url_bytes
        if len(self.url) + len(url) > limit:
            self._refuse(414, "url_too_long", f"The URL must have at most {limit} bytes (--max-url-bytes), got more.")
            raise RefusedError
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value) + 4  # a colon, a space and the end of the line
        if self._head > self._bounds.header_bytes:
            self._refuse_head()
            raise RefusedError
        if name.lower() == FORWARDED:
            value = b", ".join(each for each in value.split(b",") if is_address(each))
            if not value:
                return
        if not self._head_is_whole:  # else it is a trailer, which nothing reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if fault := self._fault():
            self._refuse(400, "invalid_http", fault)
            raise RefusedError
        self._head_is_whole = True
        self._disarm()
        if self.pipeline:
            self.cycle.keep_alive = False  # the last request that will be answered
            self._ignores_input = True
            self._table.count("pipelined")
            raise RefusedError
        super().on_headers_complete()

    def _fault(self) -> str | None:
        """Something in the head that the parser accepts and that a proxy in front may read differently, or None.

        Source: RFC 9112, 2.3, 3.2 and 6.1.
        """
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return f"The version of HTTP must be 1.0 or 1.1, got {version}."
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            return f"The request must have one Host header, got {hosts}."
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (version == "1.0" or codings != [b"chunked"]):
            return "Transfer-Encoding must be chunked, and absent in HTTP/1.0."
        return None

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        if self._pieces > FREE_PIECES + self._on_wire // SMALL_PIECE:
            self._refuse(
                400, "chunks_too_small", f"The chunks of a body must have at least {SMALL_PIECE} bytes on average, got less."
            )
            raise RefusedError
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_whole = True
        if self.cycle.response_complete:  # the answer did not wait for the body
            self._table.waits(self)
        else:
            self._table.works(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._table.waits(self)

    def _check_bytes_on_wire(self) -> None:
        if self._is_whole:
            return
        if not self._head_is_whole and self._on_wire > self._bounds.header_bytes + self._bounds.url_bytes:
            self._refuse_head()
            raise RefusedError
        if self._on_wire > self._bounds.body_bytes + self._bounds.header_bytes + self._bounds.url_bytes:
            limit = self._bounds.body_bytes
            message = f"The body must have at most {limit} bytes on the wire (--max-body-bytes and its framing), got more."
            self._refuse(413, "request_too_large", message)
            raise RefusedError

    def _refuse_head(self) -> None:
        limit = self._bounds.header_bytes
        message = f"The headers must have at most {limit} bytes (--max-header-bytes), got more."
        self._refuse(431, "headers_too_large", message)

    def _is_answered(self) -> bool:
        """Whether the answer was complete before the body."""
        return self._head_is_whole and not self._is_whole and bool(self.cycle.response_complete)

    def _late(self) -> None:
        """The head or the body has not arrived in time."""
        self._timer = None
        left = self._deadline + self.flow.paused_seconds - time.monotonic()
        if left > 0:
            self._timer = self.loop.call_later(max(left, PAUSE_SECONDS), self._late)
        elif self._is_answered():
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete and not self._head_is_whole:
            # the beginning of a pipelined request; the answer before it goes on
            self._set_timer(self._bounds.header_timeout)
        elif not self._said_anything:
            self._table.count("silent")
            self.transport.close()
        elif self._head_is_whole:
            seconds = self._bounds.body_timeout
            self._refuse(408, "body_timeout", f"The body must arrive within {seconds:g} s (--body-timeout).")
        else:
            seconds = self._bounds.header_timeout
            self._refuse(408, "header_timeout", f"The headers must arrive within {seconds:g} s (--header-timeout).")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Send an error and close the connection.

        If an answer has begun, or an earlier request still waits for its answer, the connection is cut off without the error.
        """
        self._ignores_input = True
        self._disarm()
        self._table.count(code)
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_answering and (cycle.response_started or not cycle.more_body)):
            self.transport.abort()
            return
        if is_answering:
            cycle.disconnected = True  # the application sees this instead of the rest of the body
            cycle.message_event.set()
        path = (self.scope or {}).get("path", "")  # absent before the head is whole, and for a URL that is not valid
        content = to_json(HttpError(status, message, code=code).body(path))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        retry = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{retry}content-length: {len(content)}\r\n\r\n".encode() + content)
        if status == 503:
            self.transport.close()
            return
        # if the connection were closed at once, it would be reset when the client sends more, and the answer would be lost
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _set_timer(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds - self.flow.paused_seconds
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
