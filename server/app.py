"""The application, put together from its parts.

    app = create_app(engine, settings)          # uvicorn, or any ASGI server, runs it; lifespan starts and stops the engine

The port answers at once: while the model loads, /ready and every request get 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import fa_serve

from . import errors
from .guard import BodyLimit, Keys, RequestIds
from .routes import posts, router
from .service import Service
from .settings import Settings
from .traces import Traces, tracer_provider

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine


log = logging.getLogger("fa_serve.server")
OFF: Any = dict.fromkeys(("tracing", "metrics", "logs"), False)  # of FastAPI's own telemetry: traces.py and metrics.py are ours


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    service = Service(engine, settings)
    provider = tracer_provider(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    if provider is not None:
        service.metrics.tracer = provider.get_tracer("fa_serve", fa_serve.__version__)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()
            if provider is not None:
                await asyncio.to_thread(provider.shutdown)

    app = FastAPI(title="fa_serve", version=fa_serve.__version__, lifespan=lifespan, redoc_url=None, telemetry=OFF)
    app.state.service = service
    app.router.routes[:0] = posts.routes  # an included router's are looked for twice, in more time than all of theirs
    app.include_router(router)
    errors.install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    if keys := settings.all_keys:
        public = {"/health", "/ready"} | ({"/metrics"} if settings.public_metrics else set())
        app.add_middleware(Keys, keys=keys, open_paths=frozenset(public))
    elif settings.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("no API key is set: whoever reaches %s, port %d, may use the model", settings.host, settings.port)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    if provider is not None:
        app.add_middleware(Traces, provider=provider)
    app.add_middleware(RequestIds, count=service.metrics.responded)
    return app
