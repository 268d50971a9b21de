"""Answers clients that close their side of the connection after the request, as `nc -N` does, and still wait for the answer.

uvicorn takes the end of a client's data to mean that the client has left. TCP announces both in the same way; the only
difference is that a client that has left answers data with a reset. So the connection stays open while a request is answered.
Until the answer begins, the server sends an interim response, 100 Continue, every PROBE_SECONDS; HTTP/1.1 lets a server send it
at any time. A client that has left then resets the connection, and its sequences are aborted.

On systems other than Linux, where the state of a connection is not available, and for HTTP/1.0, which has no interim responses,
everything works as in uvicorn.
"""

from __future__ import annotations

import socket
import sys

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

PROBE_SECONDS = 0.5
TCP_CLOSE = 7  # linux/include/net/tcp_states.h


class HalfClosedProtocol(HttpToolsProtocol):
    """uvicorn's `cycle` is the newest request. While that request waits in the pipeline, `_first` is the one being answered."""

    _first: RequestResponseCycle | None = None

    @property
    def answered(self) -> RequestResponseCycle | None:
        """The request that is being answered, or was answered last."""
        return self._first if self.pipeline else self.cycle

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        self._first = before if self.pipeline else None

    def connection_lost(self, exc: Exception | None) -> None:
        answered = self.answered
        super().connection_lost(exc)
        # uvicorn tells only the newest request that the client has left
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection open for writing."""
        answered = self.answered
        if answered is None or answered.response_complete or answered.more_body:
            return None
        if sys.platform != "linux" or answered.scope["http_version"] != "1.1":
            return None
        if self.cycle.more_body:  # a pipelined request that will never be whole
            self.pipeline.clear()
            self.cycle = answered
        self.cycle.keep_alive = False
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def _probe(self) -> None:
        """Make a client that has left reset the connection, and check whether it has done so."""
        cycle = self.answered
        assert cycle is not None
        if cycle.response_complete or cycle.disconnected or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
            return
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(PROBE_SECONDS, self._probe)
