"""What all handlers share: whether the service is ready, how many sequences are in flight, and which model is served.

`Service` owns what lies between the connections and the engine. The port is open while the weights load, and requests get a
503 until the engine is ready. `reserve` bounds the number of sequences in flight, in all and for each API key.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import BadRequest, NotFound, TooManyRequests, Unavailable
from .metrics import Metrics
from .replies import ModelCard
from .settings import Settings
from .tokenization import Tokenization

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine

RETRY_SECONDS = 5  # when a client may try again while the server loads, drains or restarts


class Service:
    def __init__(self, engine: AsyncEngine, settings: Settings):
        self.engine = engine
        self.settings = settings
        self.tokenization = Tokenization(engine, settings)
        self.metrics = Metrics(lambda: (self.engine.stats(), self.model_name) if self.running else None)
        self.created = int(time.time())
        self.draining = False
        self._loading: asyncio.Task[None] | None = None
        self._in_flight: Counter[str | None] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Begin to load the model. `loaded` waits for the end."""
        self._loading = asyncio.create_task(self.engine.start())

    async def loaded(self) -> None:
        """Return when the engine is ready. Raises the error that kept it from loading."""
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def stop(self) -> None:
        self.draining = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.engine.shutdown()

    async def drain(self) -> None:
        """Refuse new requests, and return when nothing is in flight."""
        self.draining = True
        await self._idle.wait()

    @property
    def running(self) -> bool:
        """The engine is loaded and has not died."""
        return self._loading is not None and self._loading.done() and self.death_reason() is None

    def death_reason(self) -> str | None:
        """Why this process will never serve again, or None."""
        if self._loading is not None and self._loading.done():
            if self._loading.cancelled() or self._loading.exception() is not None:
                return "the model could not be loaded"
            if not (self.engine.is_alive or self.engine.is_restarting):
                return "the engine has died"
        return None

    def refusal_reason(self) -> str | None:
        """Why requests are refused at the moment, or None."""
        if self._loading is None or not self._loading.done():
            return "the model is being loaded"
        if self.engine.is_restarting:
            return "the engine has died and is being restarted"
        return "the server is shutting down" if self.draining else self.death_reason()

    def require_ready(self) -> None:
        if reason := self.refusal_reason():
            raise Unavailable(f"The server is not ready: {reason}.", retry_after=RETRY_SECONDS)

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    @contextmanager
    def reserve(self, count: int, key: str | None, param: str = "n") -> Iterator[None]:
        """Room for `count` sequences while the context lasts.

        key:   the hash of the API key that the sequences belong to
        param: the request's field that asks for so many
        """
        self.require_ready()
        limit = self.settings.max_num_seqs + self.settings.max_waiting
        largest = min(limit, self.settings.max_n)
        if count > largest:
            raise BadRequest(f"A request must ask for at most {largest} sequences, got {count}.", param=param)
        if self.in_flight + count > limit:
            message = f"The queue is full: {self.in_flight} of at most {limit} sequences are in flight. Try again later."
            raise TooManyRequests(message, retry_after=1)
        key_limit = self.settings.max_per_key
        if key_limit is not None and self._in_flight[key] + count > key_limit:
            message = f"This API key may have at most {key_limit} sequences in flight. Try again later."
            raise TooManyRequests(message, retry_after=1)
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

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.engine.model_name

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            message = f"The model {name!r} does not exist. This server serves {self.model_name!r}."
            raise NotFound(message, param="model", code="model_not_found")

    def model_card(self) -> ModelCard:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "fa_serve",
            "max_model_len": self.engine.max_model_len,
        }
