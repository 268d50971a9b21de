"""Threads that compile Triton's kernels, and processes to which the threads can pass this work.

    processes = CompilerProcesses(14)            # returns at once: they import while a model is loaded
    with CompilerThreads(14, processes) as threads, triton.AsyncCompileMode(threads):
        kernel.warmup(...)                       # a thread compiles
    processes.close()

For a third of its time, a compilation holds Python's global interpreter lock, mainly while the first IR is built and libdevice
is linked. The threads of one process therefore compile about eight kernels a second, however many cores there are. A compiler
process writes the kernel to Triton's cache on disk, and the thread that waited for it loads it from there. A kernel that a
process cannot compile is compiled by the thread, which raises what is wrong with it. So only speed depends on these processes.

The first process imports PyTorch, Triton and all kernels, and forks the others before it has a second thread. None of them uses
a GPU. A process ends when its pipe is closed (the operating system closes it if this process is killed), or when a kernel takes
too long.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import io
import logging
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)
COMPILE_SECONDS = 60
"""How long a process may take for a kernel. After that the operating system ends the process, whatever it is doing."""
LATE_KERNEL_SECONDS = 5.0
"""How long it may take until the end of such a process is noticed."""
POLL_SECONDS = 0.25
KERNEL_PACKAGES = ("fa_serve.backends.triton", "fa_serve.backends.hopper", "fa_serve.ops")
_THREAD = threading.local()


def compiled_by_process() -> bool:
    """Whether the kernel that this thread loads from the cache has just been compiled by a process."""
    return bool(getattr(_THREAD, "compiled_by_process", False))


class CompilerProcesses:
    """`count` processes, which start immediately and are ready a few seconds later."""

    def __init__(self, count: int) -> None:
        pipes = [Pipe() for _ in range(count)]
        ends = [theirs.fileno() for _, theirs in pipes]
        command = [sys.executable, "-m", __name__, str(COMPILE_SECONDS), *map(str, ends)]
        # a module in the working directory must not take the place of an installed one; threads would not survive a fork
        environment = os.environ | {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # what Triton prints goes to stderr, because readers of a server's stdout wait for its end
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=2, env=environment)
        for _, theirs in pipes:
            theirs.close()
        self._lock = threading.Lock()
        self._closed = False
        self._importing = [ours for ours, _ in pipes]
        self._free: list[Connection] = []

    def compile(self, compile_kernel: Callable[[], Any], cancelled: threading.Event) -> bool | None:
        """Let a process compile into Triton's cache on disk, which may have the kernel already.

        compile_kernel: the function that Triton gives to the executor of an AsyncCompileMode
        cancelled:      is set when nobody waits for the kernel any more
        Returns True if the process compiled it, False if the cache had it, and None if no process is free or if the kernel
        cannot be compiled there.
        """
        connection = self._take()
        if connection is None:
            return None
        try:
            request = _request(compile_kernel)
        except Exception:
            log.debug("a kernel cannot be pickled for a compiler process", exc_info=True)
            self._give_back(connection)
            return None
        limit = time.monotonic() + COMPILE_SECONDS + LATE_KERNEL_SECONDS
        try:
            connection.send_bytes(request)
            while not connection.poll(POLL_SECONDS):
                if cancelled.is_set() or time.monotonic() > limit:
                    connection.close()
                    return None
            compiled: bool | None = connection.recv()
        except (EOFError, OSError):
            log.warning("a compiler process has exited; the remaining processes and threads continue")
            connection.close()
            return None
        self._give_back(connection)
        return compiled

    def _take(self) -> Connection | None:
        with self._lock:
            for connection in [each for each in self._importing if each.poll()]:
                self._importing.remove(connection)
                try:
                    connection.recv()  # the sign that it is ready
                except (EOFError, OSError):
                    log.warning("a compiler process exited before it was ready; threads continue without it")
                else:
                    self._free.append(connection)
            return self._free.pop() if self._free else None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._free.append(connection)

    def close(self) -> None:
        """End all idle processes now, and the others when they have finished."""
        with self._lock:
            self._closed = True
            for connection in [*self._importing, *self._free]:
                connection.close()
            self._importing = []
            self._free = []
        threading.Thread(target=self._process.wait, name="fa_serve-compilers", daemon=True).start()


class CompilerThreads(ThreadPoolExecutor):
    """Runs Triton's compilations.

    processes: compile for these threads as soon as they are ready
    finish:    called in the thread with each compiled kernel
    """

    def __init__(self, count: int, processes: CompilerProcesses | None, finish: Callable[[Any], None]) -> None:
        super().__init__(count, thread_name_prefix="fa_serve-compile")
        self._processes = processes if _same_everywhere() else None
        self._finish = finish
        self._futures: list[Future[Any]] = []
        self._cancelled = threading.Event()

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self._futures.append(super().submit(self._compile, compile_kernel))
        return self._futures[-1]

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        if self._processes is not None:
            _THREAD.compiled_by_process = self._processes.compile(compile_kernel, self._cancelled)
            if self._cancelled.is_set():
                raise CancelledError
        try:
            kernel = compile_kernel()
        finally:
            _THREAD.compiled_by_process = None
        self._finish(kernel)
        return kernel

    def cancel(self) -> None:
        """Start no further compilation, and do not wait for processes."""
        self._cancelled.set()
        self.shutdown(wait=False, cancel_futures=True)
        for future in self._futures:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # else `as_completed`, by which Triton waits for all, never returns it


def _same_everywhere() -> bool:
    """Whether a process compiles a kernel as this one would, and into the same place."""
    hook = getattr(knobs.runtime, "add_stages_inspection_hook", None)  # a function that only this process has
    return hook is None and not knobs.compilation.always_compile


class _KernelPickler(pickle.Pickler):
    """Writes a kernel as the name of its module and its name there. Under that name, pickle would not find its function."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return _kernel_named, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _kernel_named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _request(compile_kernel: Callable[[], Any]) -> bytes:
    """What a process needs: the arguments of triton.compile, and Triton's environment.

    Triton 3.6 to 3.9 give the executor a function without arguments, whose closure holds the variables of the call.
    """
    found = inspect.getclosurevars(compile_kernel).nonlocals
    options = found["options"].__dict__
    variables = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    written = io.BytesIO()
    _KernelPickler(written).dump((variables, found["src"], found["target"], options, found["env_vars"]))
    return written.getvalue()


