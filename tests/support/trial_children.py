"""Threads that wait for trials, and the processes of trials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def started(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that runs this, and what comes of it: a value or an exception."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def children_of(process: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == process:
                found.add(int(path.parent.name))
    return found
