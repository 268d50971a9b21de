"""OpenTelemetry traces, an extra: pip install '.[server,otel]' in a clone, then --otlp-traces-endpoint http://collector:4318/v1/traces.

Each request for tokens is a span, in the trace of the client's `traceparent` if it sent one; each of its sequences is a span
in that, with tokens in and out, why it ended, and the seconds in the queue, to the first token and in all. Attributes have
OpenTelemetry's and vLLM's names. Left out: prompts and answers, of which nothing is sent, and what OTEL_* variables of the
environment say about resources and sampling, which the SDK reads by itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import fa_serve

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

QUIET = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
SECONDS = 2.0  # that an export may take, so that a collector that is gone holds up no shutdown


def tracer_provider(endpoint: str) -> TracerProvider:
    """Sends spans to a collector's OTLP/HTTP address in the background. ValueError where the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"otlp_traces_endpoint needs the otel extra, pip install '.[otel]' in a clone: {error}") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "fa_serve")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": fa_serve.__version__}))
    exporter = OTLPSpanExporter(endpoint, timeout=SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=SECONDS * 1e3))
    return provider


class Traces:
    """One span for each request, current while it is handled, so that what is begun meanwhile belongs to it."""

    def __init__(self, app: ASGIApp, provider: TracerProvider):
        self._app = app
        self._tracer = provider.get_tracer("fa_serve", fa_serve.__version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        attributes["fa_serve.request_id"] = scope["state"]["request_id"]
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(name, context, trace.SpanKind.SERVER, attributes) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noted)
