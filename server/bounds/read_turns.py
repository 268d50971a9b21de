"""Large bodies are read in turns: in each iteration of the event loop, one connection continues to read.

    protocol.flow = FairFlow(transport, turns)          # instead of uvicorn's; all connections share one ReadTurns

uvicorn stops reading from a connection after 64 KB until the application has taken them. Without turns, all stopped connections
would continue at once: with 60 bodies under way, an iteration takes 40 ms, and a small request of another client needs about
eight iterations. Bodies of at most 64 KB are read without a stop, so they need no turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl


class FairFlow(FlowControl):
    """uvicorn's flow control of one connection, which waits for its turn before it resumes reading."""

    def __init__(self, transport: asyncio.Transport, turns: ReadTurns):
        super().__init__(transport)
        self._turns = turns
        self._waits = False
        self._paused_before = 0.0  # seconds of the earlier pauses, without the current one
        self._paused_at = 0.0  # on time.monotonic's clock

    @property
    def paused_seconds(self) -> float:
        """The seconds for which the server has paused reading from this connection so far."""
        return self._paused_before + (time.monotonic() - self._paused_at if self.read_paused else 0.0)

    def pause_reading(self) -> None:
        self._waits = False
        if not self.read_paused:
            self._paused_at = time.monotonic()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self._waits:
            self._waits = True
            self._turns.add(self)

    def take_turn(self) -> None:
        if self._waits and not self._transport.is_closing():
            self._waits = False
            self._paused_before = self.paused_seconds
            super().resume_reading()


class ReadTurns:
    """The connections that wait to resume reading, in the order in which they asked."""

    def __init__(self) -> None:
        self._waiting: deque[FairFlow] = deque()

    def add(self, flow: FairFlow) -> None:
        self._waiting.append(flow)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        flow = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        flow.take_turn()
