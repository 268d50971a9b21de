"""Connections that end before their answer does."""

import asyncio
import json

import pytest
from asgi_connection import Connection
from fa_serve.server.answers.streaming import PART, attend
from fa_serve.server.app import create_app
from fa_serve.server.errors import ClientGone, TimedOut
from fa_serve.server.settings import Settings

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


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


@pytest.mark.slow
async def test_request_timeout(serving, engine, conforms):
    async with serving(request_timeout=3) as client:  # a busy machine needs that long to hand both requests to the engine
        engine.gate.clear()
        bodies = [TEXT, {**TEXT, "stream": True}]
        plain, stream = await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])
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


async def test_a_large_reply_counts_until_its_client_has_read_it(engine):
    """Replies of 30 MB stayed in memory, uncounted, while their clients read a little from time to time."""
    engine.words = ("x" * (3 << 20),)
    app = create_app(engine, Settings(send_timeout=5))
    async with app.router.lifespan_context(app):
        service = app.state.service
        await service.loaded()
        connection = Connection(app, TEXT)
        connection.reading.clear()
        await until(lambda: connection.sent)
        assert service.in_flight == 0
        assert service._answer_bytes > 3 << 20
        connection.reading.set()
        await asyncio.wait_for(connection.task, 5)
        assert service._answer_bytes == 0
    start, *parts = connection.sent
    body = b"".join(part["body"] for part in parts)
    assert max(len(part["body"]) for part in parts) == PART
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert json.loads(body)["choices"][0]["text"] == engine.words[0]
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


async def test_a_plain_reply_left_unread_is_cut_off(engine):
    engine.words = ("x" * (3 << 20),)
    app = create_app(engine, Settings(send_timeout=0.05))
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        connection = Connection(app, TEXT)
        connection.reading.clear()
        await asyncio.wait_for(connection.task, 5)
        assert len(connection.sent) == 1
        assert app.state.service._answer_bytes == 0
