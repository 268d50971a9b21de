"""Runs an engine by commands: requests and aborts arrive one by one, and the results of a step leave as one `StepOutputs`.

    loop = EngineLoop(engine, commands, deliver)
    commands.put(Add("request-1", [1, 2, 3], params))
    loop.run()                               # until the command None arrives

The loop never waits for a client, and a step never waits for a grammar: other threads compile grammars (grammar_queue.py), and
the request joins when its grammar is ready. Left out: where the loop runs (parent.py, child.py).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineAsleepError, EngineDeadError, QueueFullError, WeightTransferError
from fa_serve.engine.events import OnPhase, Phase
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.pooling.inputs import EncoderInputs
from fa_serve.engine.pooling.params import PoolingParams
from fa_serve.engine.process.controls import Control, Controls, Reply
from fa_serve.engine.process.host_memory import importing
from fa_serve.engine.process.pipe import Ready
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams, StructuredOutput
from fa_serve.engine.stats import EngineStats, StepStats
from fa_serve.engine.structured.grammar_queue import LONG, GrammarQueue
from fa_serve.sandbox.trials import Cancelled, Trial, TrialProcessError
from fa_serve.spec import ParameterError

if TYPE_CHECKING:
    from fa_serve.engine.engine import Engine
    from fa_serve.engine.pooling.encoder import Encoder

    AnyEngine = Engine | Encoder


@dataclass(frozen=True, slots=True)
class Add:
    """Add a request.

    client:   who sends it; grammars of different clients are compiled in turns
    images:   as `Engine.add_request` takes them
    compiled: the matcher of its structured output, or the error that compiling it has raised; None if it is not compiled yet
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams | None
    priority: int = 0
    timeout: float | None = None
    client: str | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    compiled: Any = None
    images: Sequence[ImageInput] = ()

    @property
    def num_answers(self) -> int:
        """How many answers the request gets."""
        return 1 if self.params is None else self.params.n


@dataclass(frozen=True, slots=True)
class Encode:
    """Add a request to an encoder. Each of its inputs is answered once. An output answers one or several inputs."""

    request_id: str
    inputs: EncoderInputs
    params: PoolingParams | None
    priority: int = 0
    timeout: float | None = None
    client: str | None = None

    @property
    def num_answers(self) -> int:
        """One for each input."""
        return len(self.inputs)

    def __reduce__(self) -> tuple[type[Encode], tuple[object, ...]]:
        """Pickle as a call of the constructor, as `RequestOutput` does."""
        return Encode, (self.request_id, self.inputs, self.params, self.priority, self.timeout, self.client)


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request. `num_answers`: how many of its answers are unfinished."""

    request_id: str
    num_answers: int = 1


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Serve the adapter in a folder under a name, or, without a folder, stop serving the name.

    serial:  identifies the answer, a `Reply`
    reading: what `Engine.read_adapter` has returned; None if reading has not begun
    """

    serial: int
    name: str
    folder: str | None
    reading: int | None = None


Message = Add | Encode | Abort | Control | LoadAdapter
"""What an `AsyncEngine` sends to its engine."""
Command = Message | EngineDeadError | None
"""None ends the loop. An error says that a rank is lost: the loop raises it."""
Commands = queue.SimpleQueue[Command]


