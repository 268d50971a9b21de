"""Processes that are forked from one that has imported what an engine and a server import.

    context = warm_context()
    context.Process(target=function).start()     # a context of multiprocessing, as "spawn" is
    process = WarmProcess(fa_serve, ["serve"])   # as subprocess.Popen of `fa-serve serve`

An import of PyTorch and of transformers takes a process six seconds of a processor, and most tests that start a process test
what it does afterwards. They start it here. Those that test the start itself, or what a process inherits, start a fresh
interpreter.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, arbitrary_address, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
ANY_PROCESS = 2**64 - 1
IMPORTED = ["fa_serve.engine.engine", "fa_serve.engine.process.child", "fa_serve.server.process", "fa_serve.__main__"]


@cache
def warm_context() -> ForkServerContext:
    """The processes have the environment variables that this process has at the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


class WarmProcess:
    """A call in a forked process, with what tests use of `subprocess.Popen`. Its standard output is a pipe.

    It is not started as a `Process`, because tests count the children of multiprocessing.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        arguments: Sequence[str] = (),
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        with ours, theirs:
            args = (call, arguments, theirs, log, dict(environment or os.environ))
            self._process = popen_forkserver.Popen(warm_context().Process(target=_run, args=args))
        self.pid = self._process.pid
        self._lock = threading.Lock()  # the exit code can be read once, and several threads may wait

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def fa_serve() -> None:
    """The command line, with the arguments of the process. An engine's process is forked from a copy of this one."""
    from fa_serve.__main__ import main

    if "--process" in sys.argv:
        fork_engines()
    main()


def fork_engines() -> None:
    """The processes of engines that this process starts are forked from a copy of it."""
    from fa_serve.engine.process import engine_process

    _start_own_forkserver()
    context = multiprocessing.get_context("forkserver")
    engine_process.multiprocessing = SimpleNamespace(get_context=lambda _: context)  # type: ignore[assignment]


def with_warm_followers(target: Callable[..., None], *arguments: Any) -> None:
    """What an engine's process runs. Its followers are forked from a copy of this process."""
    from fa_serve.engine.parallel import links

    _start_own_forkserver()
    names = {"Popen": warm_module, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    links.subprocess = SimpleNamespace(**names)  # type: ignore[assignment]
    target(*arguments)


def fa_serve_with_a_short_log() -> None:
    """The same. The log holds few records that nobody has read."""
    from fa_serve.server.observe import logs

    logs.MAX_QUEUED = 64
    fa_serve()


def fa_serve_traced() -> None:
    """The same, once a program such as strace has attached itself to this process."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY_PROCESS), 0, 0, 0)
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.01)
    fa_serve()


def _start_own_forkserver() -> None:
    """The fork server of this process is a copy of this process, as it is now. It ends with this process."""
    address = arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        theirs, ours = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            forkserver.main(listener.detach(), theirs, [])
            os._exit(0)
    os.close(theirs)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server._forkserver_alive_fd = ours
    server._forkserver_pid = pid


def run_warm(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `fa-serve <arguments>`, which is expected to end by itself."""
    with tempfile.NamedTemporaryFile("r") as log, WarmProcess(fa_serve, arguments, log=Path(log.name)) as process:
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        printed = process.stdout.read()
        code = process.wait()
        watchdog.cancel()
        return subprocess.CompletedProcess(arguments, code, printed, log.read())


MODULE_NAME = "fa_serve-module"
"""The name of a process of `warm_module`, whose command line is that of the process which it is forked from."""


def warm_module(
    command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str], stdin: int, fault: str = ""
) -> WarmProcess:
    """`subprocess.Popen` of `python -m module descriptor`. fault: a program that runs before, as sitecustomize.py does"""
    [descriptor] = pass_fds
    connection = Connection(os.dup(descriptor))
    try:
        return WarmProcess(partial(_run_module, command[2], connection, fault), environment=env)
    finally:
        connection.close()


def warm_program(program: str, *arguments: str) -> WarmProcess:
    """`subprocess.Popen` of `python -c program arguments`."""
    return WarmProcess(partial(_execute, program), arguments)


def _execute(program: str) -> None:
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def warm_trial_process(command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> WarmProcess:
    """`subprocess.Popen` of `python trial_process.py descriptor`, in a new session."""
    [descriptor] = pass_fds
    connection = Connection(os.dup(descriptor))
    try:
        return WarmProcess(partial(_run_script, Path(command[1]), connection), environment=env)
    finally:
        connection.close()


@contextmanager
def forked_trials() -> Iterator[list[WarmProcess]]:
    """The processes of trials that start meanwhile are forked. They are listed, and `end_processes` ends them."""
    from fa_serve.sandbox import trials

    started: list[WarmProcess] = []

    def start(command: list[str], **options: Any) -> WarmProcess:
        started.append(warm_trial_process(command, **options))
        return started[-1]

    fresh = trials.subprocess
    names = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    trials.subprocess = SimpleNamespace(**names)  # type: ignore[assignment]
    try:
        yield started
    finally:
        trials.subprocess = fresh


def end_processes(processes: Sequence[WarmProcess]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)
        process.stdout.close()


def _run_script(script: Path, connection: Connection) -> None:
    os.setsid()
    sys.argv = [str(script), str(connection.fileno())]
    sys.path.insert(0, str(script.parent))  # as an interpreter does
    runpy.run_path(str(script), run_name="__main__")


def _run_module(module: str, connection: Connection, fault: str) -> None:
    Path("/proc/self/comm").write_text(MODULE_NAME)
    exec(fault, {})
    sys.argv = [module, str(connection.fileno())]
    runpy.run_module(module, run_name="__main__")


def _run(
    call: Callable[[], Any], arguments: Sequence[str], stdout: Connection, log: Path | None, environment: Mapping[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    sys.argv = ["fa-serve", *arguments]
    call()
