"""Work on what a client has sent runs on trial: in a process that can be limited and killed.

    limits = TrialLimits("compile", timeout=10.0, memory=256 << 20, setting="grammar")
    trials = Trials(grammar_process.__file__, {"tokenizer": ...}, limits, stack=grammar_process.STACK)
    trial = trials.trial()
    reply = trial.run(request)               # raises TrialError if the work takes too much
    trial.cancel()                           # from any thread: the child is killed, and `run` raises Cancelled
    trials.close()

Three kinds of work are tried. A matcher cannot be sent to another process, so the engine compiles a grammar that has passed
once more (fa_serve/engine/structured/grammars.py, grammar_process.py). It then knows that this takes less than the limits, and
how many bytes the grammar takes. The chat template of a request is applied nowhere else (server/tokenization.py), and pictures
are decoded and processed nowhere else (server/images). Left out: the process itself (trial_process.py), and which request is
tried next.
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
from typing import Any

from fa_serve.sandbox import trial_process

START_SECONDS = 60.0
"""How long the process may take to load what the work needs."""


class TrialError(Exception):
    """The work takes more than its limits allow. The text completes the sentence "<field> must ..."."""


class Cancelled(Exception):
    """The trial was cancelled."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """verb: what the work does; timeout: seconds; memory: bytes; setting: the flags are --<setting>-timeout and -memory"""

    verb: str
    timeout: float
    memory: int
    setting: str

    def error(self, late: bool = False) -> TrialError:
        """late: the time is over. Otherwise the kernel has ended the work, for one of two reasons."""
        seconds = f"{self.timeout:g} seconds (--{self.setting}-timeout)"
        size = "" if late else f"{self.memory} bytes (--{self.setting}-memory) and "
        return TrialError(f"{self.verb} within {size}{seconds}")


class Trials:
    """Owner of the process. It starts at the first trial. Safe to use from any thread.

    module: path of the file that does the work, as trial_process.py expects it
    given:  what its function `prepare` gets
    stack:  bytes of address space that the work needs besides `limits.memory`
    """

    def __init__(self, module: str, given: dict[str, Any], limits: TrialLimits, stack: int = 0) -> None:
        start = {"module": module, "given": given, "timeout": limits.timeout, "memory": limits.memory + stack}
        self._start_line = json.dumps(start).encode() + b"\n"
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def trial(self) -> Trial:
        return Trial(self)

    def connect(self, file: int | None = None) -> socket.socket:
        """A connection to a new child, which gets this descriptor as well. Starts the process if it is not running.

        Raises Cancelled after `close`.
        """
        with self._lock:
            if self._closed:
                raise Cancelled
            ours, theirs = socket.socketpair()
            with theirs:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"x"], [theirs.fileno()] if file is None else [theirs.fileno(), file])
            return ours

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            # With one arena, freed memory is used again, and the limit on the address space counts what is in use.
            self._process = subprocess.Popen(
                [sys.executable, trial_process.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},
                start_new_session=True,  # Ctrl-C is for the server
            )
        self._control.settimeout(START_SECONDS)
        self._control.sendall(self._start_line)
        if self._control.recv(1) != b"r":
            raise RuntimeError(f"the process that works with {self.limits.setting}s on trial did not start")

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
    """One trial. `cancel` may be called before, during and after `run`.

    seconds: of a processor that the work took, once `run` has ended. For work that was ended early, how long it was waited for
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False
        self.seconds = 0.0

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes `run`

    def run(self, request: bytes | memoryview, file: int | None = None) -> bytes:
        """Do the work, for a request without a newline. Raises TrialError or Cancelled.

        file: descriptor that the work writes a large result to, for work that takes one
        """
        limits = self._trials.limits
        with self._trials.connect(file) as connection:
            with self._lock:
                if self.cancelled:
                    raise Cancelled
                self._connection = connection
            pid = 0
            reply = bytearray()
            begin = time.monotonic()
            try:
                with contextlib.suppress(ConnectionError):  # the child has been killed
                    deadline = time.monotonic() + limits.timeout
                    connection.settimeout(limits.timeout)
                    pid = int(_line(connection) or 0)
                    connection.sendall(request)
                    connection.sendall(b"\n")
                    while not reply.endswith(b"\n"):
                        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                        data = connection.recv(1 << 16)
                        if not data:
                            break
                        reply += data
            except TimeoutError:
                raise limits.error(late=True) from None
            finally:
                self.seconds = time.monotonic() - begin
                with self._lock:
                    self._connection = None
                if pid and not reply.endswith(b"\n"):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            if self.cancelled:
                raise Cancelled
            if not reply.endswith(b"\n"):
                raise limits.error()
            seconds, _, result = bytes(reply).partition(b" ")
            self.seconds = float(seconds)
            return result


def _line(connection: socket.socket) -> bytes:
    """The first line that comes, byte by byte, because what follows it is read by others."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            break
        line += data
    return line
