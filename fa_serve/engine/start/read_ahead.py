"""Reads a model's weight files into the operating system's file cache while the model is loaded.

    with reading_ahead(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)     # maps the files
        model.to(device)                                         # touches their pages

A mapped file is read when its pages are touched, a little at a time and by the one thread that copies weights to the device. On
a virtual disk and two cores this gives 0.4 GB/s, and 1.2 GB/s if threads request the pages in advance. Requesting pages that
are already cached costs 20 ms per GB. Left out: which weights a rank needs; the first rank of a machine requests all of them.
Source: posix_fadvise(2).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fa_serve.engine.cache.tensors import reclaimable_memory
from fa_serve.hf.weights.headers import weight_files

BLOCK_BYTES = 256 << 10
"""Bytes that one call requests. Linux ignores what exceeds the disk's largest request, which is rarely smaller than this."""
BLOCKS_AT_A_TIME = 32
"""Blocks that a thread takes at a time. Threads take them in the order of the files, which is the order of the layers."""
THREADS = 4


@contextmanager
def reading_ahead(folder: Path) -> Iterator[None]:
    """Inside this context, threads request the weight files of the model in this folder. All bytes have been requested when it
    ends without an error.

    On a CPU, weights stay mapped, so the first requests to the engine find them in memory too. Nothing happens if the files are
    larger than the available memory, because pages would be dropped before they are used, or if the system has no
    posix_fadvise. A file that cannot be opened is left to the loader, which reports it.
    """
    files = weight_files(folder)
    sizes = [file.stat().st_size for file in files]
    if not files or not hasattr(os, "posix_fadvise") or sum(sizes) > reclaimable_memory():
        yield
        return
    step = BLOCK_BYTES * BLOCKS_AT_A_TIME
    parts = iter([(file, start) for file, size in zip(files, sizes, strict=True) for start in range(0, size, step)])
    lock = threading.Lock()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            with lock:
                part = next(parts, None)
            if part is None:
                return
            with suppress(OSError):
                _ask_for(*part)

    threads = [threading.Thread(target=ask, name="fa_serve-read-ahead", daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        ended.set()
        raise
    finally:
        for thread in threads:
            thread.join()


def _ask_for(file: Path, start: int) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for block in range(BLOCKS_AT_A_TIME):
            os.posix_fadvise(descriptor, start + block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
