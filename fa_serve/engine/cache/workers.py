"""Threads that read and write files for the engine's thread, which looks at the results when it has time.

workers = Workers(4, "fa-serve-folder-read")
result = workers.submit(partial(files.read, name, memory))
result.done()
workers.submit(partial(files.remove, name), is_last=True)    # is carried out even if `close` comes before
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Workers:
    """Threads that carry out jobs in order, and that no exit of the interpreter waits for: a disk may never answer."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any], bool] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], Any], *, is_last: bool = False) -> Future[Any]:
        """The result of a job that is carried out later. is_last: also after `close`, if it was submitted before"""
        future: Future[Any] = Future()
        self._jobs.put((job, future, is_last))
        return future

    def close(self) -> None:
        """End the threads after the jobs that they are in, and those that are to be carried out even so. Others never end."""
        self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, but not longer than that for each."""
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, is_last = item
            if self._is_closed and not is_last:
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            # while the thread waits for the next job, it keeps neither the memory of this one nor, with an error, its own frame
            del item, job, future
