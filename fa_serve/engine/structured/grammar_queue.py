"""Which grammar is compiled next: clients take turns, and short grammars do not wait for long ones.

    queue = GrammarQueue(sweep)
    queue.submit("request-1", client, length, work)      # work() runs in one of LANES threads
    queue.cancel("request-1")                # if it still waits
    queue.close()

Four grammars are compiled at once. At most two of them are long, at most one long one and three in all belong to one client, so
a client that sends many grammars leaves room for another client, and for short grammars that it sends itself. The threads are
daemons, so a grammar that is being compiled never keeps the process alive. Left out: compiling (grammars.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

LANES = 4
MAX_LONG = 2
MAX_LONG_PER_CLIENT = 1
MAX_PER_CLIENT = 3
LONG = 4096
"""Characters from which a structured output is long. A schema of this length compiles in about 10 ms."""
SWEEP_SECONDS = 5.0
SWEEPING_SECONDS = 60.0
"""How long `sweep` is called after the last grammar."""

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    client: str | None
    is_long: bool
    work: Callable[[], None]


class GrammarQueue:
    """Owner of the threads that compile, which start with the first grammar.

    sweep: called every SWEEP_SECONDS for a while after a grammar, to free memory
    """

    def __init__(self, sweep: Callable[[], None]) -> None:
        self._sweep = sweep
        self._condition = threading.Condition()
        # The first client has the next turn. Clients without waiting grammars are not in this dictionary.
        self._waiting: OrderedDict[str | None, deque[_Job]] = OrderedDict()
        self._running: Counter[str | None] = Counter()
        self._running_long: Counter[str | None] = Counter()
        self._threads: list[threading.Thread] = []
        self._next_sweep = self._last_sweep = 0.0  # on time.monotonic's clock
        self._closed = False

    def submit(self, name: str, client: str | None, length: int, work: Callable[[], None]) -> None:
        """Queue `work` for a structured output of `length` characters."""
        with self._condition:
            if len(self._threads) < LANES:
                thread = threading.Thread(target=self._run, name=f"fa_serve-grammar_{len(self._threads)}", daemon=True)
                thread.start()  # may fail for lack of memory; the next job tries again
                self._threads.append(thread)
            self._waiting.setdefault(client, deque()).append(_Job(name, client, length >= LONG, work))
            self._condition.notify()

    def cancel(self, name: str) -> None:
        """Forget a job that waits. A job that runs is not stopped."""
        with self._condition:
            for client, jobs in self._waiting.items():
                for job in jobs:
                    if job.name == name:
                        jobs.remove(job)
                        if not jobs:
                            del self._waiting[client]
                        return

    def close(self) -> None:
        """Forget all jobs that wait. The threads end after the job that they are in."""
        with self._condition:
            self._closed = True
            self._waiting.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                job = self._next()
                while job is None and not self._closed:
                    is_sweeping = self._next_sweep < self._last_sweep
                    self._condition.wait(SWEEP_SECONDS if is_sweeping else None)
                    if is_sweeping and time.monotonic() > self._next_sweep:  # only the first of the waiting threads
                        self._next_sweep = time.monotonic() + SWEEP_SECONDS
                        self._sweep()
                    job = self._next()
                if job is None:
                    return
            try:
                job.work()
            except Exception:
                log.exception("a grammar could not be compiled")
            with self._condition:
                self._end(job)

    def _next(self) -> _Job | None:
        """The next job that may run. It counts as running from now on."""
        if self._closed:
            return None
        long_is_full = self._running_long.total() >= MAX_LONG
        for client, jobs in self._waiting.items():
            if self._running[client] >= MAX_PER_CLIENT:
                continue
            no_long = long_is_full or self._running_long[client] >= MAX_LONG_PER_CLIENT
            job = next((job for job in jobs if not (job.is_long and no_long)), None)
            if job is None:
                continue
            jobs.remove(job)
            if jobs:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._running[client] += 1
            self._running_long[client] += job.is_long
            return job
        return None

    def _end(self, job: _Job) -> None:
        for running, count in ((self._running, 1), (self._running_long, job.is_long)):
            running[job.client] -= count
            if not running[job.client]:
                del running[job.client]
        self._last_sweep = time.monotonic() + SWEEPING_SECONDS
        self._condition.notify_all()
