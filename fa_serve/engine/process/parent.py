"""Runs the engine's loop in a thread or in a separate process, behind one small interface.

    worker = ProcessWorker(config, on_outputs=..., on_death=...)
    ready = worker.start()                   # loads the model; returns when it is ready to serve
    worker.send(Add("request-1", [1, 2, 3], params))
    worker.stop()

`on_outputs` is called once for each step, whatever the number of requests. It and `on_death` are called from a thread of the
worker; `on_phase` is called from the thread that is in `start`. A step never waits for a client: a thread takes its commands
from a queue, and a process has two more threads that only read from the pipe and write to it.

The process sends a `Beat` each second, from a thread that needs nothing but the interpreter. `pulse` tells how long the process
has been silent and how long its step takes, so that a process that is suspended or hangs is noticed. `stop` kills the process
if it does not end in time.

A thread shares the interpreter with the server, which is enough for small machines and for tests. A process has an interpreter
to itself: at tens of thousands of tokens a second, turning them into replies takes a whole core. Left out: what runs in the
process (child.py), what goes through the pipe (pipe.py), and asyncio (async_engine.py).
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError, cause_of
from fa_serve.engine.events import OnPhase, Phase, log_phase
from fa_serve.engine.process.engine_loop import Commands, EngineLoop, Message, StepOutputs, import_engine, ready_of
from fa_serve.engine.process.engine_process import drop_process, take_process
from fa_serve.engine.process.pipe import Beat, Ready, receive_items, send_items

if TYPE_CHECKING:
    from fa_serve.engine.process.engine_loop import AnyEngine

log = logging.getLogger("fa_serve.engine")

OnOutputs = Callable[[StepOutputs], None]
OnDeath = Callable[[EngineDeadError], None]
STOP_SECONDS = 30
"""How long the worker may take for its current step before it is killed, by default."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Whether a worker is alive.

    silent_seconds: time since the last sign of life of the engine's process; 0 for a thread
    busy_seconds:   how long the engine's current step had taken at the last sign of life; 0 while the engine waits
    """

    silent_seconds: float = 0.0
    busy_seconds: float = 0.0


class Worker(Protocol):
    """A thread or process that runs an engine."""

    def start(self) -> Ready: ...
    def send(self, command: Message) -> None: ...
    def pulse(self) -> Pulse: ...
    def stop(self, timeout: float = STOP_SECONDS) -> None: ...
    def kill(self) -> None: ...


class ThreadWorker:
    """Runs an engine, or loads one and runs it, in a thread."""

    def __init__(
        self,
        source: AnyEngine | EngineConfig,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        on_phase: OnPhase | None = None,
    ) -> None:
        drop_process()  # a process may have been started ahead for this engine, which runs in a thread
        self._source = source
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_phase = on_phase
        self._commands: Commands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: EngineLoop | None = None

    def start(self) -> Ready:
        """Load the engine in this thread and start its loop in another one."""
        source = self._source
        if isinstance(source, EngineConfig):
            make = import_engine(self._on_phase or log_phase, freeze=False)
            engine = make(source, on_phase=self._on_phase, on_lost=self._commands.put, ahead=True)
        else:
            engine = source
        self._loop = EngineLoop(engine, self._commands, self._on_outputs)
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="fa_serve-engine", daemon=True)
        self._thread.start()
        return ready_of(engine, engine.tokenizer)

    def send(self, command: Message) -> None:
        """Queue a command."""
        self._commands.put(command)

    def pulse(self) -> Pulse:
        """How long the thread's step takes."""
        return Pulse(busy_seconds=0.0 if self._loop is None else self._loop.busy_seconds)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the thread after its current step. If that takes longer than `timeout` seconds, the thread is left running."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("the engine's thread has not ended within %g s and is left running", timeout)

    def kill(self) -> None:
        """A thread cannot be killed. It ends with its process."""

    def _run(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            log.exception("the engine has ended")
            self._on_death(_death_of(error))


class ProcessWorker:
    """Loads an engine and runs it in a separate process. Its phases, its log and its outputs come through a pipe."""

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        on_phase: OnPhase | None = None,
    ) -> None:
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_phase = on_phase or log_phase
        self._commands: Commands = queue.SimpleQueue()
        self._stopping = False
        self._ready = False
        self._process: Any = None
        self._heard = time.monotonic()
        self._busy_seconds = 0.0

    def start(self) -> Ready:
        """Tell the process what to load, and wait until it is loaded. Raises what loading raises."""
        self._process, ours = take_process()
        if self._stopping:  # `stop` was called before there was a process
            self._process.kill()
        try:
            with suppress(OSError):  # the process has ended, which is noticed below when reading from it
                ours.send(self._config)
            from fa_serve.engine.start.loading import load_tokenizer  # while the process imports the same modules

            tokenizer = load_tokenizer(self._config)
            received = receive_items(ours)
            ready = self._wait(received)
        except BaseException:
            self._process.join(1)  # it usually ends by itself and cleans up
            self._process.kill()
            self._process.join()
            raise
        ready.tokenizer = tokenizer
        self._heard = time.monotonic()
        self._ready = True
        threading.Thread(target=self._read, args=(received,), name="fa_serve-engine-read", daemon=True).start()
        threading.Thread(target=send_items, args=(self._commands, ours), name="fa_serve-engine-write", daemon=True).start()
        return ready

    def send(self, command: Message) -> None:
        """Queue a command."""
        self._commands.put(command)

    def pulse(self) -> Pulse:
        """How long the process has been silent, and what its last beat says."""
        return Pulse(time.monotonic() - self._heard, self._busy_seconds)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the process after its current step. It is killed after `timeout` seconds, or at once if it is still loading."""
        self._stopping = True
        self._commands.put(None)
        if self._process is not None:
            if self._ready:
                self._process.join(timeout)
                if self._process.is_alive():
                    log.error("the engine's process has not ended within %g s and is killed", timeout)
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        """End the process at once, even if it is suspended. Does not wait, so a signal handler may call it."""
        self._stopping = True
        if self._process is not None and self._process.pid is not None:
            with suppress(OSError):  # it has ended
                os.kill(self._process.pid, signal.SIGKILL)

    def _wait(self, received: Iterator[Any]) -> Ready:
        """Pass on phases and log records until the engine is loaded."""
        for item in received:
            if isinstance(item, Ready):
                return item
            if isinstance(item, Exception):
                raise item
            self._pass_on(item)
        self._process.join()
        how = "was stopped" if self._stopping else f"ended with exit code {self._process.exitcode}"
        raise EngineDeadError(f"the engine's process {how} while it was loading the model", f"its next process {how}")

    def _pass_on(self, item: Phase | logging.LogRecord) -> None:
        if isinstance(item, logging.LogRecord):
            logging.getLogger(item.name).handle(item)
        else:
            self._on_phase(item)

    def _read(self, received: Iterator[Any]) -> None:
        """Pass on what the process sends until it ends. Runs in a thread."""
        error = None
        for item in received:
            self._heard = time.monotonic()
            if isinstance(item, StepOutputs):
                self._busy_seconds = 0.0
                self._on_outputs(item)
            elif isinstance(item, Beat):
                self._busy_seconds = item.busy_seconds
            elif isinstance(item, Exception):
                error = item
            else:
                self._pass_on(item)
        self._process.join(10)
        self._process.kill()  # the process is alive if something that it sent could not be read
        self._process.join()
        self._commands.put(None)  # ends the thread that writes to the process
        if error is not None:
            self._on_death(_death_of(error))
        elif not self._stopping:
            log.error("the engine has ended: its process ended with exit code %s", self._process.exitcode)
            reason = f"its process ended with exit code {self._process.exitcode}"
            self._on_death(EngineDeadError(reason, reason))


def _death_of(error: BaseException) -> EngineDeadError:
    reason = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
    return EngineDeadError(reason, cause_of(error))
