"""The engine's loop, in a thread or in a process of its own, behind one small interface.

    worker = ProcessWorker(config, on_message=..., on_death=...)
    ready = worker.start()                   # loads the model; returns when it serves
    worker.send(Add("request-1", [1, 2, 3], params))
    worker.stop()

Commands go in one by one; what a step produced comes out as one message, whatever the number of requests. `on_message` and
`on_death` are called from a thread of the worker's. Neither way does a step wait for anybody: the thread's commands lie in a
queue, and in a process two more threads do nothing but read from the pipe and write to it.

A thread shares the interpreter with its surroundings, which is fine for small machines and for tests. A process has one of its
own: at tens of thousands of tokens a second, turning them into replies takes a core. Left out: asyncio (async_engine.py).
"""

from __future__ import annotations

import gc
import logging
import logging.handlers
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine, EngineStats
from fa_serve.engine.errors import QueueFullError
from fa_serve.engine.events import OnPhase, Phase
from fa_serve.engine.loading import load_tokenizer
from fa_serve.engine.request import RequestOutput, SamplingParams

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Add:
    request_id: str
    prompt: list[int]
    params: SamplingParams | None
    priority: int = 0
    timeout: float | None = None
    prepared: bool = False  # its structured output has been compiled


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    num_answers: int = 1


Command = Add | Abort | None  # None ends the engine
Commands = queue.SimpleQueue[Command]


@dataclass(slots=True)
class StepOutputs:
    """What one step produced, and what became of the commands before it. `rejected` requests were never added."""

    stats: EngineStats
    outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[tuple[str, Exception]] = field(default_factory=list)


@dataclass(slots=True)
class Ready:
    """What the world outside has to know of a loaded engine. `config` is resolved."""

    config: EngineConfig
    vocab_size: int
    stats: EngineStats
    tokenizer: Any


class Worker(Protocol):
    def start(self) -> Ready: ...
    def send(self, command: Add | Abort) -> None: ...
    def stop(self) -> None: ...


def serve(engine: Engine, commands: Commands, deliver: Callable[[StepOutputs], None]) -> None:
    """Run the engine until the command None comes. A request whose grammar takes time comes again when it is compiled."""
    preparing: set[str] = set()
    pool = ThreadPoolExecutor(2, thread_name_prefix="fa_serve-grammar")

    def prepare(command: Add, since: float) -> None:
        with suppress(Exception):  # which add_request raises again
            engine.prepare(command.params or SamplingParams())
        left = command.timeout and max(command.timeout - (time.monotonic() - since), 1e-3)  # to end as any other does
        commands.put(replace(command, prepared=True, timeout=left))

    while True:
        outputs: list[RequestOutput] = []
        rejected: list[tuple[str, Exception]] = []
        # wait for a command only when there is nothing to compute and nothing to deliver
        while not commands.empty() or not (engine.has_unfinished() or outputs or rejected):
            while commands.empty() and not (outputs or rejected) and engine.prepare_one():
                pass  # a command that comes now waits for one of these at most
            command = commands.get()
            if command is None:
                pool.shutdown(wait=False, cancel_futures=True)
                return
            if isinstance(command, Abort):
                if command.request_id in preparing:
                    preparing.remove(command.request_id)
                    end = RequestOutput(command.request_id, [], finished=True, finish_reason="abort")
                    outputs += [replace(end, index=index) for index in range(command.num_answers)]
                else:
                    outputs += engine.abort(command.request_id)
                continue
            if command.prepared:
                if command.request_id not in preparing:
                    continue  # it has been aborted meanwhile
                preparing.remove(command.request_id)
            elif command.params is not None and command.params.structured is not None:
                if len(preparing) < max(engine.config.max_waiting, 1):
                    preparing.add(command.request_id)
                    pool.submit(prepare, command, time.monotonic())
                else:
                    full = QueueFullError(f"{len(preparing)} grammars are being compiled already")
                    rejected.append((command.request_id, full))
                continue
            try:
                engine.add_request(
                    command.request_id, command.prompt, command.params, priority=command.priority, timeout=command.timeout
                )
            except Exception as error:
                known = isinstance(error, (ValueError, QueueFullError))  # another may pickle and not unpickle
                rejected.append((command.request_id, error if known else RuntimeError(f"{type(error).__name__}: {error}")))
        outputs += engine.step()
        deliver(StepOutputs(engine.stats(), outputs, rejected))


class ThreadWorker:
    def __init__(
        self,
        source: Engine | EngineConfig | None,
        on_message: Callable[[StepOutputs], None],
        on_death: Callable[[str], None],
        on_phase: OnPhase | None = None,
    ) -> None:
        self._on_phase = on_phase
        self._source = source
        self._on_message = on_message
        self._on_death = on_death
        self._commands: Commands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> Ready:
        engine = self._source if isinstance(self._source, Engine) else Engine(self._source, on_phase=self._on_phase)
        self._thread = threading.Thread(target=self._run, args=(engine,), name="fa_serve-engine", daemon=True)
        self._thread.start()
        return Ready(engine.config, engine.vocab_size, engine.stats(), engine.tokenizer)

    def send(self, command: Add | Abort) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, engine: Engine) -> None:
        try:
            serve(engine, self._commands, self._on_message)
        except BaseException as error:
            log.exception("the engine has ended")
            self._on_death(f"{type(error).__name__}: {error}")


