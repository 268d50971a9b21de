"""Threads that run functions for the event loop, and can interrupt a function that takes too long.

    thread = DeadlineThread("template")
    text = await thread.run(lambda: template.render(...), client, timeout=5.0)     # raises asyncio.TimeoutError

Clients take turns by the processor time that their functions have taken (costs.py): however many functions of one client wait,
the next client waits for at most one of them. All threads take their functions from one queue. The time is also added to the
bill of the request. A function may let a process work for it (fa_serve/sandbox); the time of that process counts as its own.

Functions that wait for something else, such as another host, belong to a *lane*, one for each host. A lane may use only some
of the threads, and lanes take turns, so that functions that wait for a slow host do not hold up those that wait for another.
Within such a lane, clients take turns by the time for which their functions have held a thread, because waiting takes no
processor time.

To interrupt a function, Python raises an exception in its thread between two bytecodes, so a loop in a chat template ends in
time. A single call into C still runs to its end. A function that nobody waits for any more is interrupted as well. The threads
are daemons: they never keep the process alive.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fa_serve.sandbox.trials import Trial

from .costs import BILL, CostQueue

T = TypeVar("T")


class _Interrupted(BaseException):
    """Raised in the thread to interrupt a function. It is not an Exception, so no handler in the function swallows it."""


@dataclass(eq=False)
class _Job:
    """One function that waits or runs.

    client:    the client whose turn it takes
    lane:      any name for what it waits for; None if it only computes
    trial:     its work in another process, or None
    began:     when it began, on time.monotonic's clock; None before
    seconds:   the processor time that it took, once it has ended
    abandoned: whether nobody waits for it any more
    """

    work: Callable[[], Any]
    client: str | None
    lane: str | None
    trial: Trial | None
    future: asyncio.Future[Any]
    began: float | None = None
    seconds: float = 0.0
    abandoned: bool = False


@dataclass(slots=True)
class _Lane:
    """running: how many functions of this lane run"""

    waiting: CostQueue[_Job] = field(default_factory=CostQueue)
    running: int = 0


class _Turns:
    """The waiting jobs. The next one comes from the lane that was served least recently among those with fewer than `per_lane`
    running jobs. Within that lane, it is the oldest job of the client whose jobs have cost least."""

    def __init__(self, per_lane: int) -> None:
        self._per_lane = per_lane
        self._condition = threading.Condition()
        self._lanes: dict[str | None, _Lane] = {}  # in the order of their turns; idle lanes are removed, except None

    def put(self, job: _Job) -> None:
        with self._condition:
            self._lanes.setdefault(job.lane, _Lane()).waiting.put(job.client, job)
            self._condition.notify()

    def get(self) -> _Job:
        """Wait for a job and take it. Call `end` when the job has ended."""
        with self._condition:
            while True:
                for name, lane in self._lanes.items():
                    job = lane.waiting.get() if lane.running < self._per_lane else None
                    if job is not None:
                        lane.running += 1
                        self._lanes[name] = self._lanes.pop(name)
                        return job
                self._condition.wait()

    def end(self, job: _Job) -> None:
        with self._condition:
            lane = self._lanes[job.lane]
            lane.running -= 1
            held = job.seconds if job.lane is None or job.began is None else time.monotonic() - job.began
            lane.waiting.charge(job.client, held)
            if job.lane is not None and not lane.running and not lane.waiting:
                del self._lanes[job.lane]
            self._condition.notify()


class DeadlineThread:
    """Call `run` on the event loop. Each of the first calls starts a thread.

    count:    the number of threads, and so of functions that run at the same time
    per_lane: how many functions of one lane may run at the same time; `count` by default
    """

    def __init__(self, name: str, count: int = 1, per_lane: int | None = None):
        self._name = name
        self._count = count
        self._jobs = _Turns(count if per_lane is None else per_lane)
        self._lock = threading.Lock()
        self._running: dict[_Job, threading.Thread] = {}
        self._threads: list[threading.Thread] = []

    async def run(
        self,
        work: Callable[[], T],
        client: str | None = None,
        timeout: float | None = None,
        trial: Trial | None = None,
        lane: str | None = None,
    ) -> T:
        """What `work` returns. Raises what it raises, or asyncio.TimeoutError `timeout` seconds after it has begun.

        client: any name for the client that waits for it
        lane:   any name for what it waits for
        trial:  the part of the work that runs in another process. To interrupt the work, the trial is cancelled, and no
                exception is raised in the thread. Its processor time counts as that of the work
        """
        loop = asyncio.get_running_loop()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # raises if there is no memory; the next call tries again
            self._threads.append(thread)
        job = _Job(work, client, lane, trial, loop.create_future())
        self._jobs.put(job)
        try:
            while timeout is not None:
                left = timeout if job.began is None else job.began + timeout - time.monotonic()
                done, _ = await asyncio.wait([job.future], timeout=max(left, 0.001))
                if done:
                    break
                if job.began is not None and time.monotonic() >= job.began + timeout:
                    raise asyncio.TimeoutError  # the built-in TimeoutError from Python 3.11 on
            result: T = await job.future
            return result
        finally:
            if not job.future.done() or job.future.cancelled():
                self._abandon(job)
            if job.began is not None and (bill := BILL.get()) is not None:
                bill.seconds += job.seconds or time.monotonic() - job.began
            del job  # for the reason given in _run_job

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            thread = self._running.get(job)
            if thread is None:
                return
            if job.trial is None:
                _raise_in(thread, _Interrupted)
            else:
                job.trial.cancel()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            with suppress(_Interrupted):
                self._run_job(job)
            self._running.pop(job, None)  # an interrupt may have kept `_run_job` from removing it
            self._jobs.end(job)
            del job  # for the reason given in _run_job

    def _run_job(self, job: _Job) -> None:
        with self._lock:
            if job.abandoned:
                return
            self._running[job] = threading.current_thread()
        job.began = time.monotonic()
        begin = time.thread_time()
        error: BaseException | None = None
        value = None
        try:
            value = job.work()
        except Exception as raised:
            error = raised
        finally:
            with self._lock:
                del self._running[job]
            if job.abandoned and job.trial is None:
                _absorb_interrupt()  # the interrupt may not have been raised yet
            job.seconds = time.thread_time() - begin
            if job.trial is not None:
                job.seconds += job.trial.seconds
        with suppress(RuntimeError):  # the event loop is closed
            job.future.get_loop().call_soon_threadsafe(_settle, job.future, value, error)
        # The error refers to this frame through its traceback, and the job's future refers to the error. If the frame still
        # referred to the job, this cycle would keep them all in memory until the next garbage collection, and with them
        # perhaps a body of many megabytes.
        del job, error


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))


def _absorb_interrupt() -> None:
    """Make sure that no interrupt is still to be raised in this thread.

    A second interrupt replaces one that is still pending, and is raised here. Cancelling the pending one with NULL would make
    Python 3.10 and 3.11 look for an exception at every call and every loop from then on, in all threads. An empty call then
    takes 1.6 times as long, and in 3.11 it never returns under a profiler or a debugger.
    """
    try:
        _raise_in(threading.current_thread(), _Interrupted)
        while True:  # it is raised between two bytecodes
            pass
    except _Interrupted:
        pass
