"""The middleware: request ids and the access log, API keys, the size of a body."""

import asyncio
import base64
import hashlib
import json
import logging

import pytest
from asgi_connection import Connection
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_keys(serving, conforms):
    async with serving(api_keys="one,two,schlüssel") as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/nowhere"):
            response = await client.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            conforms("ErrorResponse", response.json())
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        basic = "Basic " + base64.b64encode(b"user:two").decode()
        expected = {
            "Bearer two": 200,
            "bearer one": 200,
            basic: 200,
            "Bearer on": 401,
            "Bearer ": 401,
            "two": 401,
            "Basic !": 401,
            b"Basic \xe9": 401,
            "Bearer schlüssel".encode(): 200,
        }
        for authorization, status in expected.items():
            response = await client.get("/v1/models", headers={"authorization": authorization})
            assert response.status_code == status, authorization
        page = await client.get("/docs", headers={"accept": "text/html"})
        assert page.headers["www-authenticate"].startswith("Basic ")


async def test_body_limit(serving, conforms):
    async def chunks():
        for _ in range(8):
            yield b" " * 50

    async with serving(max_body_bytes=300) as client:
        announced = await client.post("/v1/completions", content=b" " * 301)
        streamed = await client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    for response in (announced, streamed):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        conforms("ErrorResponse", response.json())


async def test_request_ids_and_the_access_log(serving, caplog):
    caplog.set_level(logging.INFO, "fa_serve.access")
    async with serving() as client:
        given = await client.post(
            "/v1/completions", json={**TEXT, "prompt": "secret", "user": "me"}, headers={"x-request-id": "mine-1"}
        )
        made = await client.get("/health", headers={"x-request-id": "with a space"})
    assert given.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req-")
    [line] = [record.getMessage() for record in caplog.records if "mine-1" in record.getMessage()]
    assert line.startswith("POST /v1/completions 200 ")
    assert line.endswith("user='me'")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("level", "probed"), [(logging.INFO, []), (logging.DEBUG, ["/health", "/ready", "/metrics"])])
async def test_probes_that_succeed_are_logged_at_debug_alone(serving, engine, caplog, level, probed):
    """Orchestrators and Prometheus send them every few seconds. Those that fail are logged always."""
    caplog.set_level(level, "fa_serve.access")
    async with serving() as client:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        engine.is_alive = False
        assert (await client.get("/health")).status_code == 503
    logged = [(record.fields["path"], record.fields["status"]) for record in caplog.records if record.name == "fa_serve.access"]
    assert logged == [*((path, 200) for path in probed), ("/version", 200), ("/health", 503)]


async def test_no_path_writes_an_additional_line_into_the_log(serving, caplog):
    caplog.set_level(logging.INFO, "fa_serve.access")
    async with serving() as client:
        assert (await client.get("/x%0aINFO forged")).status_code == 404
    [line] = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line.startswith("GET /x%0AINFO%20forged 404 ")


async def test_a_client_that_leaves_while_it_uploads_is_no_failure(engine, caplog):
    caplog.set_level(logging.INFO, "fa_serve.access")
    app = create_app(engine, Settings())
    async with app.router.lifespan_context(app):
        client = Connection(app, TEXT)
        client._body[0]["more_body"] = True
        client.leave()
        await client.task
    assert "POST /v1/completions 499 " in caplog.text
    assert "Traceback" not in caplog.text
    assert client.sent == []


async def test_the_access_log_names_the_client_and_its_key(serving, caplog):
    caplog.set_level(logging.INFO, "fa_serve.access")
    async with serving(api_keys="one") as client:
        await client.get("/v1/models", headers={"authorization": "Bearer one", "x-request-id": "mine"})
        await client.get("/v1/models", headers={"x-request-id": "open"})
    lines = {record.fields["request_id"]: record for record in caplog.records if hasattr(record, "fields")}
    key = hashlib.sha256(b"one").hexdigest()[:8]
    assert lines["mine"].fields["client"] == "127.0.0.1"
    assert lines["mine"].fields["key"] == key
    assert lines["mine"].getMessage().endswith(f"127.0.0.1 key={key}")
    assert lines["open"].fields["key"] is None


@pytest.mark.parametrize(
    ("settings", "host", "allowed"),
    [
        ({}, "localhost:8000", True),
        ({}, "LOCALHOST.", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "[::1]:8000", True),
        ({}, "evil.example:8000", False),
        ({}, "127.0.0.1.evil.example", False),
        ({"api_keys": "one"}, "proxy.example", True),
        ({"host": "0.0.0.0"}, "service", True),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.org,*.internal"}, "service", False),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.org,*.internal"}, "API.example.org:443", True),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.org,*.internal"}, "a.b.internal", True),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.org,*.internal"}, "xinternal", False),
        ({"allowed_hosts": "*"}, "anything", True),
    ],
)
async def test_host_names(serving, conforms, settings, host, allowed):
    async with serving(**settings) as client:
        response = await client.get("/health", headers={"host": host})
    assert response.status_code == (200 if allowed else 421)
    if not allowed:
        conforms("ErrorResponse", response.json())
        assert response.json()["error"]["code"] == "host_not_allowed"


async def test_bodies_in_flight_are_bounded_for_one_client_and_together(serving, conforms):
    """A body that is being read counts until it is parsed; a client that takes its half leaves the other half to others."""
    arrived = asyncio.Event()
    go_on = asyncio.Event()

    async def slow():
        yield b" " * 400
        arrived.set()
        await go_on.wait()
        yield json.dumps(TEXT).encode()

    one, two = ({"authorization": f"Bearer {key}", "content-type": "application/json"} for key in ("one", "two"))
    async with serving(api_keys="one,two", max_body_bytes_in_flight=1000) as client:
        first = asyncio.create_task(client.post("/v1/completions", content=slow(), headers=one))
        await arrived.wait()
        refused = await client.post("/v1/completions", content=b" " * 101, headers=one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_body_bytes")
        conforms("ErrorResponse", refused.json())
        body = json.dumps(TEXT).encode()
        assert (await client.post("/v1/completions", content=body.rjust(450), headers=two)).status_code == 200
        go_on.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", content=body.rjust(450), headers=one)).status_code == 200


async def test_a_body_that_is_parsed_no_longer_counts(serving, engine):
    async with serving(max_body_bytes_in_flight=1000) as client:
        engine.gate.clear()
        body = json.dumps(TEXT).encode().rjust(450)
        headers = {"content-type": "application/json"}
        requests = [asyncio.create_task(client.post("/v1/completions", content=body, headers=headers)) for _ in range(8)]
        while len(engine.seen) < 8:
            assert not any(request.done() for request in requests)
            await asyncio.sleep(0.001)
        engine.gate.set()
        assert {(await request).status_code for request in requests} == {200}
