"""Connections are taken from the kernel's queue in turns with everything else, and their clients take turns.

    acceptor = Acceptor(listener, make_protocol, table, client_of)      # in place of `loop.create_server`
    acceptor.start()

libuv accepts until the kernel's queue is empty, and prepares each connection at once, which takes about 130 us, and up to a
millisecond with the request that comes with it. A client that opens 1,500 silent connections at once thus stops the event loop
for 200 ms, and one that goes on stops it for as long. Here a turn takes what the queue holds without preparing it, about 10 us
each, and prepares a few: those of each client in turns (crowd.py). Of what exceeds the limit of connections, the oldest that
has not sent a whole request gives way, before anything was spent on it, as an open connection does that has not (protocol.py).

Left out: what an open connection may cost (protocol.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable

from .crowd import Crowd
from .protocol import ConnectionTable

TAKE_SECONDS = 0.01
"""How long a turn takes connections from the kernel's queue at most."""
TURN = 4
"""Connections that a turn prepares: 0.5 ms, or up to 4 ms with the requests that have come with them."""
HELD = 16
"""Connections that may be taken and not prepared in any case."""
PAUSE_SECONDS = 0.001
"""Until the next attempt after the system has refused a connection, such as for want of files. A connection that has ended
keeps its file until the event loop has closed it, so that under a crowd the next turn has files again."""
LONGEST_PAUSE = 0.064
"""What the pause doubles to while the system refuses."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER, on and 0 seconds: closing resets the connection, so that nothing of it stays in the kernel."""


class Acceptor:
    """Takes connections from `listener`, a listening socket, until `close`. Has what uvicorn asks of an asyncio.Server.

    make_protocol: the protocol of a new connection
    table:         how many connections there may be
    client_of:     whose connection it is, by the bytes that it has sent and by its address
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        table: ConnectionTable,
        client_of: Callable[[bytes, str], str],
    ):
        self.sockets = [listener]
        self._listener = listener
        self._make_protocol = make_protocol
        self._table = table
        self._crowd = Crowd(client_of)
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
        idle = not self._crowd
        end = time.perf_counter() + TAKE_SECONDS
        while time.perf_counter() < end and self._make_room():
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # the process or the system has no more files or memory
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(self._pause, self._resume)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                break
            self._pause = PAUSE_SECONDS
            self._crowd.put(connection, str(address[0]))
        if idle:
            self._open()

    def _make_room(self) -> bool:
        """Whether one more may be taken. If there are too many, the oldest without a whole request gives way.

        While the server works on the request of every connection, nothing gives way, and the next turns refuse with an answer
        those that are taken.
        """
        if len(self._crowd) <= max(self._table.room - len(self._opening), HELD):
            return True
        oldest = None if self._table.is_busy else self._crowd.drop()
        if oldest is None:
            return False
        _reset(oldest)
        self._table.give_way()
        return True

    def _open(self) -> None:
        """A turn that prepares connections."""
        for _ in range(min(TURN, len(self._crowd))):
            task = self._loop.create_task(self._prepare(self._crowd.get()))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        if self._crowd:
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
        while self._crowd:
            _reset(self._crowd.get())

    async def wait_closed(self) -> None:
        """Wait for connections that are being prepared."""
        if self._opening:
            await asyncio.wait(self._opening)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
