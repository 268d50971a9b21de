"""A thread, or several, that run functions for the event loop in turn, and can interrupt a function that takes too long.

    thread = DeadlineThread("template")
    text = await thread.run(lambda: template.render(...), client, timeout=5.0)     # raises asyncio.TimeoutError

Clients take turns by the processor's time that their functions have taken (costs.py): however many functions one of them has
waiting, the next client waits for one of these at most. Several threads take the functions of one queue. The time is also added
to the bill of the request. A function may let a process work for it (fa_serve/sandbox), whose time counts as its own.

Functions that wait for somebody else, such as another host, have a *lane* each of these: a lane has a part of the threads only,
and lanes take turns, so that what waits for one slow host does not hold up what waits for another. There, clients take turns by
the time for which their functions have held a thread, because waiting takes no time of the processor.

Python raises an exception in another thread between two of its bytecodes, so a loop of a chat template ends in time. A single
call into C does not end sooner. A function that nobody waits for any more is interrupted as well. The threads are daemons: they
never keep the process alive.
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
    """Raised in the thread. It is no Exception, so that no handler of the function swallows it."""


@dataclass(eq=False)
class _Job:
    """One function that waits or runs.

    client:    whose turn it takes
    lane:      what it waits for, by any name
    trial:     the work in another process, if it has any
    began:     on time.monotonic's clock, or None
    seconds:   of the processor, that it has taken, once it has ended
    abandoned: nobody waits for it
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
    """running: how many of its functions run"""

    waiting: CostQueue[_Job] = field(default_factory=CostQueue)
    running: int = 0


class _Turns:
    """The jobs that wait. The next one is of the lane that was served least recently, of those that have fewer than `per_lane`
    running, and there the oldest of the client whose jobs have cost least."""

    def __init__(self, per_lane: int) -> None:
        self._per_lane = per_lane
        self._condition = threading.Condition()
        self._lanes: dict[str | None, _Lane] = {}  # in the order of their turns; one more than the lanes that work or wait

    def put(self, job: _Job) -> None:
        with self._condition:
            self._lanes.setdefault(job.lane, _Lane()).waiting.put(job.client, job)
            self._condition.notify()

    def get(self) -> _Job:
        """Wait for a job. `end` is to be called when it has ended."""
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
    """`run` is to be called on the event loop. A thread starts with each of the first calls.

    count:    of the threads, and so of the functions that run at the same time
    per_lane: of these, how many functions of one lane may be; all by default
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

        client: who waits for it, by any name
        lane:   what it waits for, by any name
        trial:  what the work runs in another process. It is cancelled in the place of an exception that is raised in the
                midst of the work, and its processor's time counts
        """
        loop = asyncio.get_running_loop()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # fails without memory, and the next call tries again
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
            del job  # as in _run_job

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
            self._running.pop(job, None)  # an interrupt may have been raised before `_run_job` has done so
            self._jobs.end(job)
            del job  # as in _run_job

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
                _meet_interrupt()  # it may have come too late
            job.seconds = time.thread_time() - begin
            if job.trial is not None:
                job.seconds += job.trial.seconds
        with suppress(RuntimeError):  # the event loop is closed
            job.future.get_loop().call_soon_threadsafe(_settle, job.future, value, error)
        # An error has this frame, and its future has the error: with the job in the frame they would keep each other, and a
        # body of many megabytes that an error is about, until the garbage is collected.
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


def _meet_interrupt() -> None:
    """Return without an exception that waits to be raised in this thread.

    One more replaces it, and is raised here. To take it back with NULL would leave Python 3.10 and 3.11 looking for an
    exception at every call and every loop from then on, in all threads. An empty call takes 1.6 times as long then, and in 3.11
    it never returns under a profiler or a debugger.
    """
    try:
        _raise_in(threading.current_thread(), _Interrupted)
        while True:  # it is raised between two bytecodes
            pass
    except _Interrupted:
        pass
