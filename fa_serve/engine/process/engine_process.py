"""The process of an engine: it imports what an engine needs, and then it is told which engine to load.

    start_ahead()                            # a server does this before it imports its own modules
    process, connection = take_process()     # the process that was started ahead, or a new one
    connection.send(config)                  # from here on, parent.py and child.py speak through the connection

PyTorch and the models of transformers take several seconds to import in each process. With a process that is started ahead,
both processes import at the same time. This module imports neither.

On a CPU, PyTorch divides a product among as many threads as there are processors, and by default an OpenMP thread that waits
for another one spins for milliseconds. The server is a second process on the same processors: whenever it runs, one of the
engine's threads has no processor, while the others spin on the processors that it needs. A step then takes ten times as long.
So the threads of this process sleep while they wait. An engine that runs in a thread of the server does not need this: OpenMP
then sees more threads than processors, and lets them sleep. Source: libgomp's GOMP_SPINCOUNT. Left out: what runs in the
process (child.py) and what goes through the connection (pipe.py).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fa_serve.engine.process.host_memory import importing

_STARTS = threading.Lock()
"""One process starts at a time, because they share the environment."""
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how threads of OpenMP wait. If the operator has set one of them, none is changed."""


class EngineProcess(NamedTuple):
    """process: a daemon, which ends with its parent; connection: the parent's end"""

    process: Any
    connection: Connection


_ahead: EngineProcess | None = None


def start_ahead() -> None:
    """Start the process of the next engine of this process. A second call changes nothing."""
    global _ahead
    if _ahead is None:
        _ahead = _start(ahead=True)


def take_process() -> EngineProcess:
    """The process for an engine, which waits for its config."""
    global _ahead
    taken = _ahead
    _ahead = None
    return taken if taken is not None and taken.process.is_alive() else _start(ahead=False)


def drop_process() -> None:
    """End the process that was started ahead, if no engine has taken it: the engine runs in a thread, or there is none."""
    global _ahead
    dropped = _ahead
    _ahead = None
    if dropped is not None:
        dropped.process.kill()
        dropped.process.join()


def _start(*, ahead: bool) -> EngineProcess:
    # A spawned process is a fresh interpreter. A forked one would inherit locks of threads and an unusable CUDA context.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, ahead), name="fa_serve-engine", daemon=True)
    with _STARTS, _sleeping_threads():
        process.start()
    theirs.close()
    return EngineProcess(process, ours)


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Inside this context, a process that is started gets the variable with which OpenMP's threads sleep while they wait.
    `_main` would set it too late: OpenMP reads it when it is loaded, and a program's own main module may load OpenMP first."""
    if any(name in os.environ for name in WAITS):
        yield
        return
    os.environ[WAITS[0]] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ[WAITS[0]]


def _main(connection: Connection, ahead: bool) -> None:
    # Ctrl-C, and a SIGTERM from systemd or torchrun, reach all processes, but the parent finishes requests and then stops this
    # one. A process that waits for its config must end at SIGTERM, which a parent that exits sends to its daemons.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if ahead else signal.SIG_IGN)
    with importing(freeze=True):
        from fa_serve.engine.process.child import run_engine
    run_engine(connection)
