"""Rank 0's links to its followers: a pipe to a child process on this machine, or a connection to a process of torchrun.

    links = start_children(size=2)               # or Torchrun.accept (torchrun.py)
    links[0].connection.send(Hello(config, rank=1, host="127.0.0.1", port=port, num_threads=4))
    links[0].kill()

Both are a `Connection` of multiprocessing, so the ranks talk through one kind of object wherever they run. Left out: what they
say (leader.py, follower.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from fa_serve import __version__
from fa_serve.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message to a follower.

    host, port:  of the store through which the ranks set up their sums
    num_threads: how many threads PyTorch uses, which may change the last bits of a result
    version:     of fa_serve, which must be the same on all machines
    """

    config: EngineConfig
    rank: int
    host: str
    port: int
    num_threads: int
    version: str = __version__


@dataclass(slots=True)
class Link:
    """Rank 0's end of the link to a follower.

    process: the follower, if it is a child of this process; None if torchrun has started it
    host:    the address of the follower's machine, if torchrun has started it
    replies: what the follower has sent
    closed:  set when the follower's end of the connection is closed
    """

    rank: int
    connection: Connection
    process: subprocess.Popen[bytes] | None = None
    host: str = ""
    replies: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    closed: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Wait until the follower has ended, for at most `seconds`."""
        if self.process is None:
            self.closed.wait(seconds)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def describe_end(self, size: int) -> str:
        """How the follower, one of `size` ranks, has ended."""
        if self.process is None:
            return f"rank {self.rank} of {size} on {self.host} has ended, or its machine cannot be reached"
        return f"rank {self.rank} of {size} ended with exit code {self.process.returncode}"

    def kill(self) -> None:
        """End the follower at once. A process of another machine ends by itself when its connection closes."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        elif not self.connection.closed:
            # closing is not enough while a thread reads: the other machine would not be told
            with socket.socket(fileno=os.dup(self.connection.fileno())) as raw, contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def start_children(size: int, links: list[Link]) -> None:
    """Start ranks 1 to size - 1 as processes of this machine. Each is put into `links` as soon as it runs."""
    for rank in range(1, size):
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "fa_serve.engine.parallel.follower_main", str(theirs.fileno())]
            # a module in the working directory must not take the place of an installed one; one progress bar is enough
            environment = os.environ | {"PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        links.append(Link(rank, ours, process))


def kill_all(links: Iterable[Link]) -> None:
    """End followers at once."""
    for link in links:
        link.kill()
