"""The process in which trials run, where they can be limited and killed: a script that imports the standard library alone.

    python trial_process.py <descriptor of a Unix socket>

A thread cannot be stopped in the middle of a call into C, and it shares the memory and the interpreter's lock of its process.
So work on what a client has sent is done by a child of this process, which is forked when everything that the work needs is
loaded. The child has a limit on its address space and on its CPU time, runs at a low priority, and is killed when its client
leaves.

The parent (trials.py) sends one line of JSON first: the path of a module, what its function `prepare` gets, and the limits.
`prepare` loads what the work needs and returns the function that does it, from bytes to bytes without a newline. Then the
parent sends one socket for each trial. On that socket the child sends its process id, reads the request, and sends a
line with the processor's seconds that it took and the reply.
With the socket may come the descriptor of a file for a result that is too large for a reply, which the function gets as well.
"""

import array
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

SLACK = 32 << 20
"""Bytes of address space that the interpreter may need in a trial besides what the work needs."""
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
    control.sendall(b"r")
    while True:
        size = array.array("i").itemsize
        data, received, _, _ = control.recvmsg(1, socket.CMSG_SPACE(2 * size))
        if not data:
            return
        descriptors = array.array("i", received[0][2])
        files = descriptors[1:]
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _limit(start["memory"], start["timeout"])
                with contextlib.suppress(OSError, MemoryError):  # the parent has left, or the work takes too much
                    connection.sendall(b"%d\n" % os.getpid())
                    with connection.makefile("rb") as lines:
                        request = lines.readline()
                    reply = work(request, *files)
                    connection.sendall(b"%.6f " % time.process_time() + reply + b"\n")
                os._exit(0)
            for file in files:
                os.close(file)


def _load(path: str) -> Any:
    """The module of that file. Its package is not imported, whose other modules would take longer."""
    spec = importlib.util.spec_from_file_location("trial_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit(memory: int, timeout: float) -> None:
    """Let the kernel end this process with its parent, or when it takes too much."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limit = size + memory + SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules have names that others may use
    serve(socket.socket(fileno=int(sys.argv[1])))
