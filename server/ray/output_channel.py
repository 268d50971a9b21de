"""What the requests of one front have gained in one replica, for the one stream that carries it to the front.

A stream of Ray for each request would cost a message for each token. With one stream for all requests, a step of the engine is
one message, as through the pipe of the engine's process (fa_serve.engine.process.pipe).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from fa_serve.engine import RequestOutput


@dataclass(slots=True)
class Gains:
    """accepted: names of requests that this replica has taken; outputs: in the order in which they began"""

    accepted: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class OutputChannel:
    """Holds at most one output for each answer: what comes before the stream is read is appended to the one that waits."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()  # the calls of this front: its requests, and the one that listens
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
        """Let `take` return, with nothing if nothing has come."""
        self._news.set()

    async def take(self) -> Gains:
        """What has come since the last call. Waits until there is something, or a beat."""
        await self._news.wait()
        self._news.clear()
        gains = Gains(self._accepted, list(self._outputs.values()))
        self._accepted = []
        self._outputs = {}
        return gains
