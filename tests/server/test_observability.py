"""What an operator sees: metrics, structured logs, traces at a collector, and a dashboard that asks for nothing unknown."""

import http.server
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fa_serve.server.logs import StartUp, log_to_stderr
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fa_serve.engine import QueueFullError

ROOT = Path(__file__).parents[2]
TEXT = {"model": "fake", "prompt": "a secret"}
pytestmark = pytest.mark.anyio


def names(text: str) -> set[str]:
    """Of the series that a page of metrics could have, given its types."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


async def test_metrics_have_vllms_names(serving):
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT)
        await client.get("/v1/models/other")
        await client.get("/nowhere")
        text = (await client.get("/metrics")).text
    vllms = {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    }
    assert {f"fa_serve:{name}" for name in vllms} <= names(text)
    assert 'fa_serve:request_queue_time_seconds_sum{model_name="fake"} 0.25' in text
    assert 'fa_serve:http_responses_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'fa_serve:http_responses_total{path="/v1/models/{model:path}",status="404"} 1.0' in text
    assert 'fa_serve:http_responses_total{path="other",status="404"} 1.0' in text, "paths are the client's to make up"


async def test_the_dashboard_asks_for_what_there_is(serving):
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "fa_serve.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"fa_serve:\w+", query)}
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT)
        known = names((await client.get("/metrics")).text)
    assert asked - known == set()
    assert {f"fa_serve:{name}" for name in ("kv_cache_usage_perc", "request_queue_time_seconds_bucket")} <= asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r"fa_serve:\w+", rules)) - known == set()
    assert "fa_serve:" in rules


async def test_json_logs_have_fields(serving, monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr("info", "json", StartUp())
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT | {"user": "me"}, headers={"x-request-id": "mine-1"})
        logging.getLogger("fa_serve.server").warning("a line\nof two")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [access] = [line for line in lines if line["logger"] == "fa_serve.access"]
    assert {name: access[name] for name in ("level", "method", "path", "status", "request_id", "user")} == {
        "level": "INFO",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "mine-1",
        "user": "me",
    }
    assert access["seconds"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", access["time"])
    assert lines[-1]["message"] == "a line\nof two"
    assert "secret" not in json.dumps(lines)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter sends."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture
def collector():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []
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
    assert attributes(first) == {
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
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]


def attributes(span):
    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


def test_traces_without_their_extra_say_what_to_install():
    program = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from fa_serve.server.traces import tracer_provider
tracer_provider("http://127.0.0.1:1")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "ValueError: otlp_traces_endpoint needs the otel extra, pip install '.[otel]' in a clone" in done.stderr
