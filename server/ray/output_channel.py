"""Collects the outputs of one front's requests in one replica, for the single stream that carries them to the front.

One Ray stream for each request would cost a message for each token. With one stream for all requests, a step of the engine is
one message, as in the pipe of the engine's process (fa_serve.engine.process.pipe).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from fa_serve.engine import RequestOutput


@dataclass(slots=True)
class Gains:
    """One message to a front.

    accepted: names of requests that this replica has taken
    outputs:  at most one for each answer, in the order in which they began
    """

    accepted: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class OutputChannel:
    """Holds at most one output for each answer. Until the stream is read, later outputs are appended to the one that waits."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()  # the running calls of this front: its requests, and `listen`
        self.heard = time.monotonic()  # when the front was last heard of
        self._accepted: list[str] = []
        self._outputs: dict[tuple[str, int], RequestOutput] = {}
        self._news = asyncio.Event()

    def accept(self, name: str) -> None:
        self._accepted.append(name)
        self._news.set()

    def put(self, output: RequestOutput) -> None:
        key = output.request_id, output.index
        if key in self._outputs:
            self._outputs[key].absorb(output)
        else:
            self._outputs[key] = output
        self._news.set()

    def beat(self) -> None:
        """Let `take` return, even if there is nothing to return."""
        self._news.set()

    async def take(self) -> Gains:
        """Return what has arrived since the last call. Waits until something arrives, or for a beat."""
        await self._news.wait()
        self._news.clear()
        gains = Gains(self._accepted, list(self._outputs.values()))
        self._accepted = []
        self._outputs = {}
        return gains
