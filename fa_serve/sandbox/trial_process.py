"""The process in which trials run, where they can be limited and killed: a script that imports the standard library alone.

    python trial_process.py <descriptor of a Unix socket>

A thread cannot be stopped in the middle of a call into C, and it shares the memory and the interpreter's lock of its process.
So work on what a client has sent is done by a child of this process, which is forked when everything that the work needs is
loaded. The child has a limit on its address space and on its CPU time, runs at a low priority, and is killed when its client
leaves. It does one trial. The next one is forked ahead and waits, because forking a process with torch takes 10 ms.

The parent (trials.py) sends one line of JSON first: the path of a module, what its function `prepare` gets, and the limits.
`prepare` loads what the work needs and returns the function that does it, from bytes to bytes without a newline. Then the
parent sends one socket for each trial. On that socket the child sends its process id, reads the request, and sends a
line with the processor's seconds that it took, a word and the reply. The word is DONE; or, for work that gets no memory, LIMIT
or SYSTEM, which says who refuses it, and the reply is empty.
With the socket may come the descriptor of a file for a result that is too large for a reply, which the function gets as well.
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
"""Bytes of address space that a child may take while it asks what the system has left."""
NICE = 10
PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> None:
    """Fork a child for each socket that arrives, until the parent closes its end."""
    with control.makefile("rb") as lines:
        start = json.loads(lines.readline())
    work = _load(start["module"]).prepare(start["given"])
    gc.collect()
    gc.freeze()  # a garbage collection in a child would visit, and so copy, all that was loaded here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    spare = _fork_spare(work, start, control)
    control.sendall(b"r")
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
    """A byte and the descriptors that come with it: of the connection of a trial, and of its file if it has one."""
    files = array.array("i")
    data, received, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(2 * files.itemsize))
    if received:
        files.frombytes(received[0][2])
    return data, files.tolist()


def _fork_spare(work: Callable[..., bytes], start: dict[str, Any], control: socket.socket) -> socket.socket:
    """Fork a child, which waits for its trial at the other end of this socket. It cannot see the trials of others."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    control.close()
    limit = _limit(start["memory"], start["timeout"])
    with contextlib.suppress(OSError, MemoryError):  # the parent has left, or the work takes too much
        data, files = _receive_files(theirs)
        if data:
            with socket.socket(fileno=files[0]) as connection:
                connection.sendall(b"%d\n" % os.getpid())
                word, reply = _attempt(work, connection, files[1:], limit)
                connection.sendall(b"%.6f %b " % (time.process_time(), word) + reply + b"\n")
    os._exit(0)


def _attempt(work: Callable[..., bytes], connection: socket.socket, files: Sequence[int], limit: int) -> tuple[bytes, bytes]:
    """Do the work for the request that comes on a connection. Returns the word and the reply."""
    try:
        with connection.makefile("rb") as lines:
            request = lines.readline()
        return DONE, work(request, *files)
    except MemoryError:
        pass
    # outside of the handler, whose error keeps the memory of the work
    return (LIMIT if _system_has(limit) else SYSTEM), b""


def _system_has(limit: int) -> bool:
    """Whether the system would give this process all the memory that our limit leaves to it; True if it leaves nothing.

    What the work has freed may still belong to the process, so that nothing is left after work that our limit has ended.
    """
    try:
        left = limit - _size() - MARGIN
        if left <= 0:
            return True
        mmap.mmap(-1, left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def _size() -> int:
    """The address space of this process. Raises OSError where the system does not say."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _load(path: str) -> Any:
    """The module of that file. Its package is not imported, whose other modules would take longer."""
    spec = importlib.util.spec_from_file_location("trial_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit(memory: int, timeout: float) -> int:
    """Let the kernel end this process with its parent, or when it takes too much. Returns the limit of its address space."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    limit = 0
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit; a system that has a lower one refuses this one
        limit = _size() + memory + SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules have names that others may use
    serve(socket.socket(fileno=int(sys.argv[1])))
