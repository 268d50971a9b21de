"""Runs work on what a client has sent as a trial: in a process that can be limited and killed.

    limits = TrialLimits("compile", timeout=10.0, memory=256 << 20, setting="grammar")
    trials = Trials(grammar_process.__file__, {"tokenizer": ...}, limits, stack=grammar_process.STACK)
    trial = trials.trial()
    reply = trial.run(request)               # raises TrialError if the work takes too much, or TrialProcessError
    trial.cancel()                           # from any thread: the child is killed, and `run` raises Cancelled
    trials.close()

Each trial has a child process for itself. With `trials.trial(owner)`, it may also get a child that has done trials before, if
they were all of the same owner.

Three kinds of work run as trials. A grammar is first compiled in a trial. Because a matcher cannot be sent to another process,
the engine then compiles a grammar that has passed once more (fa_serve/engine/structured/grammars.py, grammar_process.py). By
then it knows that compiling stays within the limits, and how many bytes the grammar takes. The chat template of a request is
applied only in a trial (server/tokenization.py), and pictures are decoded and processed only in trials (server/images). Left
out: the process itself (trial_process.py), and which request is tried next.
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
"""How often work is started if the process dies during the work."""
TRIALS_OF_CHILD = 64
"""After this many trials, a child that has an owner is replaced, with whatever has accumulated in it."""
DEATH_SECONDS = 0.2
"""How much later than its children a process with threads may end; the children end with its first thread."""


class TrialError(Exception):
    """The work takes more than its limits allow. The text completes the sentence "<field> must ..."."""


class Cancelled(Exception):
    """The trial was cancelled, or `Trials.close` was called."""


class TrialProcessError(RuntimeError):
    """The process does not start, dies repeatedly, or gets no memory from the system. The text says which. In none of these
    cases is the work at fault."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """verb: what the work does; timeout: seconds; memory: bytes; setting: flags are --<setting>-timeout, --<setting>-memory"""

    verb: str
    timeout: float
    memory: int
    setting: str

    def error(self, *, time: bool = True, memory: bool = True) -> TrialError:
        """time, memory: what the work takes too much of; both if unknown, because the kernel ends it without saying why"""
        named = [f"{self.memory} bytes (--{self.setting}-memory)"] if memory else []
        named += [f"{self.timeout:g} seconds (--{self.setting}-timeout)"] if time else []
        return TrialError(f"{self.verb} within {' and '.join(named)}")


def memory_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for glibc's allocator; other C libraries ignore them. environment: its GLIBC_TUNABLES are kept

    With one arena, freed memory is used again, so the limit on the address space counts memory in use. A trial is a new
    process, so every page that it first writes to costs a page fault. Therefore arrays of megabytes come from the heap, in huge
    pages if the system has them, and the process keeps memory that a trial frees. This halves the time to process an image of
    560 x 560 pixels.
    """
    given = environment.get("GLIBC_TUNABLES")
    ours = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
    return {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": f"{ours}:{given}" if given else ours}


@dataclass(slots=True, eq=False)
class _Child:
    """A connection to a child, and the process whose child it is.

    owner: whose trials it does; None for a child that does a single trial
    pid:   0 until the child has sent it
    is_new: whether it has done no trial yet
    """

    connection: socket.socket
    process: subprocess.Popen[bytes]
    owner: Hashable = None
    pid: int = 0
    is_new: bool = True

    def has_left(self) -> bool:
        """Whether a child that waits for a trial has ended meanwhile."""
        self.connection.setblocking(False)  # with a timeout Python would wait, whatever the flags are
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
    keep:   how many children may wait, for a few seconds, for another trial of their owners
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
        self._closing = threading.Lock()  # for the fields below, held only briefly
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.closed = False

    def trial(self, owner: Hashable = None) -> Trial:
        """A new trial. owner: trials of one owner may use the same child in turn; None gives this trial its own child"""
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

    def keep_waiting(self, child: _Child) -> None:
        """Keep a child for the next trial of its owner, if it has one. If too many wait, close the one that waited longest."""
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
            if not ready:  # a half-started process would take requests and answer none
                self._end()
        if ready:
            return process, control
        if self.closed:
            raise Cancelled
        within = f" within {START_SECONDS:g} seconds" if late else ""
        raise TrialProcessError(f"the sandbox process for {self.limits.setting}s did not start{within}")

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, theirs = socket.socketpair()
        with theirs, self._closing:  # under this lock, `close` finds the process or prevents it
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
        """End the process, even if it is only half started. Its children end with it."""
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
        """End the process and all of its trials at once. Later trials are cancelled, because nobody would end their process.

        A thread that waits for the process to start holds the other lock, and releases it when the process has been killed.
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

    All runs of a trial share one time limit, also with the runs of a trial that follows it (`following`).

    owner:   as for `Trials.trial`
    seconds: CPU seconds that the work of all runs took, once `run` has ended; for work that was ended early, how long `run`
             waited for it
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
        """Another trial, with its own `seconds`, that gets what is left of this trial's time limit."""
        return Trial(self._trials, self._waited, self._owner)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes `run`

    def run(self, request: bytes | memoryview, file: int | None = None) -> bytes:
        """Do the work for a request, which has no newline. Raises TrialError, Cancelled or TrialProcessError.

        If the process dies during the work, which is not the fault of the request, the work is done once more.

        file: descriptor of a file for a large result, if the work takes one
        """
        place = 0 if file is None else os.lseek(file, 0, os.SEEK_CUR)
        before = self.seconds
        child = self._trials.take_waiting(self._owner)
        left = ATTEMPTS
        while left:
            child = child or self._trials.connect(self._owner)
            # a reused child may end because of earlier trials, so only a new child counts as an attempt
            left -= child.is_new
            reply = self._attempt(child, request, file)
            if reply:
                seconds, word, waits, result = reply.split(b" ", 3)
                self.seconds = before + float(seconds)
                was_new = child.is_new
                child.is_new = False
                if waits == b"1":
                    self._trials.keep_waiting(child)
                else:
                    child.connection.close()
                if word == trial_process.DONE:
                    return result
                if word == trial_process.LIMIT and was_new:
                    raise self._trials.limits.error(time=False)
                if was_new:
                    raise TrialProcessError(
                        f"the sandbox process for {self._trials.limits.setting}s got no memory from the system"
                    )
            child = None
            if file is not None:
                os.lseek(file, place, os.SEEK_SET)  # the child shares the file's position, and may have written
        raise TrialProcessError(f"the sandbox process for {self._trials.limits.setting}s died {ATTEMPTS} times")

    def _attempt(self, child: _Child, request: bytes | memoryview, file: int | None) -> bytes:
        """The child's reply, or nothing if it or its process has died. Then the connection has been closed."""
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
    """Send one trial: a byte, which carries the descriptor of its file if it has one, and the request as a line."""
    if file is None:
        connection.sendall(b"x")
    else:
        socket.send_fds(connection, [b"x"], [file])
    connection.sendall(request)
    connection.sendall(b"\n")


def _line(connection: socket.socket) -> bytes:
    """The next line, received byte by byte because other code receives what follows it."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            break
        line += data
    return line
