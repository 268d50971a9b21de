"""Threads that read and write files for the engine's thread, which looks at the results when it has time.

workers = Workers(4, "fa-serve-folder-read")
result = workers.submit(partial(files.read, name, memory))
result.done()
workers.submit(partial(files.remove, name), is_last=True)    # is carried out even if `close` is called before it
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Workers:
    """Threads that carry out jobs in order. The interpreter exits without waiting for them, because a disk may never answer."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any], bool] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], Any], *, is_last: bool = False) -> Future[Any]:
        """The result of a job that is carried out later. is_last: it is carried out even if `close` is called before that"""
        future: Future[Any] = Future()
        self._jobs.put((job, future, is_last))
        return future

    def close(self) -> None:
        """End the threads after their current jobs and the jobs with `is_last`. The results of all other jobs never arrive."""
        self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, for at most `seconds` for each of them."""
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
