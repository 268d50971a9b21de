"""The engine for asyncio: streams of outputs, one for each request. The only place where the two meet.

    engine = AsyncEngine(EngineConfig())
    await engine.start()
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), "request-1"):
        print(output.text, end="")
    await engine.shutdown()

The engine runs in a thread or a process (worker.py). A step's message is dealt to the requests' mailboxes. A mailbox holds at
most one output for each answer: what comes before the consumer is back is joined to it, so a slow consumer neither holds up a
step nor piles up memory.

If the engine ends by an exception, or its process dies, every unfinished request ends with an error at once, and later ones
raise EngineDeadError: for good, or until a new engine has been loaded (EngineConfig.max_restarts).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine, EngineStats
from fa_serve.engine.errors import EngineDeadError, RequestError
from fa_serve.engine.events import OnPhase
from fa_serve.engine.prompts import PromptReader
from fa_serve.engine.request import FinishReason, RequestOutput, SamplingParams
from fa_serve.engine.worker import Abort, Add, ProcessWorker, Ready, StepOutputs, ThreadWorker, Worker
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")


class _Mailbox:
    """What a request's answers have gained since their consumer looked last; lives on the event loop."""

    def __init__(self, num_answers: int) -> None:
        self.unfinished = set(range(num_answers))
        self.sent = False  # to the worker
        self._content: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None  # the consumer, of which there is one; an Event would cost more

    def put(self, output: RequestOutput) -> None:
        if output.index in self._content:
            self._content[output.index].absorb(output)
        else:
            self._content[output.index] = output
        if output.finished:
            self.unfinished.discard(output.index)
        self._wake()

    def refuse(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def drained(self) -> bool:
        """Whether there will be nothing more to get."""
        return not self.unfinished and not self._content

    async def get(self) -> RequestOutput:
        if not self._content and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error
        return self._content.pop(next(iter(self._content)))


class AsyncEngine:
    """Owner of the worker and its mailboxes. All methods are for the event loop that called `start`."""

    def __init__(self, engine: Engine | EngineConfig | None = None, *, on_phase: OnPhase | None = None) -> None:
        """An engine is run in a thread; a config says where its engine is run. `on_phase` is called from another thread."""
        self._on_phase = on_phase
        self._source = engine
        self._worker: Worker | None = None
        self._ready: Ready | None = None
        self.reader: PromptReader | None = None  # of texts, from any thread, once the engine is loaded
        self._mailboxes: dict[str, _Mailbox] = {}  # by the name that the worker knows a request by
        self._names: dict[str, str] = {}  # by request id; no two requests have one name, even if an id is used again
        self._serial = count()
        self._stats: EngineStats | None = None
        self._error: EngineDeadError | None = None
        self._restarts = 0
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model, if it is not there yet, and start the worker."""
        if self._worker is not None:
            raise RuntimeError("the engine has been started already")
        await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        source = self._source

        def on_message(message: StepOutputs) -> None:
            _call(loop, self._deliver, message)

        def on_death(reason: str) -> None:
            _call(loop, self._mourn, reason)

        if not isinstance(source, Engine) and (source or EngineConfig()).uses_process:
            self._worker = ProcessWorker(source, on_message, on_death, self._on_phase)
        else:
            self._worker = ThreadWorker(source, on_message, on_death, self._on_phase)
        ready = await asyncio.to_thread(self._worker.start)
        assert ready.config.max_model_len is not None
        self.reader = PromptReader(ready.tokenizer, ready.vocab_size, ready.config.max_model_len)
        self._ready = ready
        self._stats = None

    def _mourn(self, reason: str) -> None:
        """The worker has died: its requests end, and if the config says so there will be another."""
        again = not isinstance(self._source, Engine) and self._restarts < self.config.max_restarts and self._restarting is None
        self._die(EngineDeadError(f"the engine has ended: {reason}" + ("; it is being restarted" if again else "")))
        if again:
            self._restarts += 1
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self._start()
        except Exception as error:
            self._error = EngineDeadError(f"the engine has ended and could not be restarted: {error}")
            log.exception("the engine could not be restarted")
        else:
            self._error = None
            log.warning("the engine has been restarted, %d of %d times", self._restarts, self.config.max_restarts)
        finally:
            self._restarting = None

    async def shutdown(self) -> None:
        """End the engine after the step that it is in; unfinished requests end with an error."""
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)
            if self._restarting is not None:
                await self._restarting
                await asyncio.to_thread(self._worker.stop)
            self._die(EngineDeadError("the engine was shut down"))

    @property
    def is_alive(self) -> bool:
        return self._ready is not None and self._error is None

    @property
    def is_restarting(self) -> bool:
        """It has died, and another is being loaded."""
        return self._restarting is not None

    @property
    def tokenizer(self) -> Any:
        return self._loaded.tokenizer

    @property
    def config(self) -> EngineConfig:
        """What the engine was loaded with; nothing in it is "auto" any more."""
        return self._loaded.config

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def model_name(self) -> str:
        return self.config.model_name

    def stats(self) -> EngineStats:
        """The engine's snapshot after its last step."""
        return self._stats or self._loaded.stats

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The increments of the answers, each one's last with `finished`. Leaving the iterator early aborts the request.

        Raises ValueError for a bad prompt or id and QueueFullError before anything is yielded, EngineDeadError when the engine
        has ended.
        """
        if not self.is_alive or self._worker is None or self.reader is None:
            raise self._error or EngineDeadError("the engine has not been started")
        if request_id in self._names:
            raise ParameterError("request_id", "be unique among unfinished requests", request_id, "duplicate_request_id")
        worker = self._worker
        read = self.reader.read
        name = self._names[request_id] = f"{request_id}-{next(self._serial)}"
        mailbox = self._mailboxes[name] = _Mailbox(1 if params is None else params.n)
        try:
            # a long text takes a tokenizer a while, which neither the event loop nor a step should wait for
            tokens = await asyncio.to_thread(read, prompt) if isinstance(prompt, str) else read(prompt)
            if self._error is not None:
                raise self._error
            if mailbox.unfinished:  # not aborted meanwhile
                worker.send(Add(name, tokens, params, priority, timeout))
                mailbox.sent = True
            while not mailbox.drained():
                output = await mailbox.get()
                output.request_id = request_id
                output.prompt_token_ids = tokens
                yield output
        finally:
            del self._mailboxes[name], self._names[request_id]
            if mailbox.sent and mailbox.unfinished:
                worker.send(Abort(name))

    async def abort(self, request_id: str) -> None:
        """End a request now; its consumer gets a last output. Unknown ids are ignored: the request may just have ended."""
        if self._worker is not None and request_id in self._names:
            name = self._names[request_id]
            mailbox = self._mailboxes[name]
            if mailbox.sent:
                self._worker.send(Abort(name, len(mailbox.unfinished)))
            else:
                self._end(name, "abort")

    @property
    def _loaded(self) -> Ready:
        if self._ready is None:
            raise RuntimeError("the engine has not been started")
        return self._ready

    def _deliver(self, message: StepOutputs) -> None:
        self._stats = message.stats
        for name, error in message.rejected:
            if name in self._mailboxes:
                self._mailboxes[name].refuse(error)
        for output in message.outputs:
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].put(output)

    def _die(self, error: EngineDeadError) -> None:
        self._error = self._error or error
        for name in self._mailboxes:
            self._end(name, "error", RequestError("engine_dead", str(error)))

    def _end(self, name: str, reason: FinishReason, error: RequestError | None = None) -> None:
        for index in sorted((mailbox := self._mailboxes[name]).unfinished):
            mailbox.put(RequestOutput(name, [], finished=True, finish_reason=reason, error=error, index=index))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: object) -> None:
    with suppress(RuntimeError):  # the loop has been closed: nobody is listening any more
        loop.call_soon_threadsafe(function, argument)
