"""The process that compiles a grammar on trial, where it can be limited and killed. A script that imports llguidance alone.

    python grammar_process.py <descriptor of a Unix socket>

llguidance bounds the memory of its lexer, but neither the time nor the memory of all of its work: a schema of 169 kB can take
two seconds, and one that is refused in the end can take 300 MB before that. A thread cannot be stopped, so each grammar is
compiled here first, by a child of this process, which is forked when the tables of the tokenizer are loaded. The child has a
limit on its address space and on its CPU time, runs at a low priority, and is killed when its client leaves.

The parent (grammar_trials.py) sends one line of JSON with the tokenizer first, and then one socket for each trial. On that
socket the child sends its process id, reads the grammar, and sends its result. Left out: what becomes of the result.
"""

import array
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

STACK = 512 << 20
"""Bytes of stack for a grammar of maximum length: llguidance recurses for each rule that refers to another one."""
SLACK = 32 << 20
"""Bytes of address space that the interpreter may need in a trial besides what the grammar needs."""
NICE = 10
PR_SET_PDEATHSIG = 1
LIMITS = {"initial_lexer_fuel": 300_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's own limits. With its default fuel of 1,000,000 the regex ((X{100}){100}){100}z takes 170 MB, and 64 MB with
this one. A schema with 1,000 patterns needs less than a third of it. A state of the lexer takes 1 to 2 kB."""


def serve(control: socket.socket) -> None:
    """Fork a child for each socket that arrives, until the parent closes its end."""
    import llguidance

    with control.makefile("rb") as lines:
        given = json.loads(lines.readline())
    tables = llguidance.LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["end_ids"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    control.sendall(b"r")
    while True:
        size = array.array("i").itemsize
        data, received, _, _ = control.recvmsg(1, socket.CMSG_SPACE(size))
        if not data:
            return
        descriptors = array.array("i", received[0][2])
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _limit(given["memory"], given["timeout"])
                with contextlib.suppress(OSError):  # the parent has left
                    connection.sendall(b"%d\n" % os.getpid())
                    connection.sendall(json.dumps(_try(llguidance, tables, connection)).encode())
                os._exit(0)


def _limit(memory: int, timeout: float) -> None:
    """Let the kernel end this process with its parent, or when it takes too much."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        limit = _pages(0) + STACK + memory + SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try(llguidance: Any, tables: Any, connection: socket.socket) -> dict[str, Any]:
    """Compile the grammar and compute its first mask. Returns the error, and the bytes that the grammar has taken."""
    with connection.makefile("rb") as lines:
        grammar = json.loads(lines.readline())
    results: list[dict[str, Any]] = []

    def work() -> None:
        before = _pages(1)
        matcher = compiled(llguidance, tables, grammar)
        results.append({"error": matcher.get_error() if matcher.is_error() else "", "bytes": max(_pages(1) - before, 0)})

    threading.stack_size(STACK)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def compiled(llguidance: Any, tables: Any, grammar: str) -> Any:
    """The matcher of a grammar. Its `is_error` says whether no answer is possible."""
    matcher = llguidance.LLMatcher(tables, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # sets an error if no answer is possible
    return matcher


def _pages(field: int) -> int:
    """Bytes of address space (field 0) or of memory (field 1) of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules have names that others may use
    serve(socket.socket(fileno=int(sys.argv[1])))
