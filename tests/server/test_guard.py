"""The middleware: request ids and the access log, API keys, the size of a body."""

import base64
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
