"""The server as a process: uvicorn, the start-up report, and what signals mean.

The first SIGTERM or SIGINT drains: /ready turns 503, new requests get 503, running ones have `drain_timeout` seconds; then the
process ends with code 0. A second signal, or one while the model is being loaded, ends it at once, with 128 and the signal's
number as its code. uvicorn alone would close its port at the first signal and end with the signal's code after a clean stop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from .service import Service

log = logging.getLogger("fa_serve.server")


class Server(uvicorn.Server):
    """`run()` serves until a signal; `failure` then says what, if anything, went wrong."""

    def __init__(self, app: FastAPI, host: str, port: int, drain_timeout: float, on_ready: Callable[[str], None]):
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )
        self.failure: BaseException | None = None
        self._service: Service = app.state.service
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes the port before anything is loaded, so that one that is in use is known at once, by an OSError."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        address = (self.config.host, self.config.port)
        sockets = sockets or [socket.create_server(address, family=family, backlog=self.config.backlog)]
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # what a client that was cut off has not read is not kept for longer either
            timeout = min(max(self._service.settings.send_timeout * 1000, 1), 2**31 - 1)
            sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout))
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._spawn(self._announce())

    async def _announce(self) -> None:
        try:
            await self._service.loaded()
        except BaseException as error:
            if not self.should_exit:
                self.failure = error
            self.should_exit = True
        else:
            _settle()
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal handler of Python's own: it may only set flags and wake the loop."""
        if self._service.draining or not self._service.running:
            os._exit(128 + sig)  # a container's first process gets no signal's default
        self._service.draining = True
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain(signal.Signals(sig).name)))

    async def _drain(self, name: str) -> None:
        begin = time.perf_counter()
        running = self._service.in_flight
        log.warning("%s: draining, %d in flight, at most %g s", name, running, self._drain_timeout)
        try:
            await asyncio.wait_for(self._service.drain(), self._drain_timeout)
        except asyncio.TimeoutError:
            log.warning("%d are cut off", self._service.in_flight)
            await self._service.engine.shutdown()  # they end with an error that their clients can read
        else:
            log.warning("drained in %.1f s", time.perf_counter() - begin)
        self.should_exit = True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle() -> None:
    """What has been loaded stays: collections that went through all of it would hold up every stream for a quarter of a second.

    The threads of the engine's pipe wait a millisecond at most for a busy loop, not five.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.001)
