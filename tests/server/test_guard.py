"""What stands before the routes, and what happens when a connection does not live as long as its answer."""

import asyncio
import base64
import json
import logging
import signal
import socket

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.errors import ClientGone, TimedOut
from fa_serve.server.process import Server
from fa_serve.server.settings import Settings
from fa_serve.server.streaming import attend, merge

pytestmark = pytest.mark.anyio
TEXT = {"model": "fake", "prompt": "Hi"}


class Connection:
    """One raw ASGI request: `reading` clear means that the client leaves what it gets unread, `leave()` that it hangs up."""

    def __init__(self, app, body, path="/v1/completions"):
        self.sent = []
        self.reading = asyncio.Event()
        self._left = asyncio.Event()
        self.reading.set()
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)
        await self.reading.wait()

    def leave(self):
        self._left.set()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_every_sequence(engine, stream, n):
    engine.gate.clear()
    app = create_app(engine, Settings())
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        connection = Connection(app, {**TEXT, "stream": stream, "n": n})
        await until(lambda: engine.seen)
        connection.leave()
        await asyncio.wait_for(connection.task, 5)
        assert (engine.seen[0].params.n, len(engine.aborted)) == (n, 1)
        assert app.state.service.in_flight == 0


async def test_a_stream_left_unread_is_cut_off(engine):
    app = create_app(engine, Settings(send_timeout=0.05))
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        connection = Connection(app, {**TEXT, "stream": True})
        connection.reading.clear()
        await asyncio.wait_for(connection.task, 5)
        assert app.state.service.in_flight == 0
        assert len(connection.sent) == 1
        assert engine.aborted


async def test_slow_is_not_cut_off(engine):
    app = create_app(engine, Settings(send_timeout=5))
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        connection = Connection(app, {**TEXT, "stream": True})
        connection.reading.clear()
        await until(lambda: connection.sent)
        await asyncio.sleep(0.05)
        connection.reading.set()
        await asyncio.wait_for(connection.task, 5)
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


async def test_request_timeout(serving, engine, conforms):
    async with serving(request_timeout=0.5) as client:  # long enough for a busy machine to hand both to the engine
        engine.gate.clear()
        plain = await client.post("/v1/completions", json=TEXT)
        stream = await client.post("/v1/completions", json={**TEXT, "stream": True})
        assert (plain.status_code, stream.status_code) == (504, 504), "no token had been sent"
        conforms("ErrorResponse", plain.json())
        assert len(engine.seen) == len(engine.aborted) == 2
        assert client.service.in_flight == 0


async def test_attend():
    async def forever():
        await asyncio.Event().wait()

    async def quick():
        return 7

    async def leave():
        return {"type": "http.disconnect"}

    assert await attend(quick(), forever, None) == 7
    with pytest.raises(ClientGone):
        await attend(forever(), leave, None)
    with pytest.raises(TimedOut, match=r"0\.01 s"):
        await attend(forever(), forever, 0.01)


async def test_a_client_that_leaves_an_overdue_request_does_not_disturb_its_end():
    overdue = asyncio.Event()
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            overdue.set()
            await asyncio.sleep(0.05)
            ended.append(True)

    async def leave():
        await overdue.wait()
        return {"type": "http.disconnect"}

    with pytest.raises(TimedOut):
        await attend(work(), leave, 0.01)
    assert ended


async def test_merge_ends_with_the_first_error_and_closes_the_others():
    closed = []

    async def endless(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def failing():
        yield "c"
        raise ValueError("broken")

    async def all_of(items):
        async for item in items:
            seen.add(item)

    seen = set()
    with pytest.raises(ValueError, match="broken"):
        await all_of(merge([endless("a"), endless("b"), failing()]))
    assert {"a", "b", "c"} <= seen
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": "one"}, False),
        ({}, False),
    ],
)
async def test_a_server_without_keys_says_so_where_others_can_reach_it(serving, caplog, settings, said):
    async with serving(**settings):
        assert ("no API key is set: whoever reaches 0.0.0.0, port 8000, may use the model" in caplog.text) is said


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


async def test_public_metrics(serving):
    async with serving(api_keys="one", public_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_one_key_cannot_take_all_the_room(serving, engine):
    engine.gate.clear()
    async with serving(api_keys="one,two", max_per_key=1) as client:

        def post(key):
            return client.post("/v1/completions", json=TEXT, headers={"authorization": f"Bearer {key}"})

        first = asyncio.create_task(post("one"))
        await until(lambda: engine.seen)
        assert (await post("one")).status_code == 429
        second = asyncio.create_task(post("two"))
        await until(lambda: len(engine.seen) == 2)
        engine.gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]


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


async def test_no_path_writes_a_line_of_its_own_into_the_log(serving, caplog):
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


async def test_a_text_that_cannot_fit_is_refused_unread(serving, engine):
    engine.tokenizer.backend_tokenizer.post_processor = None  # its longest token has 13 characters, a prompt 64 tokens
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": "x" * (64 * 13 + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "than 832 characters, got 833" in response.json()["error"]["message"]


async def test_cors_only_when_asked(serving):
    ask = {"origin": "https://a", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving() as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers={"origin": "https://a"})).headers
    async with serving(cors_origins="https://a", api_keys="one") as client:
        preflight = await client.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a"
        stranger = await client.options("/v1/completions", headers={**ask, "origin": "https://b"})
        assert "access-control-allow-origin" not in stranger.headers


async def test_not_ready_while_loading(engine):
    loading = asyncio.Event()
    engine.start = loading.wait
    app = create_app(engine, Settings())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        loading.set()
        await app.state.service.loaded()
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize(("restarting", "health"), [(False, 503), (True, 200)], ids=["for good", "another is loaded"])
async def test_an_engine_that_has_died(serving, engine, restarting, health):
    async with serving() as client:
        engine.is_alive = False
        engine.is_restarting = restarting
        assert (await client.get("/health")).status_code == health
        for response in (await client.get("/ready"), await client.post("/v1/completions", json=TEXT)):
            assert response.status_code == 503
            assert ("restarted" in response.text) == restarting
        engine.is_alive = True
        engine.is_restarting = False
        assert (await client.get("/ready")).status_code == 200


async def test_a_model_that_fails_to_load(engine):
    async def fail():
        raise OSError("no such model")

    engine.start = fail
    app = create_app(engine, Settings())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        with pytest.raises(OSError, match="no such model"):
            await app.state.service.loaded()
        response = await client.get("/health")
        assert response.status_code == 503
        assert "could not be loaded" in response.text


async def test_what_does_not_end_within_the_drain_is_cut_off_with_an_error(engine):
    url = asyncio.get_running_loop().create_future()
    app = create_app(engine, Settings())
    server = Server(app, "127.0.0.1", 0, drain_timeout=0.05, on_ready=url.set_result)
    serving = asyncio.create_task(server.serve())
    async with httpx.AsyncClient(base_url=await url) as client:
        engine.gate.clear()
        request = asyncio.create_task(client.post("/v1/completions", json={**TEXT, "stream": True}))
        await until(lambda: app.state.service.in_flight)
        server.handle_exit(signal.SIGTERM, None)
        response = await request
        assert "The request was cut off: the server is shutting down." in response.text
        await asyncio.wait_for(serving, 5)
    assert server.failure is None


def test_a_port_in_use_is_known_before_anything_is_loaded(engine):
    started = []
    engine.start = started.append
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(create_app(engine, Settings()), "127.0.0.1", taken.getsockname()[1], 1, print)
        with pytest.raises(OSError, match="in use"):
            server.run()
    assert not started
