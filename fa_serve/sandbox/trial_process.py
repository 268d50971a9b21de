"""The process in which trials run, where they can be limited and killed: a script that imports only the standard library.

    python trial_process.py <descriptor of a Unix socket>

A thread cannot be stopped in the middle of a call into C, and it shares the memory and the interpreter's lock of its process.
So the work on what a client has sent is done by a child of this process, which is forked after everything that the work needs
has been loaded. The child has a limit on its address space and on its CPU time, runs at a low priority, and is killed when its
client leaves. It does one trial, or several trials of one client, one after the other: hostile work could change what its own
process does later, but no other process. The first trial of a child costs many page faults, the next ones cost few. The next
child is forked ahead and waits, because forking a process with torch takes 10 ms.

The parent (trials.py) first sends one line of JSON: the path of a module, the argument of its function `prepare`, the limits,
and how many trials a child may do. `prepare` loads what the work needs and returns the function that does the work: it takes
bytes and returns bytes, without a newline. Then the parent sends one socket for each child. On that socket the child sends its
process id. For each trial it reads a byte and the request, and sends one line: the CPU seconds that the trial took, a word,
whether the child waits for another trial (1 or 0), and the result. The word is DONE, or LIMIT or SYSTEM if the work gets no
memory, depending on whether our limit or the system refuses it; then the result is empty. The byte may carry the descriptor of
a file for a result that is too large for a reply; the function gets the descriptor too. A child ends after IDLE_SECONDS without
a trial, and after a trial that took much memory.
"""

import array
import contextlib
import ctypes
import gc
import importlib.util
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

DONE = b"done"
LIMIT = b"limit"
SYSTEM = b"system"
SLACK = 32 << 20
"""Bytes of address space that the interpreter may need in a trial besides what the work needs."""
MARGIN = 4 << 20
"""Bytes of address space that a child may take while it finds out how much memory the system has left."""
IDLE_SECONDS = 5.0
IDLE_BYTES = 96 << 20
"""A child waits for another trial only if its trials have raised its peak memory by at most this many bytes."""
NICE = 10
PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> None:
    """Fork a child for each socket that arrives, until the parent closes its end."""
    with control.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        return  # the parent has ended
    start = json.loads(line)
    work = _load(start["module"]).prepare(start["given"])
    gc.collect()
    gc.freeze()  # a garbage collection in a child would visit, and so copy, all that was loaded here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    spare = _fork_spare(work, start, control)
    try:
        control.sendall(b"r")
    except OSError:
        return  # the parent has ended while the work was loaded
    while True:
        data, files = _receive_files(control)
        if not data:
            return
        try:
            socket.send_fds(spare, [data], files)
        except OSError:  # the system has ended the child that waited
            spare.close()
            spare = _fork_spare(work, start, control)
            with contextlib.suppress(OSError):
                socket.send_fds(spare, [data], files)
        spare.close()
        for file in files:
            os.close(file)
        spare = _fork_spare(work, start, control)


def _receive_files(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A byte and the descriptors that come with it: the connection of a child, or the file of a trial if it has one."""
    files = array.array("i")
    data, received, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(files.itemsize))
    if received:
        files.frombytes(received[0][2])
    return data, files.tolist()


def _fork_spare(work: Callable[..., bytes], start: dict[str, Any], control: socket.socket) -> socket.socket:
    """Fork a child, which waits for its connection on the other end of the returned socket. It cannot see others' trials."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    control.close()
    limit = _limit(start["memory"], start["timeout"] * start["trials"])
    with contextlib.suppress(OSError, MemoryError):  # the parent has left, or the work takes too much
        data, files = _receive_files(theirs)
        if data:
            with socket.socket(fileno=files[0]) as connection:
                connection.sendall(b"%d\n" % os.getpid())
                _do_trials(work, connection, start, limit)
    os._exit(0)


def _do_trials(work: Callable[..., bytes], connection: socket.socket, start: dict[str, Any], limit: int) -> None:
    """Do the trials that arrive on a connection. Raises TimeoutError if none arrives for IDLE_SECONDS after a trial."""
    peak = _peak()
    for left in reversed(range(start["trials"])):
        data, files = _receive_files(connection)
        if not data:
            return
        begin = time.process_time()
        _limit_time(begin + start["timeout"])
        connection.settimeout(None)
        word, reply = _attempt(work, connection, files, limit)
        for file in files:
            os.close(file)
        waits = left > 0 and word == DONE and _peak() - peak <= IDLE_BYTES
        connection.sendall(b"%.6f %b %d " % (time.process_time() - begin, word, waits) + reply + b"\n")
        if not waits:
            return
        connection.settimeout(IDLE_SECONDS)


def _attempt(work: Callable[..., bytes], connection: socket.socket, files: Sequence[int], limit: int) -> tuple[bytes, bytes]:
    """Do the work for the request that arrives on a connection. Returns the word and the result."""
    try:
        with connection.makefile("rb") as lines:
            request = lines.readline()
        return DONE, work(request, *files)
    except MemoryError:
        pass
    # outside the handler, because the exception keeps the memory of the work in use
    return (LIMIT if _system_has(limit) else SYSTEM), b""


def _system_has(limit: int) -> bool:
    """Whether the system would give this process all the memory that our limit still allows; True if it allows no more.

    Memory that the work has freed may still belong to the process. So if our limit has ended the work, it may allow no more.
    """
    try:
        left = limit - _size() - MARGIN
        if left <= 0:
            return True
        mmap.mmap(-1, left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def _peak() -> int:
    """The peak of this process's memory in bytes, including memory that it shares with its parent."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _size() -> int:
    """The address space of this process. Raises OSError where the system does not say."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _load(path: str) -> Any:
    """The module in that file. Its package is not imported, because its other modules would take longer."""
    spec = importlib.util.spec_from_file_location("trial_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit(memory: int, timeout: float) -> int:
    """Let the kernel end this process when its parent ends or it takes too much. Returns the limit of its address space.

    timeout: seconds of all trials together
    """
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    limit = 0
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit; a system with a lower limit refuses this one
        limit = _size() + memory + SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def _limit_time(seconds: float) -> None:
    """Let the kernel end this process when its CPU time reaches this many seconds."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(int(seconds) + 1, hard), hard))


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: its modules' names may clash with others
    serve(socket.socket(fileno=int(sys.argv[1])))
