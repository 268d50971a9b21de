"""OpenTelemetry traces. They need the extra `otel`: pip install '.[server,otel]' in a clone.

    fa-serve serve --otlp-traces-endpoint http://collector:4318/v1/traces

Each request is a span, except for the paths in UNTRACED. The span continues the client's trace if the client sends
`traceparent`. The parts of the request's time (timelines.py) are attributes. Each sequence of the request is a span inside the
request's span. Its attributes are the numbers of tokens, the finish reason, and the seconds in the queue, to the first token
and in total. Attributes have the names of OpenTelemetry or vLLM where there is one. Prompts and answers are never sent. The SDK
itself reads the OTEL_* environment variables about resources and sampling.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from starlette import types as asgi
from starlette.datastructures import Headers

import fa_serve

from .timelines import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

UNTRACED = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
TRACES_PATH = "/v1/traces"
EXPORT_SECONDS = 2.0  # how long an export may take: a collector that does not answer must not hold up the shutdown


def tracer_provider(endpoint: str) -> TracerProvider:
    """A provider that sends spans to a collector's OTLP/HTTP address in the background.

    Raises ValueError if the extra is not installed, or for an invalid address.
    """
    refused = f"otlp_traces_endpoint must be an address such as http://collector:4318/v1/traces, got {endpoint!r}"
    try:
        address = urlsplit(endpoint)
    except ValueError as error:  # brackets that hold no IPv6 address
        raise ValueError(refused) from error
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ValueError(refused)
    if address.path in ("", "/"):  # the base address of a collector, as in OTEL_EXPORTER_OTLP_ENDPOINT
        endpoint = urlunsplit(address._replace(path=TRACES_PATH))
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"otlp_traces_endpoint needs the otel extra, pip install '.[otel]' in a clone: {error}") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "fa_serve")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": fa_serve.__version__}))
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=EXPORT_SECONDS * 1e3))
    return provider


class Traces:
    """Middleware that opens a span for each request. While the request is handled, new spans become children of this span."""

    def __init__(self, app: asgi.ASGIApp, provider: TracerProvider):
        self._app = app
        self._tracer = provider.get_tracer("fa_serve", fa_serve.__version__)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "fa_serve.request_id": scope["state"]["request_id"],
        }
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(name, context, trace.SpanKind.SERVER, attributes) as span:

            async def send_with_status(message: asgi.Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, send_with_status)
            timeline: Timeline = scope["state"]["timeline"]
            for part, seconds in timeline.parts(time.monotonic()).items():
                span.set_attribute(f"fa_serve.latency.{part}", seconds)
            span.set_attribute("fa_serve.latency.blocked", timeline.blocked)
