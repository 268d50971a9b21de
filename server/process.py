"""The server as a process: uvicorn, and the meaning of signals.

The first SIGTERM or SIGINT drains the server: /ready and new requests get a 503, running requests have `drain_timeout` seconds
to finish, and then the process ends with code 0. A second signal, or a signal while the model is being loaded, ends the process
at once with the code 128 plus the signal's number. Without this module, uvicorn would close its port at the first signal, and
would end with the signal's code after a clean stop.

Nothing that hangs keeps the process alive: END_SECONDS after the drain has ended, or after it should have ended, the process
kills the engine's process and ends without its clean-up. SIGHUP is ignored: settings and keys are read only at the start.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from fa_serve.engine import AsyncEngine
from fa_serve.engine.process.host_memory import MemoryTrimmer

from .app import create_app
from .bounds.acceptor import Acceptor
from .bounds.guard import ClientNames
from .bounds.protocol import BoundedProtocol, ConnectionBounds, ConnectionTable, connection_limit
from .observe.decisions import decisions
from .observe.logs import exit_now
from .observe.startup_report import SampleRequest, StartupReport
from .service import STOP_SECONDS, Service
from .settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("fa_serve.server")
MakeEngine = Callable[..., AsyncEngine]
"""Makes an engine from an EngineConfig and `on_phase`."""
END_SECONDS = 4.5  # time after the drain for the engine's last step, open connections and the event loop to end


def build_server(settings: Settings, report: StartupReport, make_engine: MakeEngine = AsyncEngine) -> Server:
    """The server for these settings, with nothing loaded yet. Raises ValueError or OSError for settings that cannot work."""
    report.mark("import", f"torch {version('torch')}, transformers {version('transformers')}")
    engine_config = settings.engine_config()
    engine = make_engine(engine_config, on_phase=report.add)
    app = create_app(engine, settings)
    revision = "" if engine_config.revision is None else f" at {engine_config.revision}"
    report.mark("config", f"{engine_config.model_name}{revision}, dtype {engine_config.dtype}, device {engine_config.device}")

    def on_ready(url: str) -> None:
        service: Service = app.state.service
        chat = service.tokenization.writes_chats
        request = SampleRequest(service.model_name, chat, bool(settings.all_keys), service.task)
        report.ready(url, request, decisions(settings, engine))

    return Server(app, settings.host, settings.port, settings.drain_timeout, on_ready)


class Server(uvicorn.Server):
    """`run()` serves until a signal comes. Afterwards `failure` holds the error that ended it, or None.

    drain_timeout: seconds that running requests have after the first signal
    on_ready:      called with the server's address when the model is loaded
    """

    def __init__(self, app: FastAPI, host: str, port: int, drain_timeout: float, on_ready: Callable[[str], None]):
        service: Service = app.state.service
        settings = service.settings
        self._client_of = ClientNames(settings.all_keys)
        self._table = ConnectionTable(connection_limit(settings.max_connections), service.metrics.connection_refused)
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                http=partial(BoundedProtocol, bounds=ConnectionBounds.of(settings), table=self._table),  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=1,
            )
        )
        self.failure: BaseException | None = None
        self._service = service
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._owns_process = False
        self._timers: list[threading.Timer] = []

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the port before anything is loaded. Raises OSError at once if the port is in use."""
        sockets = sockets or [self._listen()]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # after this time, the kernel also closes a connection whose client does not take its data
            milliseconds = min(max(self._service.settings.send_timeout * 1000, 1), 2**31 - 1)
            sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(milliseconds))
        self._owns_process = True
        super().run(sockets)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        return socket.create_server((self.config.host, self.config.port), family=family, backlog=self.config.backlog)

    def _make_protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Like `run`, for a caller that has an event loop and whose process goes on afterwards."""
        try:
            await super().serve(sockets)
        finally:
            for timer in self._timers if not self._owns_process else ():
                timer.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listener in sockets or [self._listen()]:
            acceptor = Acceptor(listener, self._make_protocol, self._table, self._client_of)
            self.servers.append(acceptor)  # type: ignore[arg-type]
            acceptor.start()
        self._loop = asyncio.get_running_loop()
        self._spawn(self._announce())

    async def _announce(self) -> None:
        try:
            await self._service.loaded()
        except BaseException as error:
            if not self.should_exit:
                self.failure = error
            self.should_exit = True
            self._end_after(END_SECONDS, 1)
        else:
            _tune_interpreter()
            if self._owns_process:
                MemoryTrimmer().start()
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Python's signal handler. Unless the process ends at once, it only sets flags, starts a timer and wakes the loop."""
        if self._service.draining or not self._service.has_started:
            self._end(128 + sig)  # for the first process of a container, a signal has no default action
        self._service.draining = True
        self._end_after(self._drain_timeout + END_SECONDS, 128 + sig)
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain(signal.Signals(sig).name)))

    async def _drain(self, name: str) -> None:
        begin = time.perf_counter()
        in_flight = self._service.in_flight
        log.warning("%s: draining %d sequences in flight, for at most %g s", name, in_flight, self._drain_timeout)
        try:
            await asyncio.wait_for(self._service.drain(), self._drain_timeout)
        except asyncio.TimeoutError:
            log.warning("the drain timeout has passed: %d sequences are cut off", self._service.in_flight)
            # the sequences end with an error that their clients can read
            await self._service.engine.shutdown(STOP_SECONDS)
        else:
            log.warning("drained in %.1f s", time.perf_counter() - begin)
            self._end_after(END_SECONDS, 0)
        self.should_exit = True

    def _end_after(self, seconds: float, code: int) -> None:
        """End the process after this time, even if the event loop, the engine or a thread that Python waits for hangs."""

        def end() -> None:
            log.error("the process did not exit within %g s and is killed", seconds)
            self._end(code)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end(self, code: int) -> None:
        self._service.engine.kill()
        exit_now(code)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tune_interpreter() -> None:
    """Settings for the time after loading.

    The loaded objects stay, so the garbage collector skips them: a collection of all of them would stop every stream for a
    quarter of a second. The threads that serve the engine's pipe wait for a busy event loop at most one millisecond, not five.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.001)
