"""Gives host memory that the process has freed back to the system, because the C library would keep it.

    limit_host_memory()                      # before other threads start, and before the first forward
    MemoryTrimmer().start()                  # a thread that checks every few seconds
    with importing(freeze=True):             # in a process of fa_serve
        from fa_serve.engine.engine import Engine

glibc keeps freed memory for later allocations, in as many as eight arenas for each core, and returns only the free end of the
oldest one. After a burst of large requests a server would keep hundreds of megabytes that nothing uses. `malloc_trim` returns
every free page. It takes 0.4 ms if there is none and 5 to 15 ms for 100 MB, so it is called only while the process is larger
than it once was. Other C libraries have neither `mallopt` nor `malloc_trim`, and nothing happens there. Python's cycles are
collected first: an exception and the frames of its traceback refer to each other, so a refused body of 10 MB would stay until
the next full collection, which may be minutes away. Objects from the start-up are frozen, so a collection takes 2 ms.

On a CPU, oneDNN and the layer of torch above it each cache what they have prepared for up to 1024 shapes of matrix products. A
step has as many rows as tokens, so clients decide how many shapes there are: 800 took 430 MB. The caches are bounded to as many
shapes as the usual steps of a server need. Sources: mallopt(3), malloc_trim(3), oneDNN's "Primitive Cache".
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

M_ARENA_MAX = -8
ARENAS = 2
"""Arenas for all threads. Few threads allocate tensors and bodies, and Python manages the memory of small objects itself."""
SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN and of torch. Both caches hold the same shapes: bounding one of them frees little."""
SHAPES = 128
"""Shapes of matrix products in each cache. They take 70 MB in both caches together. A step has about five shapes."""
INTERVAL_SECONDS = 5.0
GROWTH = 8 << 20
"""Bytes above the least resident memory so far that make a trim worth while."""


def limit_host_memory() -> None:
    """Bound what the C library and torch keep in this process and in processes that it starts.

    malloc uses few arenas, so that what one thread frees serves the others. Variables that the operator has set win.
    """
    for name in SHAPE_CACHES:
        os.environ.setdefault(name, str(SHAPES))
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def resident_bytes() -> int:
    """Memory of this process, shared memory included; 0 if the system does not report it."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextmanager
def importing(*, freeze: bool) -> Iterator[None]:
    """A context in which the garbage collector does not run: it would visit modules again and again, which takes a fifth of the
    time of importing PyTorch and transformers.

    freeze: the collector also never visits the objects that exist at the end. Only for processes of fa_serve, because another
            program's own objects, and cycles that are garbage already, would never be freed either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if enabled:
            gc.enable()


class MemoryTrimmer:
    """Frees cycles and calls malloc_trim every INTERVAL_SECONDS while the process is larger than its least size so far."""

    _runs = threading.Event()

    def __init__(self) -> None:
        self._least = 0

    def start(self) -> None:
        """Start a thread that calls `look` until the process ends. If this process has such a thread already, do nothing."""
        if not MemoryTrimmer._runs.is_set():
            MemoryTrimmer._runs.set()
            threading.Thread(target=self._run, name="fa_serve-trim", daemon=True).start()

    def look(self) -> bool:
        """Collect and trim if the process has grown. Returns whether it did so."""
        resident = resident_bytes()
        if self._least and resident < self._least + GROWTH:
            self._least = min(self._least, resident)
            return False
        gc.collect()
        with suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)
        self._least = min(self._least or resident, resident_bytes())
        return True

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL_SECONDS)
            self.look()
