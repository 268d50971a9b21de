"""Connections are taken from the kernel's queue in turns with everything else, and the newest first.

    acceptor = Acceptor(listener, make_protocol, table)      # in place of `loop.create_server`
    acceptor.start()

libuv accepts until the kernel's queue is empty, and prepares each connection at once, which takes about 130 us. A client that
opens 1,500 silent connections at once thus stops the event loop for 200 ms, and one that goes on stops it for as long. Here a
turn takes what the queue holds without preparing it, about 10 us each, and prepares a few. The newest come first: a client
that has just connected then waits for a few others, however many stand in the queue. Of what exceeds the limit of connections,
the oldest that has not sent a whole request gives way, before anything was spent on it, as an open connection does that has not
(protocol.py). Those whose request is whole are kept, and get half of each turn, so that neither they nor the newest wait for
all of the others. Source: adaptive LIFO, Maurer, "Fail at Scale", ACM Queue 13(8), 2015.

Left out: what an open connection may cost (protocol.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from .protocol import ConnectionTable

TAKE_SECONDS = 0.01
"""How long a turn takes connections from the kernel's queue at most."""
TURN = 16
"""Connections that a turn prepares, about 2 ms."""
PAUSE_SECONDS = 0.001
"""Until the next attempt after the system has refused a connection, such as for want of files. A connection that has ended
keeps its file until the event loop has closed it, so that under a crowd the next turn has files again."""
LONGEST_PAUSE = 0.064
"""What the pause doubles to while the system refuses."""
PEEKED = 1 << 16
"""Bytes of a request that are looked at. One that is larger is never whole before it is read."""
LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER, on and 0 seconds: closing resets the connection, so that nothing of it stays in the kernel."""


class Acceptor:
    """Takes connections from `listener`, a listening socket, until `close`. Has what uvicorn asks of an asyncio.Server.

    make_protocol: the protocol of a new connection
    table:         how many connections there may be
    """

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], table: ConnectionTable):
        self.sockets = [listener]
        self._listener = listener
        self._make_protocol = make_protocol
        self._table = table
        self._taken: deque[socket.socket] = deque()  # not yet prepared, the oldest first
        self._whole: deque[socket.socket] = deque()  # those among the oldest that have sent a whole request
        self._opening: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._pause = PAUSE_SECONDS
        self._closed = False

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._take)

    def _take(self) -> None:
        """A turn that the kernel asks for: there are connections in its queue."""
        idle = not self._taken and not self._whole
        end = time.perf_counter() + TAKE_SECONDS
        while time.perf_counter() < end and self._make_room():
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # the process or the system has no more files or memory
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(self._pause, self._resume)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                break
            self._pause = PAUSE_SECONDS
            self._taken.append(connection)
        if idle:
            self._open()

    def _make_room(self) -> bool:
        """Whether one more may be taken. If there are too many, the oldest without a whole request gives way.

        While the server works on the request of every connection, nothing gives way, and the next turns refuse with an answer
        those that are taken.
        """
        if len(self._taken) + len(self._whole) <= max(self._table.room - len(self._opening), TURN):
            return True
        while self._taken and not self._table.is_busy:
            oldest = self._taken.popleft()
            if not _is_whole(oldest):
                _reset(oldest)
                self._table.give_way()
                return True
            self._whole.append(oldest)
        return False

    def _open(self) -> None:
        """A turn that prepares connections."""
        for number in range(min(TURN, len(self._taken) + len(self._whole))):
            first, second = (self._taken, self._whole) if number % 2 else (self._whole, self._taken)
            task = self._loop.create_task(self._prepare((first or second).pop()))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        if self._taken or self._whole:
            self._loop.call_soon(self._open)

    async def _prepare(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left
            connection.close()

    def _resume(self) -> None:
        self._retry = None
        if not self._closed:
            self._loop.add_reader(self._listener, self._take)

    def close(self) -> None:
        """Take no more connections, close the listening socket, and reset those that are not prepared."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._taken or self._whole:
            _reset((self._whole or self._taken).pop())

    async def wait_closed(self) -> None:
        """Wait for connections that are being prepared."""
        if self._opening:
            await asyncio.wait(self._opening)


def _is_whole(connection: socket.socket) -> bool:
    """Whether the client has sent a request to its end, as far as that can be told without a parser."""
    try:
        came = connection.recv(PEEKED, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # nothing has come, or the client has left
        return False
    head, end, body = came.partition(b"\r\n\r\n")
    if not end:
        return False
    if length := LENGTH.search(head + b"\r\n"):
        return len(body) >= int(length[1])
    return not CHUNKED.search(head) or body.endswith(b"0\r\n\r\n")


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