@dataclass(slots=True)
class StepOutputs:
    """The results of one step, and the results of the commands before it.

    stats:    the engine's snapshot; None if it is reported in another way
    rejected: (request id, error) of requests that were not added
    replies:  answers to `Control` and `LoadAdapter` commands
    """

    stats: EngineStats | None
    outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[tuple[str, Exception]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


STATS_SECONDS = 0.1
"""How old the statistics of a running engine may become while its steps have no outputs, such as those of a long prompt."""
QUIET_SECONDS = 1.0
"""Time without a command after which graphs are captured. Under load this much time rarely passes, so a command seldom has to
wait for a capture."""


class EngineLoop:
    """Owner of the requests whose grammars are being compiled. `deliver` is called after each step that has outputs, errors or
    replies, after the last step before the loop waits, and otherwise every STATS_SECONDS, for the statistics."""

    def __init__(self, engine: AnyEngine, commands: Commands, deliver: Callable[[StepOutputs], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._deliver = deliver
        self._controls = Controls(cast("Engine", engine))  # never used if it is an encoder
        self._compiling: dict[str, Trial] = {}
        self._grammars = engine.grammars  # None for an encoder
        self._queue = GrammarQueue(lambda: None if self._grammars is None else self._grammars.sweep())
        # what the commands since the last step have caused
        self._outputs: list[RequestOutput] = []
        self._rejected: list[tuple[str, Exception]] = []
        self._replies: list[Reply] = []
        self._is_paused = False
        self._busy_since: float | None = None
        self._delivered_at = time.monotonic()
        self._late = (0, 0)  # compilations and captures that requests have waited for
        self._steps = StepStats()

    @property
    def busy_seconds(self) -> float:
        """How long the loop's current step or command has taken so far; 0 while the loop waits. From any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def run(self) -> None:
        """Run steps until the command None arrives."""
        try:
            while self._take_commands():
                self._busy_since = begin = time.monotonic()
                before = self._engine.preparations()
                outputs = self._outputs + (self._engine.step() if self._runs else [])
                self._count_late(before)
                rejected = self._rejected
                replies = self._replies
                self._outputs = []
                self._rejected = []
                self._replies = []
                is_late = begin - self._delivered_at > STATS_SECONDS
                if outputs or rejected or replies or is_late or not self._runs:
                    self._delivered_at = begin
                    self._deliver(StepOutputs(self._stats(), outputs, rejected, replies))
                self._steps = self._steps.plus(time.monotonic() - begin)
        finally:
            self._queue.close()
            self._controls.close()
            self._engine.close()

    def _take_commands(self) -> bool:
        """Carry out all commands that have arrived. Returns False if the loop is to end.

        Waits for a command only when there is nothing to compute and nothing to deliver.
        """
        while not self._commands.empty() or not (self._runs or self._has_news):
            self._busy_since = None
            command = self._next_command()
            self._busy_since = time.monotonic()
            if command is None:
                return False
            if isinstance(command, EngineDeadError):
                raise command
            if isinstance(command, Control):
                self._replies.append(self._answer(command))
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, LoadAdapter):
                self._load(command)
            elif isinstance(command, Encode):
                self._encode(command)
            else:
                self._add(command)
        return True

    def _next_command(self) -> Command:
        """Wait for a command. If none arrives for QUIET_SECONDS, graphs are captured until one arrives."""
        try:
            return self._commands.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            pass
        more = True
        while more and self._commands.empty():
            self._busy_since = time.monotonic()  # a command that arrives now waits for one capture at most
            before = self._engine.preparations()
            more = self._engine.prepare_one()
            if not self._commands.empty():
                self._count_late(before)
        self._busy_since = None
        return self._commands.get()

    def _stats(self) -> EngineStats:
        compilations, captures = self._late
        return replace(self._engine.stats(), steps=self._steps, num_late_compilations=compilations, num_late_captures=captures)

    def _count_late(self, before: tuple[int, int]) -> None:
        """Count the compilations and captures since `before`, because requests have waited for them."""
        compilations, captures = self._late
        now = self._engine.preparations()
        self._late = (compilations + now[0] - before[0], captures + now[1] - before[1])

    @property
    def _has_news(self) -> bool:
        return bool(self._outputs or self._rejected or self._replies)

    @property
    def _runs(self) -> bool:
        """Whether there is a step to compute now."""
        return not self._is_paused and not self._engine.is_asleep and self._engine.has_unfinished()

    def _answer(self, control: Control) -> Reply:
        """Carry out a control. A pause takes effect after the steps in flight, whose outputs are delivered."""
        try:
            engine = self._generator(control.name)
            self._outputs += engine.drain()
            if control.name in ("pause", "resume"):
                self._is_paused = control.name == "pause"
                return Reply(control.serial, is_asleep=engine.is_asleep)
            result = self._controls.carry_out(control)
            return Reply(control.serial, result, is_asleep=engine.is_asleep)
        except Exception as error:
            return Reply(control.serial, error=_sendable(error), is_asleep=self._engine.is_asleep)

    def _generator(self, call: str) -> Engine:
        """The engine, for a call that encoders do not have. Raises ParameterError if it is an encoder."""
        from fa_serve.engine.pooling.encoder import Encoder

        if isinstance(self._engine, Encoder):
            raise ParameterError("task", f"be generate: encoders do not support {call}", self._engine.card.task)
        return self._engine

    def _abort(self, command: Abort) -> None:
        trial = self._compiling.pop(command.request_id, None)
        if trial is not None:
            self._queue.cancel(command.request_id)
            trial.cancel()
            end = RequestOutput(command.request_id, [], finished=True, finish_reason="abort")
            self._outputs += [replace(end, index=index) for index in range(command.num_answers)]
        else:
            self._outputs += self._engine.abort(command.request_id)

    def _add(self, command: Add) -> None:
        structured = None if command.params is None else command.params.structured
        if command.compiled is not None:
            if self._compiling.pop(command.request_id, None) is None:
                return  # it was aborted while its grammar was compiled
            if isinstance(command.compiled, Exception):
                self._reject(command.request_id, command.compiled)
                return
        elif structured is not None:
            self._start_compiling(command, structured)
            return
        try:
            cast("Engine", self._engine).add_request(
                command.request_id,
                command.prompt,
                command.params,
                priority=command.priority,
                timeout=command.timeout,
                client=command.client,
                cache_salt=command.cache_salt,
                adapter=command.adapter,
                matcher=command.compiled,
                images=command.images,
            )
        except Exception as error:
            self._reject(command.request_id, error)

    def _encode(self, command: Encode) -> None:
        try:
            cast("Encoder", self._engine).add_request(
                command.request_id,
                command.inputs,
                command.params,
                priority=command.priority,
                timeout=command.timeout,
                client=command.client,
            )
        except Exception as error:
            self._reject(command.request_id, error)

    def _reject(self, request_id: str, error: Exception) -> None:
        self._rejected.append((request_id, _sendable(error)))

    def _load(self, command: LoadAdapter) -> None:
        """Begin to read an adapter, in a thread; or serve one that has been read."""
        try:
            engine = self._generator("load_adapter")
            if command.folder is None:
                engine.unload_adapter(command.name)
            elif command.reading is None:
                engine.adapters.check_name(command.name)
                number = engine.read_adapter(command.folder)
                again = replace(command, reading=number)
                engine.adapters.when_read(number, lambda: self._commands.put(again))
                return
            else:
                engine.load_adapter(command.name, command.folder, command.reading)
        except Exception as error:
            self._replies.append(Reply(command.serial, error=_sendable(error)))
        else:
            self._replies.append(Reply(command.serial))

    def _start_compiling(self, command: Add, structured: StructuredOutput) -> None:
        limit = max(self._engine.config.max_waiting, 1)
        try:
            if len(self._compiling) >= limit:
                raise QueueFullError(f"the queue is full: {limit} grammars are already being compiled. Try again later")
            assert self._grammars is not None
            trial = self._grammars.trial(structured)
        except Exception as error:
            self._reject(command.request_id, error)
            return
        self._compiling[command.request_id] = trial
        since = time.monotonic()
        self._queue.submit(
            command.request_id,
            command.client,
            structured.length(LONG),
            lambda: self._compile(command, structured, trial, since),
        )

    def _compile(self, command: Add, structured: StructuredOutput, trial: Trial, since: float) -> None:
        """Compile a grammar, in a thread of the queue, and send the request again. Its timeout counts from `since`."""
        compiled: Any
        try:
            assert self._grammars is not None
            compiled = self._grammars.matcher(structured, trial)
        except Cancelled:
            return
        except Exception as error:
            compiled = error
        timeout = command.timeout
        if timeout is not None:  # a timeout that has passed still ends the request in the usual way
            timeout = max(timeout - (time.monotonic() - since), 1e-3)
        self._commands.put(replace(command, compiled=compiled, timeout=timeout))


def _sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError that describes it if its class may not survive the pipe between two processes."""
    if isinstance(error, ValueError | QueueFullError | EngineAsleepError | WeightTransferError | TrialProcessError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def import_engine(on_phase: OnPhase, *, freeze: bool) -> Callable[..., AnyEngine]:
    """Import engines. Returns a function that makes the engine of a config: an `Engine`, or an `Encoder` if the model is one.

    This also imports the models of transformers, which takes longer than all other imports. freeze: as in `importing`
    """
    begin = time.perf_counter()
    with importing(freeze=freeze):
        from fa_serve.engine.engine import Engine
        from fa_serve.engine.pooling.encoder import Encoder
    on_phase(Phase("engine", "imported", time.perf_counter() - begin))

    def make(config: EngineConfig, **options: Any) -> AnyEngine:
        return Engine(config, **options) if config.resolve_task() == "generate" else Encoder(config, **options)

    return make


def ready_of(engine: AnyEngine, tokenizer: Any) -> Ready:
    """What others need to know about a loaded engine."""
    return Ready(
        engine.config,
        engine.vocab_size,
        engine.eos_ids,
        engine.stats(),
        tokenizer,
        engine.default_params,
        engine.card,
        engine.summary,
    )
