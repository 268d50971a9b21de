"""OpenTelemetry spans, as a collector receives them."""

import http.server
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from torch_processes import after_torch

from fa_serve.engine import QueueFullError

TEXT = {"model": "fake", "prompt": "a secret"}


pytestmark = pytest.mark.anyio


class Collector(http.server.BaseHTTPRequestHandler):
    """A collector that keeps the bodies that an OTLP exporter sends."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture
def collector():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []
        server.paths = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_traces(serving, collector, engine):
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = "b7ad6b7169203331"
    async with serving(otlp_traces_endpoint=endpoint) as client:
        headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "mine-1"}
        await client.post("/v1/completions", json=TEXT | {"n": 2}, headers=headers)
        await client.post("/v1/completions", json=TEXT | {"model": "other"})
        await client.get("/health")

        async def refuse(*_, **__):
            raise QueueFullError("the queue is full")
            yield

        engine.generate = refuse
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 429
    body = b"".join(collector.bodies)
    assert b"secret" not in body
    assert b"Hello" not in body
    spans = [
        span
        for part in map(ExportTraceServiceRequest.FromString, collector.bodies)
        for resource in part.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == ["POST /v1/completions"] * 3 + ["sequence"] * 3
    refused = next(span for span in spans if attributes(span).get("gen_ai.response.finish_reasons") == ["refused"])
    spans.remove(refused)
    assert "gen_ai.latency.time_to_first_token" not in attributes(refused)
    first = next(span for span in spans if span.parent_span_id.hex() == parent)
    assert first.trace_id.hex() == trace
    latency = {name: value for name, value in attributes(first).items() if name.startswith("fa_serve.latency.")}
    assert {name.removeprefix("fa_serve.latency.") for name in latency} == {
        *("prepare", "handover", "queue", "prompt", "decode", "masks", "detokenise", "write", "blocked")
    }
    assert {name: value for name, value in attributes(first).items() if name not in latency} == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "fa_serve.request_id": "mine-1",
    }
    for span in (span for span in spans if span.name == "sequence"):
        assert (span.trace_id.hex(), span.parent_span_id) == (trace, first.span_id)
        found = attributes(span)
        assert found["gen_ai.request.model"] == "fake"
        assert found["gen_ai.response.finish_reasons"] == ["stop"]
        assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (8, 3)
        assert found["gen_ai.latency.time_in_queue"] == 0.25
        assert found["gen_ai.latency.time_in_model_prefill"] == 0.5
        assert (found["gen_ai.latency.time_in_model_decode"], found["gen_ai.latency.time_in_masks"]) == (0.125, 0.0)
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]


def attributes(span):
    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


@pytest.mark.parametrize(
    ("given", "asked"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/v1/traces", "/v1/traces"), ("/otlp/x?a=b", "/otlp/x?a=b")]
)
async def test_the_address_of_a_collector_gets_the_path_of_traces(serving, collector, given, asked):
    async with serving(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}{given}") as client:
        await client.post("/v1/completions", json=TEXT)
    assert set(collector.paths) == {asked}


@pytest.mark.parametrize("given", ["collector:4318", "127.0.0.1:4318", "grpc://collector:4317", "http://", "http://[::1"])
async def test_an_address_that_is_none_is_refused(serving, given):
    with pytest.raises(
        ValueError, match="otlp_traces_endpoint must be an address such as http://collector:4318/v1/traces, got"
    ):
        async with serving(otlp_traces_endpoint=given):
            pass


def test_traces_without_their_extra_say_what_to_install():
    program = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from fa_serve.server.observe.traces import tracer_provider
tracer_provider("http://127.0.0.1:1")
"""
    done = after_torch(program)
    assert "ValueError: otlp_traces_endpoint needs the otel extra, pip install '.[otel]' in a clone" in done.stderr
