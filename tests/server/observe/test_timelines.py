"""The log of slow requests: its parts are what was made slow, and they add up to the whole."""

import asyncio
import time

import pytest
from asgi_connection import Connection
from fa_serve.server.app import create_app
from fa_serve.server.observe.timelines import Timeline
from fa_serve.server.settings import Settings

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, SequenceTimes, StructuredOutput
from fa_serve.engine.request.detokenizer import TextStream

pytestmark = pytest.mark.anyio

TEXT = {"model": "fake", "prompt": "a secret"}
MODEL = "fa-serve-demo"
SLACK = 30.0  # seconds by which a part may be longer than what was slept in it, on a busy machine


def slow_records(caplog):
    return [record for record in caplog.records if record.name == "fa_serve.slow"]


@pytest.fixture
def loaded():
    return Engine(EngineConfig(device="cpu", num_pages=64, max_num_seqs=4))


@pytest.mark.slow
async def test_each_part_is_where_the_time_went(loaded, monkeypatch, caplog):
    """Every part is made slow by a sleep of another length."""
    sleeps = {"prepare": 0.11, "handover": 0.22, "prompt": 0.33, "decode": 0.4, "masks": 0.54, "detokenise": 0.36, "write": 0.5}
    num_tokens = 6
    launch = loaded._runner.launch
    push = TextStream.push
    masks = loaded.grammars.masks
    add = loaded.add_request

    def slow_launch(batch):
        time.sleep(sleeps["prompt"] if batch.num_prompt_tokens else sleeps["decode"] / (num_tokens - 1))
        return launch(batch)

    def slow_push(*arguments):
        time.sleep(sleeps["detokenise"] / num_tokens)
        return push(*arguments)

    def slow_masks(*arguments):
        time.sleep(sleeps["masks"] / num_tokens)
        return masks(*arguments)

    def slow_add(*arguments, **options):
        time.sleep(sleeps["handover"])
        add(*arguments, **options)

    regex = "[a-z ]{40,}"
    loaded.grammars.matcher(StructuredOutput(regex=regex))  # compiling it is part of the handover as well
    app = create_app(AsyncEngine(loaded), Settings(log_slow=100))
    monkeypatch.setattr(loaded._runner, "launch", slow_launch)
    monkeypatch.setattr(TextStream, "push", slow_push)
    monkeypatch.setattr(loaded.grammars, "masks", slow_masks)
    monkeypatch.setattr(loaded, "add_request", slow_add)
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        tokenization = app.state.service.tokenization
        encode = tokenization.encode

        async def slow_encode(*arguments, **options):
            await asyncio.sleep(sleeps["prepare"])
            return await encode(*arguments, **options)

        monkeypatch.setattr(tokenization, "encode", slow_encode)
        begin = time.perf_counter()
        body = {"model": MODEL, "prompt": "a secret", "stream": True, "guided_regex": regex, "max_tokens": num_tokens}
        connection = Connection(app, body)
        while len(connection.sent) < 2:  # the start and the first event
            await asyncio.sleep(0.001)
        connection.reading.clear()
        while loaded.has_unfinished():  # its end comes before the text of the last token
            await asyncio.sleep(0.001)
        await asyncio.sleep(sleeps["detokenise"] / num_tokens)
        await asyncio.sleep(sleeps["write"] + 0.2)
        connection.reading.set()
        await connection.task
        seconds = time.perf_counter() - begin
    [record] = slow_records(caplog)
    fields = record.fields
    assert fields["seconds"] == pytest.approx(seconds, abs=5), "by another clock"
    assert sum(fields["parts"].values()) == pytest.approx(fields["seconds"], abs=0.002), "the parts are the whole"
    assert list(fields["parts"]) == ["prepare", "handover", "queue", "prompt", "decode", "masks", "detokenise", "write"]
    for part, value in fields["parts"].items():
        assert sleeps.get(part, 0.0) <= value + 0.01 < sleeps.get(part, 0.0) + SLACK, (part, fields)
    assert fields["steps"] == num_tokens
    assert (sleeps["decode"] + sleeps["masks"]) / num_tokens <= fields["longest_step"] < SLACK
    assert fields["blocked"] > sleeps["write"]
    assert "secret" not in caplog.text
    begin, _, parts = record.getMessage().partition(" s = ")
    name, _, seconds = begin.rpartition(": ")
    assert name == f"slow request {fields['request_id']}"
    assert float(seconds) == pytest.approx(fields["seconds"], abs=0.0011), "rounded to milliseconds, and not twice"
    assert parts.startswith("prepare ")


@pytest.mark.parametrize("limit", [200, 60_000])
async def test_only_slow_requests_are_logged(serving, engine, caplog, limit):
    """A request of 250 ms, by two limits: a busy machine makes any other request slow as well."""
    async with serving(log_slow=limit) as client:
        engine.gate.clear()
        asking = asyncio.create_task(client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine-1"}))
        await asyncio.sleep(0.25)
        engine.gate.set()
        await asking
    records = [record.fields for record in slow_records(caplog)]
    told = [(fields["request_id"], fields["path"], fields["status"]) for fields in records]
    assert told == ([("mine-1", "/v1/completions", 200)] if limit == 200 else [])
    assert "secret" not in caplog.text
    assert "Hello" not in caplog.text


async def test_without_the_setting_nothing_is_measured(serving, engine, caplog):
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT)
        assert engine.seen
    assert not slow_records(caplog)


@pytest.mark.slow
async def test_a_request_that_is_cut_off_is_told_as_far_as_it_came(serving, engine, caplog):
    async with serving(log_slow=50, request_timeout=1) as client:
        engine.gate.clear()
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 504
    [record] = slow_records(caplog)
    assert list(record.fields["parts"]) == ["prepare", "queue"], "nobody knows what it did in the engine"
    assert record.fields["parts"]["queue"] == pytest.approx(1, abs=SLACK)
    assert record.fields["status"] == 504


def test_what_is_not_over_is_part_of_what_it_does():
    """A first token, and then nothing: the rest is time of decoding. Before the first step, it is time in the queue."""
    timeline = Timeline(10.0)
    assert timeline.parts(12.0) == {"prepare": 2.0}
    timeline._sent = 13.0
    assert timeline.parts(15.0) == {"prepare": 3.0, "queue": 2.0}
    times = SequenceTimes(14.0)
    times.begin(16.0)
    times.end_step(20.0, 20.5, num_tokens=1, mask_seconds=1.0)
    timeline._times = times
    expected = {"prepare": 3.0, "handover": 1.0, "queue": 2.0, "prompt": 3.0, "decode": 9.5, "masks": 1.0, "detokenise": 0.5}
    assert timeline.parts(30.0) == expected
    timeline.complete = True
    assert timeline.parts(30.0) == expected | {"decode": 0.0, "write": 9.5}
    assert sum(timeline.parts(30.0).values()) == 20.0


async def test_the_sequence_that_ends_last_tells_the_story(loaded, caplog):
    app = create_app(AsyncEngine(loaded), Settings(log_slow=0))
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        body = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 5}
        await Connection(app, body).task
    [record] = slow_records(caplog)
    assert record.fields["steps"] == 5
    assert sum(record.fields["parts"].values()) == pytest.approx(record.fields["seconds"], abs=0.002)
    assert min(record.fields["parts"].values()) >= 0
