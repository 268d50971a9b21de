"""Connections that may end before their answer does.

`attend` runs the work of one request while a client waits for it. If the client disconnects or the time is up, the work is
cancelled, which aborts its sequences in the engine. Starlette does this for streams only, and only after their first byte.

`WholeReply` sends a plain reply in parts, so that it notices a client that does not read a large reply.

`EventStream` writes server-sent events under the same watch. Its headers wait for the first event, so a request that fails
before its first token gets the status of its error. A later failure becomes an error event, as OpenAI's clients expect. A
client that does not read its stream holds up no other client: the engine's outputs are merged meanwhile, and the client is cut
off after `send_timeout`.

The event of every token passes through here, so work that can be done once per stream is not repeated for each event.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette import types as asgi
from starlette.responses import Response

from ..errors import INTERNAL_ERROR, ApiError, ClientGone, TimedOut

if TYPE_CHECKING:
    from .answer import Answer

T = TypeVar("T")
log = logging.getLogger("fa_serve.server")
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
PART = 1 << 16  # bytes of a plain reply that are sent in one go
WATCH_SECONDS = 0.02  # until a task starts to watch for a disconnect; a task for every short request would cost time


async def attend(work: Coroutine[Any, Any, T], receive: asgi.Receive, timeout: float | None) -> T:
    """The result of the work. Raises ClientGone or TimedOut after the work has been cancelled and has ended.

    The work runs in the caller's task, which is cancelled. After WATCH_SECONDS, a second task starts to wait for the client to
    disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    causes: list[ApiError] = []

    def stop(cause: ApiError) -> None:
        causes.append(cause)
        if len(causes) == 1:  # a second cancellation would interrupt the work's own clean-up, which aborts its sequences
            task.cancel()

    def stop_for_client(_: asyncio.Task[None]) -> None:
        stop(ClientGone("The client disconnected."))

    watches: list[asyncio.Task[None]] = []

    def watch() -> None:
        watches.append(loop.create_task(_wait_for_disconnect(receive)))
        watches[0].add_done_callback(stop_for_client)

    timers = [loop.call_later(WATCH_SECONDS, watch)]
    if timeout is not None:
        late = TimedOut(f"The request took longer than {timeout:g} s, which is the server's limit.")
        timers.append(loop.call_later(timeout, stop, late))
    try:
        return await work
    except asyncio.CancelledError:
        if not causes:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise causes[0] from None
    finally:
        for disconnected in watches:
            disconnected.remove_done_callback(stop_for_client)
            disconnected.cancel()
        for timer in timers:
            timer.cancel()


async def _wait_for_disconnect(receive: asgi.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WatchedResponse(Response):
    """A response whose client is cut off if it leaves a part of it unread for `send_timeout` seconds."""

    def __init__(self, send_timeout: float):
        self.status_code = 200
        self.background = None
        self._send_timeout = send_timeout
        self._sending_since: float | None = None  # when the send that is under way began; None without one
        self._unread = False

    async def _send(self, send: asgi.Send, message: asgi.Message) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    async def _watch_sends(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work, and cut it off if one of its sends waits for `send_timeout`. One timer watches all sends."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def check() -> None:
            waited = 0.0 if self._sending_since is None else time.monotonic() - self._sending_since
            if waited >= self._send_timeout:
                self._unread = True
                task.cancel()
            else:
                self._timer = loop.call_later(self._send_timeout - waited, check)

        self._sending_since = None
        self._timer = loop.call_later(self._send_timeout, check)
        try:
            await work
        except asyncio.CancelledError:
            if self._unread:
                raise ClientGone(f"The client did not read its answer for {self._send_timeout:g} s.") from None
            raise
        finally:
            self._timer.cancel()


class WholeReply(WatchedResponse):
    """The JSON that `work` makes while the client waits. A large reply stays in memory until the client has read it.

    hold:    returns a context inside which this many bytes count as held by large answers
    timeout: seconds that the work may take, or None
    """

    media_type = "application/json"

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, bytes]],
        hold: Callable[[int], AbstractContextManager[None]],
        timeout: float | None,
        send_timeout: float,
    ):
        super().__init__(send_timeout)
        self._work = work
        self._hold = hold
        self._timeout = timeout

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        self.body = await attend(self._work(), receive, self._timeout)
        self.init_headers()
        with self._hold(len(self.body)):
            try:
                await self._watch_sends(self._write(send))
            except ClientGone as gone:
                log.info("%s", gone.message)

    async def _write(self, send: asgi.Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), PART):
            end = begin + PART
            await self._send(send, _body(bytes(self.body[begin:end]), last=end >= len(self.body)))


class EventStream(WatchedResponse):
    """A response with the chunks of an answer as server-sent events, in the form of the answer's API.

    timeout:      seconds that the whole stream may take, or None
    send_timeout: seconds that the client may leave an event unread
    """

    def __init__(self, answer: Answer, timeout: float | None, send_timeout: float):
        super().__init__(send_timeout)
        self.raw_headers = [*EVENT_HEADERS]
        self._answer = answer
        self._timeout = timeout
        self._started = False

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        try:
            await attend(self._watch_sends(self._write(send)), receive, self._timeout)
        except ClientGone as gone:
            log.info("%s", gone.message)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
                error = ApiError(INTERNAL_ERROR)
            with suppress(ClientGone):
                await self._watch_sends(self._send(send, _body(self._framed(self._answer.failure(error)), last=True)))

    async def _write(self, send: asgi.Send) -> None:
        async with aclosing(self._answer.chunks()) as events:
            async for event in events:
                if not self._started:
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await self._send(send, start)
                    self._started = True
                await self._send(send, _body(self._framed(event)))
        await self._send(send, _body(self._answer.stream_end, last=True))

    def _framed(self, event: bytes) -> bytes:
        return self._answer.event_begin + event + b"\n\n"


def _body(body: bytes, last: bool = False) -> asgi.Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}
