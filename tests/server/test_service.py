"""Readiness, and the number of sequences in flight."""

import asyncio
import itertools
import re
import threading
import time

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.errors import TooManyRequests
from fa_serve.server.observe.metrics import ScrapedText
from fa_serve.server.settings import Settings

from fa_serve.engine.process.parent import Pulse

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_not_ready(serving, engine, conforms):
    async with serving() as client:
        client.service.draining = True
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, (await client.get("/ready")).status_code) == (503, 503)
        assert response.headers["retry-after"]
        conforms("ErrorResponse", response.json())
        assert (await client.get("/health")).status_code == 200
        engine.is_alive = False
        assert (await client.get("/health")).status_code == 503


async def test_full_queue(serving, engine):
    engine.gate.clear()
    async with serving(max_num_seqs=1, max_waiting=1) as client:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(2)]
        while client.service.in_flight < 2:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=TEXT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.post("/v1/completions", json={**TEXT, "n": 3})).status_code == 400
        engine.gate.set()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
        assert client.service.in_flight == 0


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


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


@pytest.mark.parametrize(("keys", "whose"), [("one", "This API key"), ("", "All clients together, as there are no API keys,")])
async def test_what_one_client_may_never_have_is_not_to_be_tried_again(serving, engine, keys, whose):
    """Without keys as well, where the client has none that an error could name."""
    headers = {"authorization": f"Bearer {keys}"} if keys else {}
    async with serving(max_per_key=2, **({"api_keys": keys} if keys else {})) as client:
        refused = await client.post("/v1/completions", json={**TEXT, "n": 3}, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "A request must ask for at most 2 sequences (--max-per-key), got 3."
        assert refused.json()["error"]["param"] == "n"
        engine.gate.clear()
        running = asyncio.create_task(client.post("/v1/completions", json={**TEXT, "n": 2}, headers=headers))
        await until(lambda: engine.seen)
        later = await client.post("/v1/completions", json=TEXT, headers=headers)
        assert later.status_code == 429
        assert later.json()["error"]["message"].startswith(f"{whose} may have at most 2 sequences in flight (--max-per-key)")
        engine.gate.set()
        assert (await running).status_code == 200


async def test_not_ready_while_loading(engine):
    loading = asyncio.Event()
    engine.start = loading.wait
    app = create_app(engine, Settings())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 503
        metrics = await client.get("/metrics")
        assert metrics.status_code == 200
        assert "fa_serve:engine_up " not in metrics.text, "a long start is no death"
        assert "fa_serve:engine_restarts_total " not in metrics.text
        loading.set()
        await app.state.service.loaded()
        assert (await client.get("/ready")).status_code == 200


async def life_in_metrics(client):
    """What /metrics has about the engine's life, by the rest of the names."""
    client.service.scraped = ScrapedText(client.service.metrics.text)  # a text is kept for a moment
    text = (await client.get("/metrics")).text
    return {
        name: float(value) for name, value in re.findall(r"^fa_serve:engine_(up|restarts_total) (\S+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize(("restarting", "health"), [(False, 503), (True, 200)], ids=["for good", "another is loaded"])
async def test_an_engine_that_has_died(serving, engine, restarting, health):
    async with serving() as client:
        engine.is_alive = False
        engine.is_restarting = restarting
        engine.death_cause = "its process ended with exit code -9"
        response = await client.get("/health")
        assert response.status_code == health
        assert restarting or response.json()["error"]["message"] == (
            "The server is dead: the engine has died: its process ended with exit code -9."
        )
        for response in (await client.get("/ready"), await client.post("/v1/completions", json=TEXT)):
            assert response.status_code == 503
            assert ("restarted" in response.text) == restarting
        assert await life_in_metrics(client) == {"up": 0, "restarts_total": 0}, (
            "the process that answers is up, its engine is not"
        )
        engine.is_alive = True
        engine.is_restarting = False
        engine.num_restarts = 1
        assert (await client.get("/ready")).status_code == 200
        assert await life_in_metrics(client) == {"up": 1, "restarts_total": 1}
        client.service.draining = True
        assert (await life_in_metrics(client))["up"] == 1, "a drain is no death"


@pytest.mark.parametrize(
    ("pulse", "said"),
    [(Pulse(silent_seconds=6), "no sign of life for 6 s"), (Pulse(busy_seconds=61), "above --step-timeout 60")],
    ids=["no heartbeat", "a step that hangs"],
)
async def test_an_engine_that_does_not_answer(serving, engine, pulse, said):
    async with serving() as client:
        engine.beats = pulse
        for response in [await client.get(path) for path in ("/health", "/ready")] + [
            await client.post("/v1/completions", json=TEXT)
        ]:
            assert response.status_code == 503
            assert said in response.json()["error"]["message"]
        assert (await life_in_metrics(client))["up"] == 0
        assert client.service.running, "it may answer again, so SIGTERM still drains"
        engine.beats = Pulse(silent_seconds=4, busy_seconds=59)
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        assert (await life_in_metrics(client))["up"] == 1


async def test_a_model_that_fails_to_load(engine):
    async def fail():
        raise OSError("no such model")

    engine.start = fail
    app = create_app(engine, Settings())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        with pytest.raises(OSError, match="no such model"):
            await app.state.service.loaded()
        response = await client.get("/health")
        assert response.status_code == 503
        assert "could not be loaded" in response.text


async def test_large_bodies_leave_the_loop_as_much_time_as_they_take(serving):
    """Parsing holds the interpreter's lock, so the next body waits after each. A body that comes alone does not wait."""
    began = []

    def work():
        began.append(time.monotonic())
        time.sleep(0.03)

    async with serving() as client:
        await client.service.parse(lambda: None, None)  # starts the thread
        begin = time.monotonic()
        await asyncio.gather(*(client.service.parse(work, None) for _ in range(3)))
        assert began[0] - begin < 0.02
        assert [later - earlier >= 0.055 for earlier, later in itertools.pairwise(began)] == [True, True]
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await client.service.parse(work, None)
        assert began[3] - begin < 0.02


async def test_large_bodies_of_clients_are_parsed_in_turns(serving):
    """A client with hundreds of large bodies in the queue delayed the large body of another one by tens of seconds."""
    order = []
    began = threading.Event()
    gate = threading.Event()

    def first():
        began.set()
        gate.wait(20)

    async with serving() as client:
        waits = [asyncio.create_task(client.service.parse(first, "many"))]
        await asyncio.to_thread(began.wait, 20)
        for name in ("many", "many", "other"):
            waits.append(asyncio.create_task(client.service.parse(lambda name=name: order.append(name), name)))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*waits)
    assert order == ["other", "many", "many"], "the first one was of many"


async def test_bytes_of_an_answer_that_is_being_read_count(serving):
    async with serving(max_answer_bytes_in_flight=4 << 20) as client:
        with client.service.hold_bytes(3 << 20):
            with pytest.raises(TooManyRequests), client.service.reserve_bytes(2 << 20):
                pass
            with client.service.hold_bytes(1 << 20), client.service.reserve_bytes(1 << 20):
                pass  # small ones
        with client.service.reserve_bytes(2 << 20):
            pass
