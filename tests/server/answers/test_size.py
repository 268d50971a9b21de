"""The estimate of an answer's size holds for real answers, and large answers are written as to_json writes them."""

import json

import pytest
from fa_serve.server.answers.size import SLICE, AnswerSize, json_slices
from pydantic_core import to_json

pytestmark = pytest.mark.anyio

LONG = list(range(3 * SLICE + 1))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        "é",
        {"a": 1, "b": {"c": [], "d": {}}},
        LONG,
        [LONG, [], {"a": LONG}],
        {"choices": [{"index": i, "logprobs": {"tokens": ["\n"] * 100}} for i in range(2 * SLICE)]},
        [{"1": {"logprob": -0.5}}] * 100,
        [1, {"a": [LONG]}, "x"],
    ],
    ids=repr,
)
def test_slices_are_the_same_json(value):
    assert b"".join(json_slices(value)) == to_json(value)


def test_no_slice_is_large():
    choices = [{"logprobs": {"tokens": ["token"] * 1000}, "prompt_logprobs": [{"1": {"rank": 1}}] * 1000} for _ in range(100)]
    assert max(map(len, json_slices({"choices": choices}))) < 2000


TEXT = {"model": "fake", "prompt": "One two three"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "One two three"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "prompt_logprobs": 20, "n": 4}),
        ("/v1/completions", {**TEXT, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 3}),
        ("/v1/completions", {**TEXT, "logprobs": 5, "return_token_ids": True, "max_tokens": 3}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 3}),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 20, "n": 4, "max_tokens": 3}),
    ],
    ids=["prompt_logprobs", "echo", "ids", "chat", "chat prompt"],
)
async def test_the_estimate_is_the_size_of_the_answer(serving, path, body):
    async with serving() as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        size = len(answer.content)
        limit(client.service, max_answer_bytes=size // 4)
        refused = await client.post(path, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "answer_too_large")
        assert "--max-answer-bytes" in error["message"]
        assert error["param"] in body
        limit(client.service, max_answer_bytes=6 * size)
        assert (await client.post(path, json=body)).status_code == 200


def limit(service, **settings):
    service.settings = service.settings.model_copy(update=settings)


async def test_a_length_that_is_not_given_keeps_below_the_limit(serving, engine):
    async with serving(max_answer_bytes=20_000) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 20})
    assert answer.status_code == 200
    assert engine.seen[-1].params.max_tokens == 20_000 // (8 + 90 * 21)


async def test_a_stream_is_bounded_by_what_it_sends_at_once(serving):
    body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 20}
    async with serving(max_answer_bytes=20_000) as client:
        assert (await client.post("/v1/chat/completions", json={**body, "stream": False})).status_code == 400
        assert (await client.post("/v1/chat/completions", json=body)).text.endswith("data: [DONE]\n\n")


async def test_a_large_answer_is_the_same_as_a_small_one(serving, monkeypatch):
    body = {**TEXT, "echo": True, "logprobs": 20, "n": 4, "seed": 1}
    async with serving() as client:
        plain = (await client.post("/v1/completions", json=body)).json()
        stream = (await client.post("/v1/completions", json={**body, "stream": True})).text
        monkeypatch.setattr("fa_serve.server.answers.answer.SMALL", 0)
        aside = (await client.post("/v1/completions", json=body)).json()
        stream_aside = (await client.post("/v1/completions", json={**body, "stream": True})).text
    assert aside["choices"] == plain["choices"]
    assert choices_of(stream_aside) == choices_of(stream)


def choices_of(stream):
    return sorted(json.dumps(json.loads(line[6:])["choices"]) for line in stream.split("\n\n")[:-2])


async def test_large_answers_in_flight_are_bounded_together(serving, engine):
    async with serving(max_answer_bytes_in_flight=3_000_000) as client:
        service = client.service
        with service.reserve_bytes(2_000_000):
            with pytest.raises(Exception, match="--max-answer-bytes-in-flight"), service.reserve_bytes(2_000_000):
                pass
            with service.reserve_bytes(1_000):
                pass
        with service.reserve_bytes(2_000_000):
            pass


def test_the_arithmetic():
    size = AnswerSize(per_prompt_token=10, once=3, per_token=2)
    assert size.of_prompts(100, 4) == 100 * (3 + 40)
    assert size.of_sequences(5) == 5 * 10
