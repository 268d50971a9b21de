"""Memory of the host that the process has freed goes back to the system, although the C library would keep it.

    limit_host_memory()                      # before other threads start, and before the first forward
    MemoryTrimmer().start()                  # a thread that looks every few seconds
    with importing(freeze=True):             # in a process of fa_serve
        from fa_serve.engine.engine import Engine

glibc keeps what is freed for later allocations, in as many as eight arenas for each core, and returns only the free end of the
oldest one. After a burst of large requests a server would keep hundreds of megabytes that nothing uses. `malloc_trim` returns
every free page. It takes 0.4 ms if there is none and 5 to 15 ms for 100 MB, so it is called only while the process is larger
than it once was. Other C libraries have neither function, and nothing happens there. Python collects its cycles first: an
exception and the frames of its traceback refer to each other, so a refused body of 10 MB stays until the next full collection,
which may be minutes away. What was there at the start is frozen, so a collection takes 2 ms.

On a CPU, oneDNN and the layer of torch above it keep what they have prepared for each shape of a matrix product, 1024 shapes
each. A step has as many rows as tokens, so clients decide how many shapes there are: 800 took 430 MB. The caches are bounded
to a number that the usual steps of a server fit into. Sources: mallopt(3), malloc_trim(3), oneDNN's "Primitive Cache".
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
"""Shapes of matrix products, of which a step has about five. They take 70 MB in both caches."""
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
    """Memory of this process, shared memory included; 0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextmanager
def importing(*, freeze: bool) -> Iterator[None]:
    """The garbage collector does not run within. Visiting modules again and again takes a fifth of the import of PyTorch and
    transformers.

    freeze: it also never visits what is there at the end. For processes of fa_serve, because a program's own objects, and
            cycles that are garbage already, would stay as well.
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
    """Frees cycles and calls malloc_trim every INTERVAL_SECONDS while the process is larger than it was."""

    _runs = threading.Event()

    def __init__(self) -> None:
        self._least = 0

    def start(self) -> None:
        """Look in a thread until the process ends. One is enough: in a process that has had one, nothing happens."""
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
