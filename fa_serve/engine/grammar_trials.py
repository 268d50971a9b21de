"""Grammars are compiled on trial in a process that can be limited and killed, before the engine compiles them itself.

    trials = GrammarTrials(tokenizer_json, vocab_size, end_ids, timeout=10.0, memory=256 << 20)
    trial = trials.trial()
    result = trial.run(grammar)              # raises TrialError if the grammar takes too much
    trial.cancel()                           # from any thread: the child is killed, and `run` raises Cancelled
    trials.close()

A matcher cannot be sent to another process, so the engine compiles a grammar that has passed once more. It then knows that this
takes less than `timeout` seconds and `memory` bytes, and how many bytes the grammar takes. Left out: the process itself
(grammar_process.py), and which grammar is tried next (grammar_queue.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from fa_serve.engine import grammar_process

START_SECONDS = 60.0
"""How long the process may take to load the tables of the tokenizer."""


class TrialError(Exception):
    """The grammar takes more than its limits allow. The text completes the sentence "<field> must ..."."""


class Cancelled(Exception):
    """The trial was cancelled."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """error: llguidance's reason why the grammar cannot be followed, or ""; num_bytes: what the grammar takes in memory"""

    error: str
    num_bytes: int


class GrammarTrials:
    """Owner of the process. It starts at the first trial. Safe to use from any thread.

    timeout: seconds for one grammar; memory: bytes for one grammar
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: list[int], *, timeout: float, memory: int) -> None:
        given = {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_ids": end_ids, "timeout": timeout, "memory": memory}
        self._given = json.dumps(given).encode() + b"\n"
        self.timeout = timeout
        self.memory = memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def trial(self) -> Trial:
        return Trial(self)

    def connect(self) -> socket.socket:
        """A connection to a new child. Starts the process if it is not running. Raises Cancelled after `close`."""
        with self._lock:
            if self._closed:
                raise Cancelled
            ours, theirs = socket.socketpair()
            with theirs:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            return ours

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            # With one arena, freed memory is used again, and the limit on the address space counts what is in use.
            self._process = subprocess.Popen(
                [sys.executable, grammar_process.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},
                start_new_session=True,  # Ctrl-C is for the server
            )
        self._control.settimeout(START_SECONDS)
        self._control.sendall(self._given)
        if self._control.recv(1) != b"r":
            raise RuntimeError("the process that compiles grammars did not start")

    def close(self) -> None:
        """End the process with all of its trials, at once. Later trials are cancelled: nobody would end their process."""
        with self._lock:
            self._closed = True
            if self._process is not None and self._control is not None:
                self._process.kill()  # its children end with it
                self._process.wait()
                self._control.close()
                self._process = None
                self._control = None


class Trial:
    """One trial. `cancel` may be called before, during and after `run`."""

    def __init__(self, trials: GrammarTrials) -> None:
        self._trials = trials
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes `run`

    def run(self, grammar: str) -> TrialResult:
        """Compile the grammar. Raises TrialError or Cancelled."""
        with self._trials.connect() as connection:
            with self._lock:
                if self.cancelled:
                    raise Cancelled
                self._connection = connection
            pid = 0
            reply = b""
            try:
                with contextlib.suppress(ConnectionError):  # the child has been killed
                    connection.settimeout(self._trials.timeout)
                    deadline = time.monotonic() + self._trials.timeout
                    pid = int(_line(connection) or 0)
                    connection.sendall(json.dumps(grammar).encode() + b"\n")
                    while True:
                        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                        data = connection.recv(1 << 16)
                        if not data:
                            break
                        reply += data
                result = None if not reply else json.loads(reply)
            except TimeoutError:
                raise TrialError(f"compile within {self._trials.timeout:g} seconds (--grammar-timeout)") from None
            except ValueError:  # half of a reply
                result = None
            finally:
                with self._lock:
                    self._connection = None
                if pid and not reply:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            if self.cancelled:
                raise Cancelled
            if result is None:
                raise TrialError(
                    f"compile within {self._trials.memory} bytes (--grammar-memory) and {self._trials.timeout:g} seconds "
                    "(--grammar-timeout)"
                )
            return TrialResult(result["error"], result["bytes"])


def _line(connection: socket.socket) -> bytes:
    """The first line that comes, byte by byte, because what follows it is read by others."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            break
        line += data
    return line
