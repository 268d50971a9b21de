"""Runs an engine by commands: requests and aborts come in one by one, and what a step produced goes out as one `StepOutputs`.

    loop = EngineLoop(engine, commands, deliver)
    commands.put(Add("request-1", [1, 2, 3], params))
    loop.run()                               # until the command None comes

The loop never waits for a client, and a step never waits for a grammar: two threads compile grammars, and the request joins
when its grammar is ready. Left out: where the loop runs (worker.py).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fa_serve.engine.engine import Engine
from fa_serve.engine.errors import QueueFullError
from fa_serve.engine.outputs import RequestOutput
from fa_serve.engine.sampling_params import SamplingParams
from fa_serve.engine.stats import EngineStats

GRAMMAR_THREADS = 2


@dataclass(frozen=True, slots=True)
class Add:
    """Add a request. `compiled`: its structured output has been compiled."""

    request_id: str
    prompt: list[int]
    params: SamplingParams | None
    priority: int = 0
    timeout: float | None = None
    compiled: bool = False
    client: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request. `num_answers`: how many of its answers are unfinished."""

    request_id: str
    num_answers: int = 1


Command = Add | Abort | None
"""None ends the loop."""
Commands = queue.SimpleQueue[Command]


@dataclass(slots=True)
class StepOutputs:
    """What one step produced, and what became of the commands before it.

    rejected: (request id, error) of requests that were not added
    """

    stats: EngineStats
    outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[tuple[str, Exception]] = field(default_factory=list)


class EngineLoop:
    """Owner of the requests whose grammars are being compiled. `deliver` is called after each step."""

    def __init__(self, engine: Engine, commands: Commands, deliver: Callable[[StepOutputs], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._deliver = deliver
        self._compiling: set[str] = set()
        self._pool = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="fa_serve-grammar")
        # what the commands since the last step have caused
        self._outputs: list[RequestOutput] = []
        self._rejected: list[tuple[str, Exception]] = []
        self._busy_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """How long the step, or the command, that the loop is in has taken so far; 0 while it waits. From any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def run(self) -> None:
        """Run steps until the command None comes."""
        while self._take_commands():
            self._busy_since = time.monotonic()
            outputs = self._outputs + self._engine.step()
            rejected = self._rejected
            self._outputs = []
            self._rejected = []
            self._deliver(StepOutputs(self._engine.stats(), outputs, rejected))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_commands(self) -> bool:
        """Carry out all commands that are there. Returns False if the loop is to end.

        Waits for a command only when there is nothing to compute and nothing to deliver.
        """
        while not self._commands.empty() or not (self._engine.has_unfinished() or self._has_news):
            self._busy_since = time.monotonic()
            while self._commands.empty() and not self._has_news and self._engine.prepare_one():
                self._busy_since = time.monotonic()  # a command that comes now waits for one preparation at most
            self._busy_since = None
            command = self._commands.get()
            self._busy_since = time.monotonic()
            if command is None:
                return False
            if isinstance(command, Abort):
                self._abort(command)
            else:
                self._add(command)
        return True

    @property
    def _has_news(self) -> bool:
        return bool(self._outputs or self._rejected)

    def _abort(self, command: Abort) -> None:
        if command.request_id in self._compiling:
            self._compiling.remove(command.request_id)
            end = RequestOutput(command.request_id, [], finished=True, finish_reason="abort")
            self._outputs += [replace(end, index=index) for index in range(command.num_answers)]
        else:
            self._outputs += self._engine.abort(command.request_id)

    def _add(self, command: Add) -> None:
        if command.compiled:
            if command.request_id not in self._compiling:
                return  # it was aborted while its grammar was compiled
            self._compiling.remove(command.request_id)
        elif command.params is not None and command.params.structured is not None:
            self._start_compiling(command)
            return
        try:
            self._engine.add_request(
                command.request_id,
                command.prompt,
                command.params,
                priority=command.priority,
                timeout=command.timeout,
                client=command.client,
                cache_salt=command.cache_salt,
            )
        except (ValueError, QueueFullError) as error:
            self._rejected.append((command.request_id, error))
        except Exception as error:  # its class may not survive the pipe between two processes
            self._rejected.append((command.request_id, RuntimeError(f"{type(error).__name__}: {error}")))

    def _start_compiling(self, command: Add) -> None:
        limit = max(self._engine.config.max_waiting, 1)
        if len(self._compiling) >= limit:
            full = QueueFullError(f"the queue is full: {limit} grammars are being compiled already. Try again later")
            self._rejected.append((command.request_id, full))
            return
        self._compiling.add(command.request_id)
        self._pool.submit(self._compile, command, time.monotonic())

    def _compile(self, command: Add, since: float) -> None:
        """Compile a grammar, in a thread of the pool, and send the request again. Its timeout counts from `since`."""
        with suppress(Exception):  # add_request raises the same error again
            self._engine.prepare(command.params or SamplingParams())
        timeout = command.timeout
        if timeout is not None:  # a timeout that has passed still ends the request in the usual way
            timeout = max(timeout - (time.monotonic() - since), 1e-3)
        self._commands.put(replace(command, compiled=True, timeout=timeout))
