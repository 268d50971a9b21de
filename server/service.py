"""What all handlers share: is the service ready, is there room, and how text becomes tokens.

`Service` owns everything between connections and the engine: loading (the port is open while weights load, and answers 503),
draining, the bound on what is in flight, and the one thread that runs the tokenizer, so that a long prompt never holds up the
event loop and no two prompts use the tokenizer at once. Left out: what a request asks for (generation.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import BadRequest, NotFound, TooManyRequests, Unavailable
from .logprobs import TokenTexts
from .metrics import Metrics
from .replies import ModelCard
from .schemas import ChatRequest, TokenizeRequest, Tool
from .settings import Settings
from .templates import Template

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine

T = TypeVar("T")


class Service:
    def __init__(self, engine: AsyncEngine, settings: Settings):
        self.engine = engine
        self.settings = settings
        self.created = int(time.time())
        self.draining = False
        self._loading: asyncio.Task[None] | None = None
        self._tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
        self._chat_template = settings.chat_template.read_text() if settings.chat_template else None
        self._template = lru_cache(16)(lambda text: Template(self.engine.tokenizer, text))
        self._in_flight: Counter[str | None] = Counter()
        self.metrics = Metrics(lambda: (self.engine.stats(), self.model_name) if self.running else None)
        self._idle = asyncio.Event()
        self._idle.set()

    # Life

    async def start(self) -> None:
        """Begin to load; `loaded` waits for the end of it."""
        self._loading = asyncio.create_task(self.engine.start())

    async def loaded(self) -> None:
        """Returns when the engine serves; raises what kept it from loading."""
        assert self._loading is not None
        await asyncio.shield(self._loading)

    async def stop(self) -> None:
        self.draining = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.engine.shutdown()
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Take nothing new; returns when nothing is in flight."""
        self.draining = True
        await self._idle.wait()

    @property
    def running(self) -> bool:
        """The engine is loaded and has not died."""
        return self._loading is not None and self._loading.done() and self.dead() is None

    def dead(self) -> str | None:
        """Why this process will never serve again, or None."""
        if self._loading is not None and self._loading.done():
            if self._loading.cancelled() or self._loading.exception() is not None:
                return "the model could not be loaded"
            if not (self.engine.is_alive or self.engine.is_restarting):
                return "the engine has died"
        return None

    def unready(self) -> str | None:
        """Why requests are refused now, or None."""
        if self._loading is None or not self._loading.done():
            return "the model is being loaded"
        if self.engine.is_restarting:
            return "the engine has died and is being restarted"
        return "the server is shutting down" if self.draining else self.dead()

    def require_ready(self) -> None:
        if reason := self.unready():
            raise Unavailable(f"Not ready: {reason}.", retry_after=5)

    # Admission

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    @contextmanager
    def admit(self, count: int, key: str | None, param: str = "n") -> Iterator[None]:
        """Room for `count` sequences while the context lasts; `key` names whose they are, `param` what asks for so many."""
        self.require_ready()
        limit = self.settings.max_num_seqs + self.settings.max_waiting
        if count > min(limit, self.settings.max_n):
            raise BadRequest(f"One request may ask for {min(limit, self.settings.max_n)} sequences, got {count}.", param=param)
        if self.in_flight + count > limit:
            raise TooManyRequests(f"The queue is full: {self.in_flight} sequences of {limit} are in flight.", retry_after=1)
        mine = self.settings.max_per_key
        if mine is not None and self._in_flight[key] + count > mine:
            raise TooManyRequests(f"This API key may have {mine} sequences in flight.", retry_after=1)
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

    # The model

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.engine.model_name

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            raise NotFound(
                f"No model {name!r} here; this server has {self.model_name!r}.", param="model", code="model_not_found"
            )

    def model_card(self) -> ModelCard:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "fa_serve",
            "max_model_len": self.engine.max_model_len,
        }

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of those that are no part of a text."""
        return {token.content: i for i, token in self.engine.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    async def encode(self, prompts: Sequence[str | list[int]], special: bool = True) -> list[list[int]]:
        """Prompts as token ids, with the special tokens that the tokenizer adds to plain text."""
        given = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if len(given) == len(prompts):
            return given
        return await self._tokenize(lambda: [self._ids(p, special, "prompt") if isinstance(p, str) else p for p in prompts])

    def template(self, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> Template:
        """The request's own chat template if that is allowed, else the operator's, else the model's."""
        if body.chat_template is not None and not self.settings.allow_request_chat_template:
            raise BadRequest("This server takes no chat templates from requests.", param="chat_template")
        try:
            # a model may have another template for tools
            given = body.chat_template or self._chat_template
            return self._template(self.engine.tokenizer.get_chat_template(given, [{}] if tools else None))
        except ValueError:
            raise BadRequest("This model has no chat template; use /v1/completions.", param="messages") from None

    async def encode_chat(
        self, template: Template, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool], variables: dict[str, Any]
    ) -> tuple[list[int], str]:
        """A conversation through the chat template, up to where the assistant speaks: as token ids, and as text."""

        def work() -> tuple[list[int], str]:
            messages = [message.rendered() for message in body.messages or ()]
            text = template.render(messages, [tool.rendered() for tool in tools] or None, variables)
            return self._ids(text, False, "messages"), text

        return await self._tokenize(work)

    async def decode(self, token_ids: list[int]) -> str:
        return await self._tokenize(lambda: self._text(token_ids))

    def _text(self, token_ids: list[int]) -> str:
        known = len(self.engine.tokenizer)
        if token_ids and max(token_ids) >= known:
            raise BadRequest(f"The tokenizer knows token ids from 0 to {known - 1}, got {max(token_ids)}.", param="tokens")
        return str(self.engine.tokenizer.decode(token_ids))

    def _ids(self, text: str, special: bool, param: str) -> list[int]:
        assert self.engine.reader is not None
        try:
            return self.engine.reader.encode(text, special)
        except ValueError as error:
            code = "invalid_value" if isinstance(error, UnicodeError) else "context_length_exceeded"
            raise BadRequest(f"{error}.", param=param, code=code) from None

    async def _tokenize(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)
