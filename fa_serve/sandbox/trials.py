"""Work on what a client has sent runs on trial: in a process that can be limited and killed.

    limits = TrialLimits("compile", timeout=10.0, memory=256 << 20, setting="grammar")
    trials = Trials(grammar_process.__file__, {"tokenizer": ...}, limits, stack=grammar_process.STACK)
    trial = trials.trial()
    reply = trial.run(request)               # raises TrialError if the work takes too much, TrialProcessError if nothing works
    trial.cancel()                           # from any thread: the child is killed, and `run` raises Cancelled
    trials.close()

Each trial has a child for itself; or, with `trials.trial(owner)`, one that has done trials of the same owner before, and of
nobody else.

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
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_serve.sandbox import trial_process

START_SECONDS = 300.0
"""How long the process may take to load what the work needs: torch and transformers from a cold disk take minutes."""
ATTEMPTS = 2
"""How often work is begun whose process dies in the midst of it."""
TRIALS_OF_CHILD = 64
"""After so many, a child that has an owner is replaced, whatever it has gathered."""
DEATH_SECONDS = 0.2
"""A process with threads is dead so much later than its children, which end with its first thread."""


class TrialError(Exception):
    """The work takes more than its limits allow. The text completes the sentence "<field> must ..."."""


class Cancelled(Exception):
    """The trial was cancelled, or `Trials.close` was called."""


class TrialProcessError(RuntimeError):
    """The process does not start, dies again and again, or gets no memory from the system, which is not the fault of the work.
    The text says so."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """verb: what the work does; timeout: seconds; memory: bytes; setting: the flags are --<setting>-timeout and -memory"""

    verb: str
    timeout: float
    memory: int
    setting: str

    def error(self, *, time: bool = True, memory: bool = True) -> TrialError:
        """time, memory: what the work takes too much of. The kernel ends it for either reason, and says nothing."""
        named = [f"{self.memory} bytes (--{self.setting}-memory)"] if memory else []
        named += [f"{self.timeout:g} seconds (--{self.setting}-timeout)"] if time else []
        return TrialError(f"{self.verb} within {' and '.join(named)}")


def memory_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """How the process takes memory from a system with glibc; others do not read it. environment: whose settings are kept

    With one arena, freed memory is used again, and the limit on the address space counts what is in use. A trial is a new
    process, so whatever it writes to costs a page fault: arrays of megabytes come from the heap, in huge pages where the system
    has them, and what a trial frees stays. An image of 560 x 560 pixels is processed in half the time.
    """
    given = environment.get("GLIBC_TUNABLES")
    ours = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
    return {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": f"{ours}:{given}" if given else ours}


@dataclass(slots=True, eq=False)
class _Child:
    """A connection to a child, and the process whose child it is.

    owner: whose trials it does; None: of one trial alone
    pid:   0 until the child has told it
    is_new: whether it has done no trial yet
    """

    connection: socket.socket
    process: subprocess.Popen[bytes]
    owner: Hashable = None
    pid: int = 0
    is_new: bool = True

    def has_left(self) -> bool:
        """Whether a child that waits for a trial has ended meanwhile."""
        self.connection.setblocking(False)  # with a limit of time Python would wait, whatever the flags are
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Trials:
    """Owner of the process. It starts at the first trial, or with `start`. Safe to use from any thread.

    module: path of the file that does the work, as trial_process.py expects it
    given:  what its function `prepare` gets
    stack:  bytes of address space that the work needs besides `limits.memory`
    keep:   how many children may wait for another trial of their owners, some seconds long
    closed: whether `close` has been called
    """

    def __init__(self, module: str, given: dict[str, Any], limits: TrialLimits, stack: int = 0, keep: int = 0) -> None:
        start = {
            "module": module,
            "given": given,
            "timeout": limits.timeout,
            "memory": limits.memory + stack,
            "trials": TRIALS_OF_CHILD if keep else 1,
        }
        self._start_line = json.dumps(start).encode() + b"\n"
        self._keep = keep
        self._waiting: list[_Child] = []  # the one that has waited for the longest first
        self.limits = limits
        self._lock = threading.Lock()  # held while the process starts
        self._closing = threading.Lock()  # of the fields below, held for moments
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.closed = False

    def trial(self, owner: Hashable = None) -> Trial:
        """owner: whose trials may be done by the same child, one after the other; None: this one has a child for itself"""
        return Trial(self, owner=owner)

    def start(self) -> None:
        """Start the process if it is not running, so that the next trial does not wait for it. Raises as `connect` does."""
        with self._lock:
            self._started()

    def connect(self, owner: Hashable = None) -> _Child:
        """A new child. The process is started if it is not running.

        Raises Cancelled after `close`, and TrialProcessError if the process does not start.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                process, control = self._started()
                with contextlib.suppress(ConnectionError):  # the process has just died, and so the connection ends
                    socket.send_fds(control, [b"x"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return _Child(ours, process, owner)

    def take_waiting(self, owner: Hashable) -> _Child | None:
        """A child that has done trials of this owner and waits for the next one; or None."""
        with self._closing:
            for child in [each for each in reversed(self._waiting) if each.owner == owner and owner is not None]:
                self._waiting.remove(child)
                if not child.has_left():
                    return child
                child.connection.close()
        return None

    def let_wait(self, child: _Child) -> None:
        """Keep a child for the next trial of its owner, if it has one, and fewer wait than may; another one has to go then."""
        with self._closing:
            if child.owner is None or self.closed:
                child.connection.close()
                return
            self._waiting.append(child)
            while len(self._waiting) > self._keep:
                self._waiting.pop(0).connection.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, which has loaded what the work needs, and its socket."""
        if self._process is not None and self._process.poll() is None:
            assert self._control is not None
            return self._process, self._control
        self._end()
        late = ready = False
        try:
            process, control = self._launch()
            control.settimeout(START_SECONDS)
            control.sendall(self._start_line)
            ready = control.recv(1) == b"r"
        except TimeoutError:
            late = True
        except OSError:  # it has died, or there is no memory for it
            pass
        finally:
            if not ready:  # half started, it would take requests and answer none
                self._end()
        if ready:
            return process, control
        if self.closed:
            raise Cancelled
        within = f" within {START_SECONDS:g} seconds" if late else ""
        raise TrialProcessError(f"the process that works with {self.limits.setting}s on trial did not start{within}")

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, theirs = socket.socketpair()
        with theirs, self._closing:  # `close` finds the process, or there will be none
            if self.closed:
                control.close()
                raise Cancelled
            self._control = control
            self._process = subprocess.Popen(
                [sys.executable, trial_process.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | memory_settings(os.environ),
                start_new_session=True,  # Ctrl-C is for the server
            )
            return self._process, control

    def _end(self) -> None:
        """End the process, half started or not. Its children end with it."""
        with self._closing:
            process = self._process
            control = self._control
            waiting = self._waiting
            self._process = None
            self._control = None
            self._waiting = []
        for child in waiting:
            child.connection.close()
        if process is not None:
            process.kill()
            process.wait()
        if control is not None:
            control.close()

    def close(self) -> None:
        """End the process with all of its trials, at once. Later trials are cancelled: nobody would end their process.

        A thread that waits for the process to start holds the other lock, and gives it back when the process has been killed.
        """
        with self._closing:
            self.closed = True
            if self._process is not None:
                self._process.kill()
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end()


class Trial:
    """One trial. `cancel` may be called before, during and after `run`.

    All runs of a trial have one limit of time together, and so have those of a trial that follows another one.

    owner:   as for `Trials.trial`
    seconds: of a processor that the work of all runs took, once `run` has ended. For work that was ended early, how long it was
             waited for
    """

    def __init__(self, trials: Trials, waited: float = 0.0, owner: Hashable = None) -> None:
        self._trials = trials
        self._owner = owner
        self._waited = waited  # for runs that have ended
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False
        self.seconds = 0.0

    def following(self) -> Trial:
        """Another trial, with its own `seconds`, that has what is left of this one's limit of time."""
        return Trial(self._trials, self._waited, self._owner)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes `run`

    def run(self, request: bytes | memoryview, file: int | None = None) -> bytes:
        """Do the work, for a request without a newline. Raises TrialError, Cancelled or TrialProcessError.

        If the process dies in the midst of it, which is not the fault of the request, the work is done once more.

        file: descriptor that the work writes a large result to, for work that takes one
        """
        place = 0 if file is None else os.lseek(file, 0, os.SEEK_CUR)
        before = self.seconds
        child = self._trials.take_waiting(self._owner)
        left = ATTEMPTS
        while left:
            child = child or self._trials.connect(self._owner)
            # what a child has left behind may be why it ends, so one that is not new counts as no attempt
            left -= child.is_new
            reply = self._attempt(child, request, file)
            if reply:
                seconds, word, waits, result = reply.split(b" ", 3)
                self.seconds = before + float(seconds)
                was_new = child.is_new
                child.is_new = False
                if waits == b"1":
                    self._trials.let_wait(child)
                else:
                    child.connection.close()
                if word == trial_process.DONE:
                    return result
                if word == trial_process.LIMIT and was_new:
                    raise self._trials.limits.error(time=False)
                if was_new:
                    raise TrialProcessError(
                        f"the process that works with {self._trials.limits.setting}s on trial gets no memory from the system"
                    )
            child = None
            if file is not None:
                os.lseek(file, place, os.SEEK_SET)  # its place is shared with the child, which may have written
        raise TrialProcessError(
            f"the process that works with {self._trials.limits.setting}s on trial has died {ATTEMPTS} times"
        )

    def _attempt(self, child: _Child, request: bytes | memoryview, file: int | None) -> bytes:
        """What the child replies, or nothing if it or its process has died: the connection is closed then."""
        limits = self._trials.limits
        connection = child.connection
        before = self.seconds
        reply = bytearray()
        try:
            with self._lock:
                if self.cancelled:
                    raise Cancelled
                self._connection = connection
            begin = time.monotonic()
            left = max(limits.timeout - self._waited, 1e-3)
            try:
                with contextlib.suppress(ConnectionError):  # the child has been killed
                    connection.settimeout(left)
                    child.pid = child.pid or int(_line(connection) or 0)
                    _send(connection, request, file)
                    while not reply.endswith(b"\n"):
                        connection.settimeout(max(begin + left - time.monotonic(), 1e-3))
                        data = connection.recv(1 << 16)
                        if not data:
                            break
                        reply += data
            except TimeoutError:
                raise limits.error(memory=False) from None
            finally:
                self.seconds = before + time.monotonic() - begin
                with self._lock:
                    self._connection = None
                if child.pid and not reply.endswith(b"\n"):
                    with contextlib.suppress(OSError):
                        os.kill(child.pid, signal.SIGKILL)
            ended = reply.endswith(b"\n")
            if self.cancelled or (self._trials.closed and not ended):
                raise Cancelled
        except BaseException:
            connection.close()
            raise
        if ended:
            self._waited += self.seconds - before
            return bytes(reply)
        connection.close()
        if child.is_new:
            try:
                child.process.wait(DEATH_SECONDS)
            except subprocess.TimeoutExpired:
                raise limits.error() from None
        return b""


def _send(connection: socket.socket, request: bytes | memoryview, file: int | None) -> None:
    """One trial: a byte, with which the descriptor of its file comes, and the request as a line."""
    if file is None:
        connection.sendall(b"x")
    else:
        socket.send_fds(connection, [b"x"], [file])
    connection.sendall(request)
    connection.sendall(b"\n")


def _line(connection: socket.socket) -> bytes:
    """The first line that comes, byte by byte, because what follows it is read by others."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            break
        line += data
    return line
