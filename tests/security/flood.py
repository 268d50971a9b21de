"""A client that keeps connections busy: each sends its request again as soon as the last answer has come.

    flood = Flood(url, [request], connections=20)            # a separate process; requests are bytes, head and body
    ...
    counts = flood.stop()                                    # {"200": 1234, "404": 7, "closed": 0}

A thread of the tests that speaks HTTP through a library sends a hundred requests a second. This process sends thousands, so
that the server is what is measured. It runs at a low priority, because an attacker has another machine. Run as a script, this
file is that process; it imports nothing outside the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

NICE = 5
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Flood:
    """connections: how many send at once. source: the address that they come from. reconnect: each request has a new one."""

    def __init__(
        self, url: str, requests: Sequence[bytes], connections: int = 20, source: str = "127.0.0.1", reconnect: bool = False
    ):
        command = [sys.executable, "-I", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        address = urlsplit(url)
        given = {
            "address": [address.hostname, address.port],
            "requests": [base64.b64encode(each).decode() for each in requests],
            "connections": connections,
            "source": source,
            "reconnect": reconnect,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()

    def stop(self) -> dict[str, int]:
        """How many answers of each status came. `closed` counts connections that the server ended in place of an answer."""
        try:
            printed, _ = self._process.communicate("", timeout=30)
        finally:
            self._process.kill()
            self._process.wait()
        return json.loads(printed)


class _Connection:
    """One connection, which is opened again when it ends."""

    def __init__(self, address: tuple[str, int], source: str, messages: itertools.cycle[bytes], reconnect: bool):
        self._address = address
        self._source = source
        self._messages = messages
        self._reconnect = reconnect
        self._unsent = memoryview(b"")
        self._received = b""
        self.open()

    def open(self) -> None:
        self.socket = socket.socket()
        self.socket.bind((self._source, 0))
        self.socket.connect(self._address)
        self.socket.setblocking(False)
        self.send_next()

    def send_next(self) -> None:
        self._received = b""
        self._unsent = memoryview(next(self._messages))
        self.write()

    def write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def read(self) -> str | None:
        """The status of an answer that is whole, "closed", or None."""
        try:
            piece = self.socket.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if not piece:
            self.socket.close()
            self.open()
            return "closed"
        self._received += piece
        head, gap, body = self._received.partition(b"\r\n\r\n")
        found = LENGTH.search(head)
        if not gap or (found and len(body) < int(found[1])) or (found is None and not body.endswith(b"0\r\n\r\n")):
            return None
        status = head[9:12].decode()
        if self._reconnect:
            self.socket.close()
            self.open()
        else:
            self.send_next()
        return status


def _main() -> None:
    os.nice(NICE)
    given = json.loads(sys.stdin.readline())
    messages = itertools.cycle(base64.b64decode(each) for each in given["requests"])
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    counts: Counter[str] = Counter()
    selector = selectors.DefaultSelector()

    def register(connection: _Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
        selector.register(connection.socket, events, connection)

    for _ in range(given["connections"]):
        register(_Connection(tuple(given["address"]), given["source"], messages, given["reconnect"]))
    while not stopped.is_set():
        for key, events in selector.select(0.1):
            connection = key.data
            selector.unregister(key.fileobj)
            with contextlib.suppress(OSError):
                if events & selectors.EVENT_WRITE:
                    connection.write()
                if events & selectors.EVENT_READ and (status := connection.read()):
                    counts[status] += 1
            register(connection)
    print(json.dumps(counts))


if __name__ == "__main__":
    _main()
