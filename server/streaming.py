"""Connections that may end before their answer does.

`attend` runs the work of one request while somebody waits for it: when the client leaves or the time is up, the work is
cancelled, which aborts its sequences in the engine. Starlette does this for streams only, and only after the first byte.
`EventStream` writes server-sent events under the same watch. Its headers wait for the first event, so that a request which
fails before its first token gets an honest status; later failures become an error event, as OpenAI's clients expect. A client
that leaves its stream unread holds up nobody: the engine's outputs merge while it dawdles, and it is cut off at a bound.
`merge` interleaves the sequences of one request. An event passes here once for each token: what can be done once for each
stream is not done for each event.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import UNFORESEEN, ApiError, ClientGone, TimedOut

T = TypeVar("T")
log = logging.getLogger("fa_serve.server")
DONE = b"data: [DONE]\n\n"


async def attend(work: Coroutine[Any, Any, T], receive: Receive, timeout: float | None) -> T:
    """The work's result. Raises ClientGone or TimedOut after the work has been cancelled and has come to rest.

    The work is done in the task of the caller, who is cancelled in its stead; one more task waits for the client to leave.
    """
    task = asyncio.current_task()
    causes = list[ApiError]()
    assert task is not None

    def stop(cause: ApiError) -> None:
        causes.append(cause)
        if len(causes) == 1:  # a second one would cut off the work's own end, which aborts its sequences
            task.cancel()

    leaving = asyncio.create_task(_disconnected(receive))
    leaving.add_done_callback(left := lambda _: stop(ClientGone("The client left.")))
    late = timeout and asyncio.get_running_loop().call_later(
        timeout, stop, TimedOut(f"The request took longer than {timeout:g} s.")
    )
    try:
        return await work
    except asyncio.CancelledError:
        if not causes:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise causes[0] from None
    finally:
        leaving.remove_done_callback(left)
        leaving.cancel()
        if late:
            late.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def merge(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items from all iterators as they come; the first error ends it. Closing it closes them all."""
    return iterators[0] if len(iterators) == 1 else _merge(iterators)


async def _merge(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(len(iterators))

    async def pump(iterator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(iterator):
                async for item in iterator:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(iterator)) for iterator in iterators]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class EventStream(Response):
    """One `data:` line for each of `events`, which are JSON, then [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], timeout: float | None, send_timeout: float):
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._timeout = timeout
        self._send_timeout = send_timeout
        self._started = False
        self._sending: float | None = None  # since when, while a send waits for the client to read
        self._unread = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await attend(self._watched(self._write(send)), receive, self._timeout)
        except ClientGone as gone:
            log.info("%s", gone.message)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
                error = ApiError(UNFORESEEN)
            with suppress(ClientGone):
                await self._watched(self._send(send, _body(_event(to_json(error.body())), last=True)))

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if not self._started:
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await self._send(send, start)
                    self._started = True
                await self._send(send, _body(_event(event)))
        await self._send(send, _body(DONE, last=True))

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = time.monotonic()
        await send(message)
        self._sending = None

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """The work, cut off when a send of its has waited for `send_timeout`: one timer looks after all of them."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def look() -> None:
            waited = 0.0 if self._sending is None else time.monotonic() - self._sending
            if waited >= self._send_timeout:
                self._unread = True
                task.cancel()
            else:
                self._timer = loop.call_later(self._send_timeout - waited, look)

        self._sending = None
        self._timer = loop.call_later(self._send_timeout, look)
        try:
            await work
        except asyncio.CancelledError:
            if self._unread:
                raise ClientGone(f"The client left its stream unread for {self._send_timeout:g} s.") from None
            raise
        finally:
            self._timer.cancel()


def _body(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


def _event(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"
