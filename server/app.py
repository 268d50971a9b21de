"""The application, assembled from its parts.

    app = create_app(engine, settings)          # for uvicorn or another ASGI server; its lifespan starts and stops the engine

The port is open from the start. While the model loads, /ready and every request for the model get a 503.

A request passes these layers, the outermost first:

    bounds/acceptor.py:Acceptor          accepts connections, in turns between clients (set by process.py)
    bounds/protocol.py:BoundedProtocol   limits the bytes and seconds of a request's head and body (set by process.py)
    bounds/guard.py:RequestIds           the request's id, the access log, the charge for unpaid work, unexpected failures
    observe/timelines.py:Timelines       with --log-slow or traces
    observe/traces.py:Traces             with --otlp-traces-endpoint
    bounds/guard.py:Clients              which client sent the request, and the bill for it (bounds/costs.py)
    bounds/guard.py:Hosts                the host names that the server answers to, unless every name is allowed
    CORSMiddleware                       with --cors-origins
    bounds/guard.py:WeightVersion        with an administrator's key
    bounds/guard.py:Keys                 with API keys: refuses requests that have none
    bounds/guard.py:BodyLimit            limits the bytes of the body, and of all bodies together
    bodies.py:BodyRoutes                 answers every POST: takes the client's turn, parses and validates the body
    kept_answers.py:KeptAnswers          answers that are the same for everybody
    FastAPI                              all other routes, and /openapi.json
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette import types as asgi
from starlette.middleware.cors import CORSMiddleware

import fa_serve

from . import errors
from .bodies import BodyRoutes
from .bounds.guard import BodyLimit, Clients, Hosts, Keys, RequestIds, WeightVersion
from .kept_answers import KeptAnswers
from .observe.timelines import Timelines
from .observe.traces import Traces, tracer_provider
from .operation import operation
from .pooling.routes import pooling_router
from .routes import router
from .service import Service
from .settings import Settings

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine


log = logging.getLogger("fa_serve.server")
# FastAPI's own telemetry is off, because traces.py and metrics.py do its work
NO_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs"), False)
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """Build the application. Raises ValueError for traces without the extra `otel` or with a bad address, for a file that
    cannot be read, and for bad keys.
    """
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

    app = FastAPI(
        title="fa_serve", version=fa_serve.__version__, lifespan=lifespan, docs_url=None, redoc_url=None, telemetry=NO_TELEMETRY
    )
    app.state.service = service
    left_out = set() if settings.tokenizer_info else {"/tokenizer_info"}
    app.router.routes += [route for route in router.routes if getattr(route, "path", None) not in left_out]
    app.router.routes += operation.routes
    app.router.routes += pooling_router.routes
    errors.install(app)
    guarded: asgi.ASGIApp = KeptAnswers(app.build_middleware_stack(), service, make_schema=app.openapi)
    guarded = BodyRoutes(guarded, service, app.routes)
    guarded = BodyLimit(guarded, limit=settings.max_body_bytes, in_flight=settings.max_body_bytes_in_flight)
    if keys := settings.all_keys:
        public = {"/health", "/ready"} | ({"/metrics"} if settings.public_metrics else set())
        guarded = Keys(guarded, open_paths=frozenset(public))
    elif settings.host not in LOCAL_HOSTS:
        log.warning(
            "no API key is set: every client that can reach %s, port %d, can use the model", settings.host, settings.port
        )
    if not keys and os.environ.get("FA_SERVE_API_KEY"):
        log.warning("FA_SERVE_API_KEY is the key that clients send; the keys that this server accepts are in FA_SERVE_API_KEYS")
    if settings.admin_key is not None:
        guarded = WeightVersion(guarded, lambda: engine.weight_version if service.running else None)
    if settings.cors_origins:
        guarded = CORSMiddleware(guarded, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
    allowed = settings.allowed_hosts or (["localhost"] if settings.host in LOCAL_HOSTS and not keys else ["*"])
    if "*" not in allowed:
        guarded = Hosts(guarded, names=allowed)
    administrator = () if settings.admin_key is None else (settings.admin_key.get_secret_value(),)
    guarded = Clients(guarded, keys=(*keys, *administrator), costs=service.costs)
    if provider is not None:
        guarded = Traces(guarded, provider=provider)
    if settings.log_slow is not None or provider is not None:
        guarded = Timelines(guarded, limit=math.inf if settings.log_slow is None else settings.log_slow / 1000)
    # our middleware wraps FastAPI's own layers instead of mixing with them, so the tokens of a stream pass only through ours
    app.middleware_stack = RequestIds(guarded, count=service.metrics.responded, costs=service.costs)
    return app
