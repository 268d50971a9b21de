"""What all handlers share: whether the service is ready, how many sequences are in flight, and which model is served.

`Service` owns everything between the connections and the engine. The port is open while the weights load, and requests get a
503 until the engine is ready. `reserve` bounds the number of sequences in flight, in total and for each API key.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from .adapters import Adapters
from .bounds.costs import Costs
from .bounds.deadline_thread import DeadlineThread
from .bounds.isolation import Isolation
from .bounds.json_bounds import JsonBounds
from .errors import MAX_NAME, MAX_NAMED, RETRY_SECONDS, BadRequest, NotFound, TooManyRequests, Unavailable
from .observe.metrics import EngineLife, LoopDelay, Metrics, ScrapedText
from .replies import ModelCard
from .settings import Settings
from .tokenization import Tokenization

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine
    from fa_serve.engine.process.parent import Pulse

T = TypeVar("T")
LARGE_ANSWER = 1 << 20  # bytes; only larger answers count towards --max-answer-bytes-in-flight
LONGEST_PAUSE = 0.05  # seconds: the longest pause between two large bodies
STOP_SECONDS = 2.0  # how long the engine's last step may take at shutdown, when nothing is in flight any more
TASK_NAMES = {
    "generate": "generation",
    "embed": "embeddings",
    "token_embed": "vectors of tokens",
    "sparse": "sparse vectors",
    "score": "scores",
    "classify": "classes",
}
HEARTBEAT_SECONDS = 5.0  # the longest silence of the engine's process, which gives a sign of life each second


def stall_reason(pulse: Pulse, step_timeout: float) -> str | None:
    """Why an engine with this pulse does not answer at the moment, or None."""
    if pulse.silent_seconds > HEARTBEAT_SECONDS:
        return f"the engine's process has given no sign of life for {pulse.silent_seconds:.0f} s"
    if pulse.busy_seconds > step_timeout:
        return f"the engine's step has taken {pulse.busy_seconds:.0f} s, which is above --step-timeout {step_timeout:g}"
    return None


class Service:
    def __init__(self, engine: AsyncEngine, settings: Settings):
        self.engine = engine
        self.settings = settings
        self.isolation = Isolation(settings)
        self.adapters = Adapters(engine, settings)
        self.metrics = Metrics(
            lambda: (self.engine.snapshots(), self.model_name) if self.running else None,
            self.engine_life,
        )
        self.scraped = ScrapedText(self.metrics.text)
        self.costs = Costs(self.metrics.delayed)
        self.tokenization = Tokenization(engine, settings, self.costs)
        self.created = int(time.time())
        self.json_bounds = JsonBounds(settings.max_json_values, settings.max_json_fields)
        self.draining = False
        self._loading: asyncio.Task[None] | None = None
        self._loop_delay: LoopDelay | None = None
        self._in_flight: Counter[str | None] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._answer_bytes = 0
        self._parser = DeadlineThread("parser")
        self._parse_again_at = 0.0  # on time.monotonic's clock
        self._writer = DeadlineThread("writer")

    async def parse(self, work: Callable[[], T], client: str | None) -> T:
        """Parse a large body in a thread. There is only one such thread, so that several large bodies do not slow the event
        loop down, and clients take turns.

        Parsing holds the interpreter's lock for up to 30 ms, and a request needs the loop several times. So the next body waits
        for as long as the last one took, at most LONGEST_PAUSE. Meanwhile the loop has the interpreter to itself.
        """
        return await self._parser.run(lambda: self._by_turns(work), client)

    def _by_turns(self, work: Callable[[], T]) -> T:
        time.sleep(max(self._parse_again_at - time.monotonic(), 0.0))
        begin = time.monotonic()
        try:
            return work()
        finally:
            end = time.monotonic()
            self._parse_again_at = end + min(end - begin, LONGEST_PAUSE)

    async def write(self, work: Callable[[], T], client: str | None) -> T:
        """Write a large answer in a thread. Clients take turns."""
        return await self._writer.run(work, client)

    async def start(self) -> None:
        """Begin to load the model. `loaded` waits for the end."""
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        await self.engine.start()
        await self.tokenization.check_template()
        await self.tokenization.find_chat_end()
        if self.engine.summary.images is None:
            self.tokenization.expect_images()
        self._loop_delay = LoopDelay(self.metrics.loop_delay.of(self.model_name))

    async def loaded(self) -> None:
        """Return when the engine is ready. Raises the error with which loading has failed."""
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the engine after its current step, or after `timeout` seconds."""
        self.draining = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._loop_delay is not None:
            self._loop_delay.stop()
        await self.engine.shutdown(timeout)
        self.tokenization.close()

    async def drain(self) -> None:
        """Refuse new requests, and return when nothing is in flight."""
        self.draining = True
        await self._idle.wait()

    @property
    def has_started(self) -> bool:
        """Whether the model was loaded, even if its engine has died since."""
        loading = self._loading
        return loading is not None and loading.done() and not loading.cancelled() and loading.exception() is None

    @property
    def running(self) -> bool:
        """Whether the engine is loaded and has not died."""
        return self.has_started and self.death_reason() is None

    def death_reason(self) -> str | None:
        """Why this process will never serve again, or None."""
        if self._loading is not None and self._loading.done():
            if not self.has_started:
                return "the model could not be loaded"
            if not (self.engine.is_alive or self.engine.is_restarting):
                cause = self.engine.death_cause
                return f"the engine has died: {cause}" if cause else "the engine has died"
        return None

    def engine_life(self) -> EngineLife | None:
        """Whether an engine can take requests, even if the server drains; None while the model is loaded for the first time."""
        if self._loading is None or not self._loading.done():
            return None
        is_up = self.sickness() is None and not self.engine.is_restarting
        return EngineLife(is_up, self.engine.num_restarts)

    def stall_reason(self) -> str | None:
        """Why an engine that is loaded and has not died does not answer at the moment, or None."""
        if not self.running or self.engine.is_restarting:
            return None
        return self._stall()

    def sickness(self) -> str | None:
        """That the server is dead, or that its engine does not answer at the moment, as a sentence; None otherwise."""
        if reason := self.death_reason():
            return f"The server is dead: {reason}."
        if reason := self.stall_reason():
            return f"The server does not answer: {reason}."
        return None

    def refusal_reason(self) -> str | None:
        """Why requests are refused at the moment, or None."""
        if self._loading is None or not self._loading.done():
            return "the model is being loaded"
        if self.engine.is_restarting:
            return "the engine has died and is being restarted"
        return "the server is shutting down" if self.draining else self.death_reason() or self._stall()

    def _stall(self) -> str | None:
        """Why a running engine does not answer, or None."""
        return stall_reason(self.engine.pulse(), self.settings.step_timeout)

    def require_ready(self) -> None:
        if reason := self.refusal_reason():
            raise Unavailable(f"The server is not ready: {reason}.", retry_after=RETRY_SECONDS)

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    @contextmanager
    def reserve(self, count: int, key: str | None, param: str = "n") -> Iterator[None]:
        """Reserve room for `count` sequences while the context lasts. The service must be ready (`require_ready`).

        key:   the hash of the API key that the sequences belong to
        param: the request's field that asks for this number, for errors

        Raises BadRequest if `count` is more than a request may ask for, and TooManyRequests if there is no room at the moment.
        """
        limit = self.settings.max_num_seqs + self.settings.max_waiting
        largest = min(limit, self.settings.max_n)
        if count > largest:
            raise BadRequest(f"A request must ask for at most {largest} sequences, got {count}.", param=param)
        in_flight = self.in_flight
        if in_flight + count > limit:
            message = f"The queue is full: {in_flight} of at most {limit} sequences are in flight. Try again later."
            raise TooManyRequests(message, retry_after=1)
        key_limit = self.settings.max_per_key
        if key_limit is not None and count > key_limit:
            message = f"A request must ask for at most {key_limit} sequences (--max-per-key), got {count}."
            raise BadRequest(message, param=param)
        if key_limit is not None and self._in_flight[key] + count > key_limit:
            whose = "This API key" if self.settings.all_keys else "All clients together, as there are no API keys,"
            message = f"{whose} may have at most {key_limit} sequences in flight (--max-per-key). Try again later."
            raise TooManyRequests(message, retry_after=1)
        self._require_share(count, key, limit - in_flight - count)
        self._in_flight[key] += count
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight[key] -= count
            if not self._in_flight[key]:
                del self._in_flight[key]
            if not self._in_flight:
                self._idle.set()

    def reserve_bytes(self, size: int) -> AbstractContextManager[None]:
        """Reserve room for an answer while the context lasts. Answers of up to LARGE_ANSWER bytes are not counted.

        size: bytes of the answer, without the text that it generates

        Raises TooManyRequests.
        """
        limit = self.settings.max_answer_bytes_in_flight
        if size > LARGE_ANSWER and self._answer_bytes and self._answer_bytes + size > limit:
            message = (
                f"All large answers in flight may total at most {limit} bytes (--max-answer-bytes-in-flight), and "
                f"{self._answer_bytes} are taken. Try again later."
            )
            raise TooManyRequests(message, retry_after=1)
        return self.hold_bytes(size)

    def require_size(self, size: int, param: str, fields: Sequence[str]) -> None:
        """Raise BadRequest for an answer of more than `max_answer_bytes`. fields: the request's fields that can ask for less"""
        limit = self.settings.max_answer_bytes
        if size > limit:
            message = (
                f"The answer could have up to {size} bytes, and the limit is {limit} (--max-answer-bytes). "
                f"Ask for less with {', '.join(fields)}."
            )
            raise BadRequest(message, param=param, code="answer_too_large")

    def hold_bytes(self, size: int) -> AbstractContextManager[None]:
        """Count an answer that exists already, of `size` bytes, while the context lasts. Small answers are not counted."""
        return self._hold_bytes(size) if size > LARGE_ANSWER else nullcontext()

    @contextmanager
    def _hold_bytes(self, size: int) -> Iterator[None]:
        self._answer_bytes += size
        try:
            yield
        finally:
            self._answer_bytes -= size

    def _require_share(self, count: int, key: str | None, left: int) -> None:
        """Leave room in the queue for other keys: the share that a key may take shrinks with the room that is left.

        These are the dynamic thresholds of Choudhury and Hahne (1998). A single key can reach `max_key_share` of the queue, and
        several keys share the queue evenly, with some room left.

        left: how many places are free after `count` more are taken
        """
        own = self._in_flight[key]
        share = self.settings.max_key_share
        if own and len(self.settings.all_keys) > 1 and (own + count) * (1 - share) > left * share:
            message = (
                f"This API key has {own} sequences in flight, and the last places in the queue are kept for other keys "
                f"(--max-key-share {share:g}). Try again later."
            )
            raise TooManyRequests(message, retry_after=1)

    @cached_property
    def model_name(self) -> str:
        """The name that clients ask for: from the settings, or that of the loaded model."""
        return self.settings.served_model_name or self.engine.model_name

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name and not self.adapters.knows(name):
            served = [self.model_name, *self.engine.adapters]
            more = f" and {len(served) - MAX_NAMED} more" if len(served) > MAX_NAMED else ""
            shown = ", ".join(map(repr, served[:MAX_NAMED]))
            message = f"The model {name[:MAX_NAME]!r} does not exist. This server serves {shown}{more}."
            raise NotFound(message, param="model", code="model_not_found")

    @property
    def task(self) -> str:
        """What the model is for; "generate" unless it is an encoder."""
        card = self.engine.card
        return "generate" if card is None else card.task

    def require_task(self, *tasks: str) -> str:
        """The model's task. Raises BadRequest if it is none of these."""
        task = self.task
        if task not in tasks:
            message = (
                f"This route needs a model for {' or '.join(TASK_NAMES[each] for each in tasks)}, and {self.model_name!r} "
                f"is one for {TASK_NAMES[task]} (--task)."
            )
            raise BadRequest(message, param="model", code="unsupported_task")
        return task

    def vector_size(self, dimensions: int | None = None) -> int:
        """How many numbers a vector has, if a request asks for at most `dimensions` of them. The model must be an encoder."""
        assert self.engine.card is not None
        return min(dimensions or self.engine.card.size, self.engine.card.size)

    def labels(self) -> tuple[str, ...]:
        """The names of the classes of a model for classification or scores. Raises BadRequest for a model of another task."""
        self.require_task("classify", "score")
        assert self.engine.card is not None
        return self.engine.card.labels

    @property
    def _takes_images(self) -> bool:
        """Whether chats may have images: the model takes them, and its chat template has places for them."""
        return self.engine.summary.images is None and self.tokenization.writes_images

    def model_card(self, adapter: str | None = None) -> ModelCard:
        """The card of the model, or of one of its adapters."""
        card: ModelCard = {
            "id": adapter or self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "fa_serve",
            "max_model_len": self.engine.max_model_len,
            "task": self.task,
            "input_modalities": ["text", "image"] if self._takes_images else ["text"],
        }
        if adapter is not None:
            card["parent"] = self.model_name
        return card
