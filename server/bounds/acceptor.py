"""Takes connections from the kernel's queue in short turns, between the event loop's other work. Clients take turns as well.

    acceptor = Acceptor(listener, make_protocol, table, client_of)      # instead of `loop.create_server`
    acceptor.start()

libuv accepts connections until the kernel's queue is empty, and prepares each one at once. This takes about 130 us, or up to a
millisecond with the request that arrives with the connection. A client that opens 1,500 silent connections at once thus stops
the event loop for 200 ms, and a client that keeps opening connections stops it for as long as it does so. Here, a turn takes
connections from the queue without preparing them, which costs about 10 us each. It then prepares a few of them, from each
client in turn (crowd.py). If there are more connections than the limit, the oldest one that has not sent a whole request gives
way before anything is spent on it. Open connections without a whole request give way in the same manner (protocol.py).

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
"""The longest time for which a turn takes connections from the kernel's queue."""
TURN = 4
"""Connections that a turn prepares. This takes 0.5 ms, or up to 4 ms with the requests that have arrived with them."""
HELD = 16
"""This many connections may wait to be prepared even if there is no room for them."""
PAUSE_SECONDS = 0.001
"""The pause until the next attempt after the system has refused a connection, for example because it has no file descriptors
left. A connection that has ended keeps its descriptor until the event loop has closed it, so even when many clients connect
at once there are descriptors again in the next turn."""
LONGEST_PAUSE = 0.064
"""The pause doubles up to this value while the system keeps refusing."""
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER: on, 0 seconds. Closing then resets the connection, so that the kernel keeps nothing of it."""


class Acceptor:
    """Takes connections from `listener`, a listening socket, until `close`. Has what uvicorn needs of an asyncio.Server.

    make_protocol: makes the protocol of a new connection
    table:         the open connections and their limit
    client_of:     names the client of a connection, from the bytes that it has sent and its address
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
        """Start taking connections. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._take)

    def _take(self) -> None:
        """Take connections from the kernel's queue. The event loop calls this when there are connections in the queue."""
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
        """Whether one more connection may be taken. If too many wait, the oldest without a whole request gives way.

        While the server works on the request of every open connection, none gives way. The connections that have been taken
        then get a 503 when they are prepared.
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
        """Prepare the next TURN connections, and go on in the next iteration of the event loop."""
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
        """Take no more connections, close the listening socket, and reset the connections that are not yet prepared."""
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
