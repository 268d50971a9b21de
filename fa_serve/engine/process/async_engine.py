"""The engine for asyncio: a stream of outputs for each request. Only this module and its mailboxes use asyncio.

    engine = AsyncEngine(EngineConfig())
    await engine.start()
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), "request-1"):
        print(output.text, end="")
    await engine.shutdown()

The engine runs in a thread or a process (parent.py). The outputs of a step are put into the mailboxes of their requests. A
mailbox holds at most one output for each answer: an output that arrives before the consumer is back is appended to the one that
waits. So a slow consumer does not delay a step. If too many log-probabilities wait, the request with the most ends in an error.

If the engine raises an exception, or its process dies, every unfinished request ends with an error at once, and later requests
raise EngineDeadError, either for good or until a new worker has loaded the model (EngineConfig.max_restarts).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineAsleepError, EngineDeadError, RequestError, cause_of
from fa_serve.engine.events import OnPhase
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.parallel.follower_main import follow_if_not_rank_0
from fa_serve.engine.pooling.inputs import EncoderInputs, InputReader
from fa_serve.engine.pooling.params import EncoderCard, PoolingParams
from fa_serve.engine.process.controls import PAUSE_MODES, Control, ControlName, PauseMode, Reply
from fa_serve.engine.process.engine_loop import Abort, Add, Encode, LoadAdapter, StepOutputs
from fa_serve.engine.process.mailbox import Mailbox, discard_unread
from fa_serve.engine.process.parent import STOP_SECONDS, OnDeath, OnOutputs, ProcessWorker, Pulse, ThreadWorker, Worker
from fa_serve.engine.process.pipe import Ready
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.engine.stats import EngineStats
from fa_serve.engine.summary import EngineSummary
from fa_serve.spec import ParameterError

if TYPE_CHECKING:
    from fa_serve.engine.process.engine_loop import AnyEngine

log = logging.getLogger("fa_serve.engine")
LOOK_SECONDS = 0.02
"""How often a pause checks whether requests in flight have ended."""
NEVER_END = (
    "requests in flight cannot end while the engine is asleep: call wake_up() first, or pause with mode 'keep' or 'abort'"
)


class AsyncEngine:
    """Owner of the worker and of the mailboxes. Call all methods on the event loop that called `start`.

    engine:   an engine, which then runs in a thread; or a config, which says where its engine runs
    on_phase: called with each `Phase` of a start-up when it has ended, from another thread
    reader:   turns texts into token ids, from any thread; None before `start` has returned
    inputs:   turns the inputs of an encoder into token ids, from any thread; None for an engine that generates
    """

    def __init__(self, engine: AnyEngine | EngineConfig | None = None, *, on_phase: OnPhase | None = None) -> None:
        self._source = EngineConfig() if engine is None else engine
        self._on_phase = on_phase
        self._worker: Worker | None = None
        self._ready: Ready | None = None
        self.reader: PromptReader | None = None
        self.inputs: InputReader | None = None
        # The worker knows each request by a name that is never used again, even if its id is.
        self._mailboxes: dict[str, Mailbox] = {}  # by name
        self._names: dict[str, str] = {}  # by request id
        self._serial = count()
        self._adapters: dict[str, str] = {}  # folders by name
        self._stats: EngineStats | None = None
        self._error: EngineDeadError | None = None
        self.num_restarts = 0  # workers that were started to replace a dead one
        self._restarting: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._open = asyncio.Event()  # requests that arrive while the engine is paused or asleep wait for it
        self._open.set()
        self._is_paused = False
        self.is_asleep = False  # memory or weights are missing: nothing is computed before `wake_up` or an update
        self._replies: dict[int, asyncio.Future[Reply]] = {}  # by serial number, until the answer arrives

    async def start(self) -> None:
        """Start the worker, which loads the model if a config was given. Raises what loading raises.

        Under torchrun, with tensor parallelism, a rank other than 0 follows rank 0 here, and its process ends with rank 0.
        """
        if self._worker is not None:
            raise RuntimeError("cannot start the engine: it has been started already")
        if isinstance(self._source, EngineConfig):
            follow_if_not_rank_0(self._source)
        await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._worker = self._make_worker(partial(_call, loop, self._deliver), partial(_call, loop, self._handle_death))
        ready = await asyncio.to_thread(self._worker.start)
        assert ready.config.max_model_len is not None
        self.reader = PromptReader(ready.tokenizer, ready.vocab_size, ready.config.max_model_len)
        if ready.card is not None:
            self.inputs = InputReader(ready.tokenizer, ready.card, ready.vocab_size)
        self._ready = ready
        self._stats = None
        self._adapters = dict(each.split("=", 1) for each in ready.config.lora)

    def _make_worker(self, on_outputs: OnOutputs, on_death: OnDeath) -> Worker:
        source = self._source
        if isinstance(source, EngineConfig) and source.uses_process:
            return ProcessWorker(source, on_outputs, on_death, self._on_phase)
        return ThreadWorker(source, on_outputs, on_death, self._on_phase)

    def _handle_death(self, death: EngineDeadError) -> None:
        """The worker has died: end its requests, and start another worker if the config allows it."""
        allowed = self._source.max_restarts if isinstance(self._source, EngineConfig) else 0
        restarts = self.num_restarts < allowed and self._restarting is None
        more = "; it is being restarted" if restarts else ""
        self._end_all(EngineDeadError(f"the engine has ended: {death}{more}", death.cause))
        if restarts:
            self.num_restarts += 1
            self._restarting = asyncio.create_task(self._restart(self.weight_version if self._ready else 0))
        else:
            self._ended.set()

    async def _restart(self, weight_version: int) -> None:
        adapters = self._adapters
        try:
            await self._start()
            await self._restore(adapters)
        except Exception as error:
            self._error = EngineDeadError(f"the engine has ended and could not be restarted: {error}", cause_of(error))
            log.exception("the engine could not be restarted")
            self._ended.set()
        else:
            self._error = None
            text = "the engine has been restarted (restart %d of %d); weight updates that are lost: %d"
            log.warning(text, self.num_restarts, self.config.max_restarts, weight_version)
        finally:
            self._restarting = None

    async def _restore(self, adapters: Mapping[str, str]) -> None:
        """Before requests arrive, serve the adapters of the previous engine, even if the config names others."""
        for name in [name for name, folder in self._adapters.items() if adapters.get(name) != folder]:
            await self._change_adapter(name, None, starting=True)
        for name in [name for name in adapters if name not in self._adapters]:
            try:
                await self._change_adapter(name, adapters[name], starting=True)
            except (OSError, RuntimeError, ValueError) as error:
                if isinstance(error, EngineDeadError):
                    raise
                log.warning("the adapter %r could not be loaded again: %s", name, error)

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """End the engine after its current step, or after `timeout` seconds. Unfinished requests end with an error."""
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop, timeout)
            while self._restarting is not None:  # it may wait for an answer that will never arrive
                self._end_all(EngineDeadError("the engine was shut down"))
                await asyncio.wait([self._restarting], timeout=LOOK_SECONDS)
                await asyncio.to_thread(self._worker.stop, timeout)
            self._end_all(EngineDeadError("the engine was shut down"))
            self._ended.set()

    async def ended(self) -> EngineDeadError:
        """Why the engine has ended. Waits until it has ended for good."""
        await self._ended.wait()
        assert self._error is not None
        return self._error

    def kill(self) -> None:
        """End the engine's process at once, if it has one. For use when this process ends: requests are not told. A signal
        handler may call it."""
        if self._worker is not None:
            self._worker.kill()

    def pulse(self) -> Pulse:
        """How long the engine's process has been silent, and how long its step takes."""
        return self._worker.pulse() if self._worker is not None and self._ready is not None else Pulse()

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._ready is not None and self._error is None

    @property
    def death_cause(self) -> str:
        """Why the engine is not alive, as every client may see it: `EngineDeadError.cause`; empty if it did not die."""
        return "" if self._error is None else self._error.cause

    @property
    def is_restarting(self) -> bool:
        """Whether the worker has died and another one is loading the model."""
        return self._restarting is not None

    @property
    def tokenizer(self) -> Any:
        return self.ready.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The engine's settings. Nothing in them is "auto" any more."""
        return self.ready.config

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer, unless a request ignores them."""
        return self.ready.eos_ids

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return self.ready.default_params

    @property
    def card(self) -> EncoderCard | None:
        """The description of an encoder; None for an engine that generates."""
        return self.ready.card

    @property
    def summary(self) -> EngineSummary:
        """What the engine has decided in addition to its config."""
        return self.ready.summary

    @property
    def model_name(self) -> str:
        return self.config.model_name

    def stats(self) -> EngineStats:
        """The engine's snapshot after its last step."""
        return self._stats or self.ready.stats

    def snapshots(self) -> Mapping[str | None, EngineStats]:
        """The snapshot of each engine by the name of its replica. The name is None for a single engine that is no replica."""
        return {None: self.stats()}

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return [*self._adapters]

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter in a folder under a name. No step waits for it. Raises as `Engine.load_adapter`."""
        await self._change_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Serve no more requests with an adapter. Raises as `Engine.unload_adapter`."""
        await self._change_adapter(name, None)

    async def _change_adapter(self, name: str, folder: str | None, starting: bool = False) -> None:
        (await self._told(lambda serial: LoadAdapter(serial, name, folder), starting)).value()
        self._adapters.pop(name, None)
        if folder is not None:
            self._adapters[name] = folder

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        images: Sequence[ImageInput] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """The increments of all answers; the last one of each answer is `finished`. Leaving the iterator aborts the request.

        The arguments are those of `Engine.add_request`. Without `params`, `default_params` apply.

        Before the first output it raises ParameterError as `Engine.add_request` does, QueueFullError when too many requests
        wait, and EngineDeadError when the engine has ended or has not been started.
        """
        if self.reader is None:
            raise EngineDeadError("the engine has not been started")
        read = self.reader.read
        with self._mailbox(request_id, 1 if params is None else params.n) as (name, mailbox, worker):
            # Tokenizing a long text takes a while, and neither the event loop nor a step should wait for it.
            tokens: list[int]
            if images and not isinstance(prompt, str):
                tokens = list(prompt)  # image tokens may lie outside the vocabulary; the engine allows that
            else:
                tokens = await asyncio.to_thread(read, prompt) if isinstance(prompt, str) else read(prompt)
            await self._open.wait()
            if self._error is not None:
                raise self._death()
            if mailbox.unfinished:  # else it was aborted meanwhile
                worker.send(Add(name, tokens, params, priority, timeout, client, cache_salt, adapter, images=images))
                mailbox.sent = True
            while not mailbox.drained():
                output = await mailbox.get()
                output.request_id = request_id
                output.prompt_token_ids = tokens
                yield output

    async def encode(
        self,
        inputs: EncoderInputs,
        params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
    ) -> list[RequestOutput]:
        """An encoder's outputs for what `inputs.read` returned, in order. An output covers one or several inputs. Cancelling
        aborts the request.

        As soon as an input has failed, it returns the outputs so far, one of which has an `error`. The arguments are those of
        `Encoder.add_request`. Raises as `generate` does.
        """
        found: dict[int, RequestOutput] = {}
        with self._mailbox(request_id, len(inputs)) as (name, mailbox, worker):
            worker.send(Encode(name, inputs, params, priority, timeout, client))
            mailbox.sent = True
            while not mailbox.drained():
                output = await mailbox.get()
                found[output.index] = output
                if output.error is not None:
                    break
        return [found[index] for index in sorted(found)]

    def _death(self) -> EngineDeadError:
        """Why there is no engine. Each caller gets a new error, because an error that is raised keeps the frames that it passes
        through alive, with their prompts."""
        return EngineDeadError("the engine has not been started" if self._error is None else str(self._error))

    @contextmanager
    def _mailbox(self, request_id: str, num_answers: int) -> Iterator[tuple[str, Mailbox, Worker]]:
        """A context with a request's name and mailbox, and the worker. A request that is unfinished at its end is aborted."""
        if not self.is_alive or self._worker is None:
            raise self._death()
        if request_id in self._names:
            raise ParameterError("request_id", "be unique among unfinished requests", request_id, "duplicate_request_id")
        worker = self._worker
        name = f"{request_id}-{next(self._serial)}"
        mailbox = Mailbox(num_answers)
        self._names[request_id] = name
        self._mailboxes[name] = mailbox
        try:
            yield name, mailbox, worker
        finally:
            del self._mailboxes[name], self._names[request_id]
            if mailbox.in_flight:
                worker.send(Abort(name))

    async def abort(self, request_id: str) -> None:
        """End a request now. Its consumer gets a last output. Unknown ids are ignored: the request may just have ended."""
        if self._worker is not None and request_id in self._names:
            name = self._names[request_id]
            mailbox = self._mailboxes[name]
            if mailbox.sent:
                self._worker.send(Abort(name, len(mailbox.unfinished)))
            else:
                self._mailboxes[name].end(name, "abort", None)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Compute nothing until `resume`. Requests that arrive meanwhile wait.

        mode: "abort" ends requests in flight with the tokens that they have, "wait" waits for their end, and "keep" leaves them
              as they are, with their pages, so that they go on after `resume`

        Raises ParameterError for an unknown mode and for an encoder, EngineDeadError when the engine has ended, and
        EngineAsleepError for "wait" while requests in flight sleep; such a call changes nothing.
        """
        if mode not in PAUSE_MODES:
            raise ParameterError("mode", f"be {', '.join(PAUSE_MODES)}", mode)
        if not self.is_alive or self.ready.card is not None:
            await self._control("pause")  # which raises, before requests wait or are aborted
        was_paused = self._is_paused
        if mode == "wait" and not self.is_asleep:
            await self._control("resume")  # an earlier pause may have kept requests, which cannot end before they go on
        self._is_paused = True
        self._open_or_close()
        if mode == "abort":
            for request_id, name in [*self._names.items()]:
                if self._mailboxes[name].sent:  # those that are not sent yet wait for `resume`
                    await self.abort(request_id)
        while mode == "wait" and any(mailbox.in_flight for mailbox in self._mailboxes.values()) and self._is_paused:
            if self.is_asleep:
                self._is_paused = was_paused
                raise EngineAsleepError(NEVER_END)
            await asyncio.sleep(LOOK_SECONDS)
        if self._is_paused:  # `resume` may have been called meanwhile
            await self._control("pause")

    async def resume(self) -> None:
        """End a pause."""
        await self._control("resume")
        self._is_paused = False
        self._open_or_close()

    async def sleep(self, level: int = 1) -> None:
        """As `Engine.sleep`. Requests in flight are computed again after `wake_up`, and new requests wait."""
        await self._control("sleep", level=level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `Engine.wake_up`."""
        await self._control("wake_up", tags=tags)

    async def update_weights(self, **arguments: Any) -> int:
        """As `Engine.update_weights`, with weights from the sources that `Controls` knows. Returns their version."""
        return int(await self._control("update_weights", **arguments))

    async def join_weight_group(self, **place: Any) -> None:
        """Join the group of a trainer that will broadcast weights; without arguments, leave the group. See `Controls`."""
        await self._control("join_weight_group", **place)

    def _open_or_close(self) -> None:
        if self._is_paused or self.is_asleep:
            self._open.clear()
        else:
            self._open.set()

    async def _control(self, name: ControlName, **arguments: Any) -> Any:
        """Send a control to the engine, and wait for its answer. Raises what the engine raises."""
        reply = await self._told(lambda serial: Control(serial, name, arguments))
        self.is_asleep = reply.is_asleep and self._error is None  # a dead engine does not sleep
        self._open_or_close()
        return reply.value()

    async def _told(self, command: Callable[[int], Control | LoadAdapter], starting: bool = False) -> Reply:
        """Send the command that `command` makes with a serial number, and wait for the answer with this number."""
        if self._worker is None or not (starting or self.is_alive):
            raise self._death()
        serial = next(self._serial)
        self._replies[serial] = future = asyncio.Future[Reply]()
        try:
            self._worker.send(command(serial))
            return await future
        finally:
            del self._replies[serial]

    @property
    def weight_version(self) -> int:
        """How often the weights have been changed, as of the newest step."""
        return self.stats().weight_version

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume` or `wake_up`."""
        return not self._open.is_set()

    @property
    def ready(self) -> Ready:
        """What is known about the loaded engine."""
        if self._ready is None:
            raise RuntimeError("the engine has not been started")
        return self._ready

    def _deliver(self, step: StepOutputs) -> None:
        """Put the outputs of a step into the mailboxes of their requests."""
        self._stats = step.stats or self._stats
        for name, error in step.rejected:
            if name in self._mailboxes:
                self._mailboxes[name].refuse(error)
        for reply in step.replies:
            future = self._replies.get(reply.serial)
            if future is not None and not future.done():
                future.set_result(reply)
        has_logprobs = False
        for output in step.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None and output.index in mailbox.unfinished:
                mailbox.put(output)
                has_logprobs = has_logprobs or bool(output.logprobs)
        if has_logprobs and self._worker is not None:
            for name in discard_unread(self._mailboxes):
                self._worker.send(Abort(name))

    def _end_all(self, error: EngineDeadError) -> None:
        """End every unfinished request with an error, and let later ones raise it."""
        self._error = self._error or error
        for name, mailbox in self._mailboxes.items():
            mailbox.end(name, "error", RequestError("engine_dead", str(error)))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error), error.cause))
        self._is_paused = False  # an engine that is restarted is neither paused nor asleep
        self.is_asleep = False
        self._open_or_close()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: object) -> None:
    """Call a function on the event loop, from any thread."""
    with suppress(RuntimeError):  # the loop has been closed, so no consumer is left
        loop.call_soon_threadsafe(function, argument)
