"""Where the time of a request went: one log line for each slow request (--log-slow), and attributes of the request's span.

    WARNING fa_serve.slow: slow request req-7: 5.320 s = prepare 0.004 + handover 0.001 + queue 1.200 + prompt 0.610
    + decode 2.900 + masks 0.100 + detokenise 0.005 + write 0.500; 96 steps, the longest 0.140 s; 0.480 s blocked

The parts follow each other and add up to the whole, from the arrival of the request's headers to the end of the reply:

    prepare     reading and parsing the body, applying the chat template, tokenizing
    handover    waiting for the engine to take the request, which may be in a step; compiling a structured output's grammar
    queue, prompt, decode, masks, detokenise    in the engine (fa_serve.engine.SequenceTimes)
    write       from the last token to the end of the reply: sending the rest to the client

`blocked` is the time in which the client's socket took no data. The engine keeps generating meanwhile, so this time may overlap
with the other parts. For a request of several sequences, the line describes the sequence that ended last. For a request that is
cut off, it has the parts up to that moment. The line contains no text of a prompt or an answer.

All times are those of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette import types as asgi

from fa_serve.engine import RequestOutput, SequenceTimes

log = logging.getLogger("fa_serve.slow")


@dataclass(slots=True)
class Timeline:
    """What is known about the time of one request.

    arrival:  when its headers arrived
    blocked:  seconds in which sending waited for the client
    complete: whether all its sequences have ended by themselves
    """

    arrival: float
    blocked: float = 0.0
    complete: bool = False
    _sent: float | None = None
    _times: SequenceTimes | None = None

    def send(self) -> float:
        """Note that a prompt goes to the engine now. Returns the time."""
        now = time.monotonic()
        self._sent = self._sent or now
        return now

    def take(self, sent: float, output: RequestOutput) -> None:
        """Note an output of a sequence whose prompt went to the engine at `sent`."""
        times = output.times
        if times is not None and (self._times is None or times.until >= self._times.until):
            self._sent = sent
            self._times = times

    def parts(self, now: float) -> dict[str, float]:
        """The seconds of each part up to now. Parts that have not begun are left out."""
        if self._sent is None:
            return {"prepare": now - self.arrival}
        parts = {"prepare": self._sent - self.arrival}
        times = self._times
        if times is None:
            return parts | {"queue": now - self._sent}
        parts |= {
            "handover": times.arrival - self._sent,
            "queue": times.queue,
            "prompt": times.prompt,
            "decode": times.decode,
            "masks": times.masks,
            "detokenise": times.detokenise,
        }
        rest = now - times.until
        if self.complete:
            parts["write"] = rest
        else:
            parts["decode" if times.num_steps else "prompt" if times.begun else "queue"] += rest
        return parts

    def report(self, request_id: str, path: str, status: int, now: float) -> None:
        """Write the line to the log."""
        seconds = now - self.arrival
        parts = {name: round(value, 4) for name, value in self.parts(now).items()}
        num_steps = self._times.num_steps if self._times else 0
        longest = self._times.longest_step if self._times else 0.0
        fields = {
            "request_id": request_id,
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
            "parts": parts,
            "steps": num_steps,
            "longest_step": round(longest, 4),
            "blocked": round(self.blocked, 4),
        }
        total = " + ".join(f"{name} {value:.3f}" for name, value in parts.items())
        steps = f"{num_steps} steps, the longest {longest:.3f} s; {self.blocked:.3f} s blocked"
        log.warning("slow request %s: %.3f s = %s; %s", request_id, seconds, total, steps, extra={"fields": fields})


class Timelines:
    """Middleware that gives each request a `Timeline` in `scope["state"]`, and reports requests that took `limit` seconds."""

    def __init__(self, app: asgi.ASGIApp, limit: float):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        timeline = scope["state"]["timeline"] = Timeline(time.monotonic())
        status = 0

        async def send_timed(message: asgi.Message) -> None:
            nonlocal status
            status = message.get("status", status)
            begin = time.monotonic()
            try:
                await send(message)
            finally:  # `send` raises if it cuts off a client that does not read
                timeline.blocked += time.monotonic() - begin

        try:
            await self._app(scope, receive, send_timed)
        finally:
            now = time.monotonic()
            if now - timeline.arrival >= self._limit:
                timeline.report(scope["state"]["request_id"], scope["path"], status, now)