class ProcessWorker:
    def __init__(
        self,
        config: EngineConfig | None,
        on_message: Callable[[StepOutputs], None],
        on_death: Callable[[str], None],
        on_phase: OnPhase | None = None,
    ) -> None:
        self._on_phase = on_phase
        self._config = config or EngineConfig()
        self._on_message = on_message
        self._on_death = on_death
        self._commands: Commands = queue.SimpleQueue()
        self._stopping = self._ready = False
        self._process: Any = None

    def start(self) -> Ready:
        # a fresh interpreter: a fork would inherit threads' locks and a CUDA context that is none
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(self._config, theirs), name="fa_serve-engine", daemon=True)
        self._process.start()
        theirs.close()
        if self._stopping:  # `stop` came before there was a process
            self._process.kill()
        try:
            tokenizer = load_tokenizer(self._config)
            arrivals = _arrivals(ours)
            ready = self._wait(arrivals)
        except BaseException:
            self._process.join(1)  # it is about to end by itself, and tidies up
            self._process.kill()
            self._process.join()
            raise
        ready.tokenizer = tokenizer
        self._ready = True
        threading.Thread(target=self._read, args=(arrivals,), name="fa_serve-engine-read", daemon=True).start()
        threading.Thread(target=_forward, args=(self._commands, ours), name="fa_serve-engine-write", daemon=True).start()
        return ready

    def _wait(self, arrivals: Iterator[Any]) -> Ready:
        for received in arrivals:
            if isinstance(received, Ready):
                return received
            if isinstance(received, Exception):
                raise received
            if isinstance(received, Phase):
                if self._on_phase is not None:
                    self._on_phase(received)
                continue
            logging.getLogger(received.name).handle(received)
        self._process.join()
        how = "was stopped" if self._stopping else f"ended with exit code {self._process.exitcode}"
        raise RuntimeError(f"the engine's process {how} while loading")

    def send(self, command: Add | Abort) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        """End the process after the step that it is in; kill it if that takes more than half a minute, or if it loads still."""
        self._stopping = True
        self._commands.put(None)
        if self._process is not None:
            if self._ready:
                self._process.join(30)
            self._process.kill()
            self._process.join()

    def _read(self, arrivals: Iterator[Any]) -> None:
        error = None
        for received in arrivals:
            if isinstance(received, StepOutputs):
                self._on_message(received)
            elif isinstance(received, Exception):
                error = received
            else:
                logging.getLogger(received.name).handle(received)
        self._process.join(10)
        self._process.kill()  # it lives if what it sent could not be read
        self._process.join()
        self._commands.put(None)  # the end of the thread that writes to it
        if error is not None:
            self._on_death(f"{type(error).__name__}: {error}")
        elif not self._stopping:
            log.error("the engine has ended: its process ended with exit code %s", self._process.exitcode)
            self._on_death(f"its process ended with exit code {self._process.exitcode}")


def _main(config: EngineConfig, connection: Connection) -> None:
    """The process: its main thread runs the engine, one thread reads commands and one writes messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which then drains and stops us
    commands: Commands = queue.SimpleQueue()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    logging.getLogger().addHandler(logging.handlers.QueueHandler(messages))
    logging.getLogger("fa_serve").setLevel(logging.INFO)
    writer = threading.Thread(target=_forward, args=(messages, connection))
    writer.start()

    def deliver(message: StepOutputs) -> None:
        for output in message.outputs:
            output.prompt_token_ids = []  # the other side knows them
        messages.put(message)

    try:
        ready = threading.Event()
        threading.Thread(target=_listen, args=(connection, commands, ready), daemon=True).start()
        engine = Engine(config, on_phase=messages.put)
        ready.set()
        gc.collect()
        gc.freeze()  # a collection that goes through all that has been loaded takes a quarter of a second
        messages.put(Ready(engine.config, engine.vocab_size, engine.stats(), None))
        try:
            serve(engine, commands, deliver)
        except Exception:
            log.exception("the engine has ended")
            raise
    except Exception as error:
        messages.put(error)
    finally:
        messages.put(None)
        writer.join()


def _listen(connection: Connection, commands: Commands, ready: threading.Event) -> None:
    for command in _arrivals(connection):
        commands.put(command)
    if not ready.is_set():
        os._exit(1)  # nobody waits for what is being loaded
    commands.put(None)  # the parent wants us to end, or is no more


def _forward(source: queue.SimpleQueue[Any], connection: Connection) -> None:
    """Send what comes, up to and with None: all that waits at once, so that a reader who falls behind catches up."""
    batch: list[Any] = []
    with suppress(OSError):  # nobody is there any more; whoever reads from the other end notices too
        while not (batch and batch[-1] is None):
            batch = [source.get()]
            while batch[-1] is not None and not source.empty():
                batch.append(source.get())
            connection.send(batch)


def _arrivals(connection: Connection) -> Iterator[Any]:
    """What the other end forwards, one by one, until it says or shows that this was all, or sends what cannot be read."""
    try:
        while True:
            for item in connection.recv():
                if item is None:
                    return
                yield item
    except (EOFError, OSError):
        return
    except Exception:  # somebody's that pickles and does not unpickle
        log.exception("a message between the engine's process and this one could not be read")
