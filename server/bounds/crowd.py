"""Connections that have been taken from the kernel and are not yet prepared: which is next, and which gives way.

    crowd = Crowd(client_of)              # client_of(sent, address) names the client, from the bytes that it has sent
    crowd.put(connection, address)
    connection = crowd.get()              # the clients take turns
    connection = crowd.drop()             # a connection of the client that has the most

A client is a key that the server knows or, without such a key, an address. `get` takes the newest and the oldest connection of
a client alternately: the newest, so that a connection that has just arrived waits for only a few others; and the oldest,
because otherwise older connections would never be prepared while more arrive than the server can prepare. Source: adaptive
LIFO, Maurer, "Fail at Scale", ACM Queue 13(8), 2015.
"""

from __future__ import annotations

import re
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

PEEKED = 1 << 14
"""How many bytes are read without taking them out of the kernel. A larger request counts as not whole."""
LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
ESTABLISHED = 1
"""The first byte of Linux's TCP_INFO while neither side has ended the connection."""


@dataclass(slots=True)
class _Client:
    """The connections of one client.

    connections: the oldest first
    kept:        older connections, whose requests `Crowd.drop` has found to be whole
    newest:      whether the newest connection is next
    """

    connections: deque[socket.socket] = field(default_factory=deque)
    kept: deque[socket.socket] = field(default_factory=deque)
    newest: bool = True

    def get(self) -> socket.socket:
        self.newest = not self.newest
        if not self.newest and self.connections:
            return self.connections.pop()
        return (self.kept or self.connections).popleft()

    def __bool__(self) -> bool:
        return bool(self.connections or self.kept)


class Crowd:
    """client_of: names the client of a connection, from the bytes that it has sent so far and its address"""

    def __init__(self, client_of: Callable[[bytes, str], str]):
        self._client_of = client_of
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the client whose turn is next comes first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, connection: socket.socket, address: str) -> None:
        name = self._client_of(_sent(connection), address)
        self._clients.setdefault(name, _Client()).connections.append(connection)
        self._count += 1

    def get(self) -> socket.socket:
        """Take out the next connection. Raises StopIteration if there is none."""
        name = next(iter(self._clients))
        client = self._clients[name]
        connection = client.get()
        self._count -= 1
        if client:
            self._clients.move_to_end(name)
        else:
            del self._clients[name]
        return connection

    def drop(self) -> socket.socket | None:
        """Take out a connection of the client with the most: the oldest whose request is not whole or whose client has left.

        None if there is no such connection.
        """
        while self._count:
            name, client = max(self._clients.items(), key=lambda each: len(each[1].connections))
            if not client.connections:
                return None
            oldest = client.connections.popleft()
            if _has_left(oldest) or not is_whole(_sent(oldest)):
                self._count -= 1
                if not client:
                    del self._clients[name]
                return oldest
            client.kept.append(oldest)
        return None


def is_whole(sent: bytes) -> bool:
    """Whether this is a complete request, as far as that can be told without a parser."""
    head, end, body = sent.partition(b"\r\n\r\n")
    if not end:
        return False
    if length := LENGTH.search(head + b"\r\n"):
        return len(body) >= int(length[1])
    return not CHUNKED.search(head) or body.endswith(b"0\r\n\r\n")


def _sent(connection: socket.socket) -> bytes:
    try:
        return connection.recv(PEEKED, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # nothing has arrived, or the client has left
        return b""


def _has_left(connection: socket.socket) -> bool:
    """Whether the client has ended its side."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
    except OSError:
        return True