def _fork(seconds: int, descriptors: Sequence[int]) -> None:
    """Import, fork a process for each descriptor, and wait until all of them have ended. seconds: the limit for a kernel"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; these end with the one that uses them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the engine's process ignores it
    _import_kernels()
    gc.freeze()  # a garbage collection in one process would copy memory that all of them share
    for descriptor in descriptors:
        if os.fork() == 0:
            try:
                for other in descriptors:
                    if other != descriptor:
                        os.close(other)
                _answer(Connection(descriptor), seconds)
            finally:
                os._exit(0)  # without the clean-up of the first process
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _import_kernels() -> None:
    """Do once what each process would do when the first kernel is asked for."""
    for package in KERNEL_PACKAGES:
        rooms = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(rooms, f"{package}.", onerror=lambda name: None):
            with suppress(Exception):  # this release of Triton, or this machine, lacks what the module needs
                importlib.import_module(module.name)
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # the hash of all files of Triton, a part of each kernel's name in the cache


def _answer(connection: Connection, seconds: int) -> None:
    """Compile what is requested until the pipe is closed. The reply is None if the compilation failed."""
    with suppress(EOFError, OSError):
        connection.send(True)
        while True:
            request = connection.recv_bytes()
            signal.alarm(seconds)  # ends this process, also within the compiler
            reply = _compile(request)
            signal.alarm(0)
            connection.send(reply)


def _compile(request: bytes) -> bool | None:
    """Whether the kernel has been compiled here, not just found in the cache; None if it could not be compiled."""
    hits: list[bool] = []
    try:
        variables, source, target, options, env_vars = pickle.loads(request)
        os.environ.update(variables)
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        triton.compile(source, target=target, options=options, _env_vars=env_vars)
    except Exception:
        return None
    return not all(hits)


if __name__ == "__main__":
    _fork(int(sys.argv[1]), [int(each) for each in sys.argv[2:]])
    os._exit(0)  # Triton 3.9 would list objects that it has not freed
