"""Answers that are the same for all are made once, and those that are not the usual ones are FastAPI's."""

import asyncio

import pytest
from fa_serve.server.kept_answers import KeptAnswers
from fa_serve.server.observe.metrics import ScrapedText

from fa_serve.engine.process.parent import Pulse

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/version", "/health", "/ready"])
async def test_the_second_answer_is_the_first_one(serving, path):
    async with serving() as client:
        first, second = [await client.get(path) for _ in range(2)]
        head = await client.head(path)
        counted = (await client.get("/metrics")).text
    assert first.status_code == second.status_code == 200
    assert second.content == first.content
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    names = ("content-type", "content-length", "content-security-policy")
    assert [second.headers.get(name) for name in names] == [first.headers.get(name) for name in names]
    assert len(second.headers) == len(first.headers), "headers of one request are not kept for another"
    assert head.status_code == (405 if path in ("/docs", "/version") else 200)
    label = "other" if path == "/openapi.json" else path
    assert f'fa_serve:http_responses_total{{path="{label}",status="200"}}' in counted


async def test_fastapi_makes_an_answer_once(serving, monkeypatch):
    made = []
    make = KeptAnswers._make

    async def counted(self, name, *given):
        made.append(name)
        return await make(self, name, *given)

    monkeypatch.setattr(KeptAnswers, "_make", counted)
    async with serving() as client:
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
    assert made == [("GET", "/health"), ("GET", "/openapi.json")], "who asks meanwhile waits for the first answer"


async def test_answers_follow_the_health_of_the_engine(serving, engine):
    async with serving() as client:
        for beats, expected in ((Pulse(), 200), (Pulse(silent_seconds=60), 503), (Pulse(), 200)):
            engine.beats = beats
            for path in ("/health", "/ready"):
                for _ in range(2):
                    assert (await client.get(path)).status_code == expected, (path, beats)
        client.service.draining = True
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_a_post_is_not_answered_with_what_was_kept(serving):
    async with serving() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/health")).status_code == 405


async def test_scrapes_that_come_together_get_one_text_that_is_newer_than_all_of_them():
    made = []

    def make() -> bytes:
        made.append(len(made))
        return b"%d" % made[-1]

    scraped = ScrapedText(make)
    together = await asyncio.gather(*[scraped.text() for _ in range(20)])
    assert set(together) == {b"0"}
    assert await scraped.text() == b"1"


async def test_a_scrape_that_is_cancelled_does_not_take_the_text_from_others():
    scraped = ScrapedText(lambda: b"text")
    first, second = (asyncio.create_task(scraped.text()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == b"text"
