"""The engine in a thread of its own, for asyncio. Its two queues are the only place where the two meet.

    engine = AsyncEngine(EngineConfig())
    await engine.start()
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), "request-1"):
        print(output.text, end="")
    await engine.shutdown()

Commands (add, abort, stop) go to the thread through a queue that it empties between steps. What a step produced comes back as
one message, whatever the number of requests, and is dealt to their mailboxes. A mailbox holds at most one output: what comes
before the consumer is back is joined to it, so a slow consumer neither holds up a step nor piles up memory.

If the thread ends by an exception, every unfinished request ends with an error, and later ones raise EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine, EngineStats
from fa_serve.engine.request import RequestOutput, SamplingParams
from fa_serve.spec import FaServeError

log = logging.getLogger("fa_serve.engine")


class EngineDeadError(FaServeError, RuntimeError):
    """The engine has ended; the text says by what."""


@dataclass(frozen=True, slots=True)
class Add:
    request_id: str
    prompt: list[int]
    params: SamplingParams | None
    priority: int
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(slots=True)
class Message:
    """What happened between two looks at the queue of commands. `rejected` requests were never added."""

    outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[tuple[str, Exception]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.rejected)


def serve(engine: Engine, commands: queue.SimpleQueue[Add | Abort | None], deliver: Callable[[Message], None]) -> None:
    """Run the engine until the command None comes."""
    while True:
        message = Message()
        # wait for a command only when there is nothing to compute and nothing to deliver
        while not commands.empty() or not (engine.has_unfinished() or message):
            command = commands.get()
            if command is None:
                return
            if isinstance(command, Abort):
                output = engine.abort(command.request_id)
                message.outputs += [] if output is None else [output]
                continue
            try:
                engine.add_request(
                    command.request_id, command.prompt, command.params, priority=command.priority, timeout=command.timeout
                )
            except (ValueError, FaServeError) as error:
                message.rejected.append((command.request_id, error))
        message.outputs += engine.step()
        if message:
            deliver(message)


class _Mailbox:
    """What a request has gained since its consumer looked last; lives on the event loop."""

    def __init__(self) -> None:
        self._content: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, content: RequestOutput | Exception) -> None:
        if isinstance(self._content, RequestOutput) and isinstance(content, RequestOutput):
            self._content.absorb(content)
        else:
            self._content = content
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        content, self._content = self._content, None
        if isinstance(content, RequestOutput):
            return content
        assert content is not None
        raise content


class AsyncEngine:
    """Owner of the thread and its queues. All methods are for the event loop that called `start`."""

    def __init__(self, engine: Engine | EngineConfig | None = None) -> None:
        self._source = engine
        self._engine: Engine | None = None
        self._commands: queue.SimpleQueue[Add | Abort | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._thread: threading.Thread | None = None
        self._error: EngineDeadError | None = None

    async def start(self) -> None:
        """Load the model, if it is not there yet, and start the thread."""
        if self._thread is not None:
            raise RuntimeError("the engine has been started already")
        source = self._source
        self._engine = source if isinstance(source, Engine) else await asyncio.to_thread(Engine, source)
        arguments = (self._engine, asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._run, args=arguments, name="fa_serve-engine", daemon=True)
        self._thread.start()

    async def shutdown(self) -> None:
        """End the thread after the step that it is in; unfinished requests end with an error."""
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
            self._die(EngineDeadError("the engine was shut down"))

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine has not been started")
        return self._engine

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._error is None

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def model_name(self) -> str:
        return self.engine.config.model_name

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The increments of one answer, the last with `finished`. Leaving the iterator early aborts the request.

        Raises ValueError for a bad prompt or id and QueueFullError before anything is yielded, EngineDeadError when the engine
        has ended.
        """
        if not self.is_alive:
            raise self._error or EngineDeadError("the engine has not been started")
        if request_id in self._mailboxes:
            raise ValueError(f"request_id must be unique among unfinished requests, got {request_id!r}")
        mailbox = self._mailboxes[request_id] = _Mailbox()
        ended = False
        try:
            # a long text takes a tokenizer a while, which neither the event loop nor a step should wait for
            read = self.engine.tokenize
            tokens = await asyncio.to_thread(read, prompt) if isinstance(prompt, str) else read(prompt)
            if self._error is not None:
                raise self._error
            self._commands.put(Add(request_id, tokens, params, priority, timeout))
            while not ended:
                output = await mailbox.get()
                ended = output.finished
                yield output
        finally:
            del self._mailboxes[request_id]
            if not ended:
                self._commands.put(Abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request now; its consumer gets a last output. Unknown ids are ignored: the request may just have ended."""
        self._commands.put(Abort(request_id))

    def _run(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """The thread."""
        try:
            serve(engine, self._commands, lambda message: _call(loop, self._deliver, message))
        except BaseException as error:
            log.exception("the engine has ended")
            _call(loop, self._die, EngineDeadError(f"the engine has ended: {type(error).__name__}: {error}"))

    def _deliver(self, message: Message) -> None:
        for request_id, error in message.rejected:
            if request_id in self._mailboxes:
                self._mailboxes[request_id].put(error)
        for output in message.outputs:
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].put(output)

    def _die(self, error: EngineDeadError) -> None:
        self._error = self._error or error
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(RequestOutput(request_id, [], finished=True, finish_reason="error", error=str(error)))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: object) -> None:
    with suppress(RuntimeError):  # the loop has been closed: nobody is listening any more
        loop.call_soon_threadsafe(function, argument)
