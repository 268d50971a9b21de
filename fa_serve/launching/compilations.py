"""Kernels are compiled in parallel before requests need them, kept in a folder, and counted.

    use_kernel_cache("cuda", "0.2.0")
    watch()
    with start_compilers(8) as compilers:    # processes, which import while a model is loaded
        run_compiled([lambda: step(1), lambda: step(64)], compilers)
    num_compilations()                       # Compilations(loaded=112, compiled=3): since `watch`

A kernel that a launch needs for the first time is compiled, which takes a second, or loaded from Triton's cache on disk, which
takes milliseconds. Either way the launch waits. Left out: the threads and processes that compile (launching/compilers.py), and
which kernels a model needs, which the engine finds out by running steps (engine/warm_up.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fa_serve.launching.compilers import CompilerProcesses

log = logging.getLogger(__name__)


class Compilations(NamedTuple):
    """How many kernels launches have waited for. loaded: found in the cache on disk; compiled: not found there."""

    loaded: int = 0
    compiled: int = 0


class _Counter:
    """Triton's listener: threads call it when a kernel has been compiled or loaded. An earlier listener is called as well."""

    def __init__(self, earlier: Callable[..., Any] | None) -> None:
        self._earlier = earlier
        self._lock = threading.Lock()
        self.counted = Compilations()

    def __call__(self, *, cache_hit: bool, **described: Any) -> None:
        from fa_serve.launching.compilers import compiled_by_process  # this module is imported without Triton as well

        found = cache_hit and not compiled_by_process()
        with self._lock:
            loaded, compiled = self.counted
            self.counted = Compilations(loaded + found, compiled + (not found))
        if self._earlier is not None:
            self._earlier(cache_hit=cache_hit, **described)


def watch() -> None:
    """Count from now on. Without Triton there is nothing to count. A second call changes nothing."""
    try:
        from triton import knobs
    except ImportError:
        return
    if not isinstance(knobs.compilation.listener, _Counter):
        knobs.compilation.listener = _Counter(knobs.compilation.listener)


def num_compilations() -> Compilations:
    """How many kernels have been loaded and compiled since `watch` was called; zeros if it was not called."""
    try:
        from triton import knobs
    except ImportError:
        return Compilations()
    listener = knobs.compilation.listener
    return listener.counted if isinstance(listener, _Counter) else Compilations()


class Compilers(NamedTuple):
    """The threads and processes with which `run_compiled` compiles. processes: None if only threads compile"""

    num_threads: int = 1
    processes: CompilerProcesses | None = None


@contextmanager
def start_compilers(count: int) -> Iterator[Compilers]:
    """`count` threads, and a process for each if there are several. The processes end with the context."""
    try:
        from fa_serve.launching.compilers import CompilerProcesses

        processes = CompilerProcesses(count) if count > 1 else None
    except ImportError:  # without Triton there is nothing to compile
        processes = None
    except OSError as error:
        log.warning("only threads compile kernels, because no process could be started: %s", error)
        processes = None
    try:
        yield Compilers(count, processes)
    finally:
        if processes is not None:
            processes.close()


def run_compiled(
    calls: Iterable[Callable[[], None]],
    compilers: Compilers,
    seconds: float | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Exception]:
    """Call each function until it finishes, while threads and processes compile the kernels that the functions launch.

    A function ends early at a kernel that is not compiled yet. It is called again, from its beginning, when that kernel exists;
    meanwhile the others run. So every kernel that is launched reads what earlier kernels have written. A function that raises,
    or whose kernel cannot be compiled, is not called again. Returns what was raised, and a TimeoutError for each function that
    still waits for a kernel after `seconds`. Raises torch.AcceleratorError immediately, because nothing more can be computed
    on that device in this process.

    on_progress: called with the number of functions that need no further call, and the number of all functions
    """
    limit = float("inf") if seconds is None else time.monotonic() + seconds
    try:
        from fa_serve.launching.launch import NotCompiledError, compiling_in_threads
    except ImportError:  # without Triton there is nothing to compile
        return [error for call in calls if (error := _error_of(call)) is not None]
    errors: list[Exception] = []
    ready = list(calls)
    total = len(ready)
    blocked: dict[Future[Any], list[Callable[[], None]]] = {}
    with compiling_in_threads(*compilers):
        while ready or blocked:
            left = limit - time.monotonic()
            if left <= 0:
                waiting = len(ready) + sum(map(len, blocked.values()))
                return errors + [TimeoutError(f"not compiled within {seconds:.0f} s") for _ in range(waiting)]
            if not ready:
                wait(blocked, None if seconds is None else left, return_when=FIRST_COMPLETED)
            for compiled in [x for x in blocked if x.done()]:
                ready += blocked.pop(compiled)
            for call in ready:
                try:
                    error = _error_of(call)
                except NotCompiledError as early:
                    blocked.setdefault(early.compiled, []).append(call)
                    continue
                if error is not None:
                    errors.append(error)
            ready = []
            on_progress(total - sum(map(len, blocked.values())), total)
    return errors


def _error_of(call: Callable[[], None]) -> Exception | None:
    """What the function raises, without its traceback, whose frames would keep tensors alive."""
    try:
        call()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error.with_traceback(None)
    return None


def kernel_cache_root() -> Path:
    """The folder in which a server keeps kernels, in a subfolder per GPU; or TRITON_CACHE_DIR, which has no such subfolders."""
    if "TRITON_CACHE_DIR" in os.environ:
        return Path(os.environ["TRITON_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa_serve"


def use_kernel_cache(device: str, release: str) -> None:
    """Let Triton keep kernels in a folder for these releases of fa_serve and Triton and this GPU, if it can be written.

    The folder can be copied into an image, and old ones can be deleted. The variable TRITON_CACHE_DIR overrides it.

    release: the release of fa_serve
    """
    if "TRITON_CACHE_DIR" in os.environ or not device.startswith("cuda"):
        return
    card = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    folder = kernel_cache_root() / f"{release}-triton-{version('triton')}-{card}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernels are kept in Triton's default folder, because %s cannot be created: %s", folder, error)
        return
    if os.access(folder, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = str(folder)
