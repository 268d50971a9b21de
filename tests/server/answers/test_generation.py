"""The engine's failures and refusals as HTTP errors, and the merging of sequences."""

import asyncio
import json

import pytest
from fa_serve.server.answers.generation import merge

from fa_serve import ParameterError
from fa_serve.engine import EngineDeadError, QueueFullError, RequestError, RequestOutput

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def refusing(error):
    """An engine's `generate` that refuses every request."""

    async def refuse(*_, **__):
        raise error
        yield

    return refuse


@pytest.mark.every_case
@BOTH
@pytest.mark.parametrize(
    "code", ["not_finite", "no_token_left", "grammar", "step_failed", "scheduler_failed", "timeout", "engine_dead"]
)
async def test_a_request_that_fails_shows_no_internals(serving, engine, conforms, code, stream, caplog):
    engine.words = ("Hello",)
    engine.error = RequestError(code, "out of pages")
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
        assert client.service.in_flight == 0
    assert response.status_code == 500, "no token had been sent"
    conforms("ErrorResponse", response.json())
    assert "out of pages" not in response.text
    assert "out of pages" in caplog.text
    assert code in caplog.text


async def test_an_image_that_fails_is_named(serving, engine, conforms):
    engine.error = RequestError("image_failed", "the model's towers could not encode image 2 of 3")
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    conforms("ErrorResponse", response.json())
    assert response.status_code == 500
    assert response.json()["error"]["message"].endswith("could not encode image 2 of 3.")


async def test_a_lost_replica_is_no_failure_of_the_server(serving, engine, conforms):
    engine.error = RequestError("replica_lost", "the replica has ended")
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    conforms("ErrorResponse", response.json())
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == "The request was cut off: its replica has stopped."


@BOTH
@pytest.mark.parametrize(
    ("draining", "reason"), [(False, "the operator has paused the server"), (True, "the server is shutting down")]
)
async def test_an_aborted_request_says_who_has_ended_it(serving, engine, conforms, stream, draining, reason):
    """/pause ends requests in flight, and goes on to serve; so does the end of the time that a shutdown leaves."""

    async def generate(prompt, params, request_id, **_):
        client.service.draining = draining
        yield RequestOutput(request_id, [], finished=True, finish_reason="abort")

    engine.generate = generate
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
        client.service.draining = False
    conforms("ErrorResponse", response.json())
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == f"The request was aborted: {reason}."


async def test_a_stream_that_fails_later_ends_with_an_error_event(serving, engine, conforms):
    engine.error = RequestError("step_failed", "out of pages")
    engine.words = ("Hello", " world")
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": True})
    *events, last = response.text.strip().split("data: ")[1:]
    assert (response.status_code, len(events)) == (200, 1)
    conforms("ErrorResponse", json.loads(last))


async def test_a_grammar_that_takes_too_much_is_the_clients_error(serving, engine):
    engine.error = RequestError("grammar", "lexer error: too many states: 50000")
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "guided_regex": "a+"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "guided_regex", "grammar_too_complex")
    assert "lexer" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"guided_regex": "a+", "allowed_token_ids": [5]}, 400, "guided_regex"),
        ({"guided_regex": "a+", "logit_bias": {"5": 100}}, 400, "guided_regex"),
        ({"guided_regex": "a+"}, 500, None),
        ({"allowed_token_ids": [5]}, 500, None),
    ],
    ids=["allowed", "bias", "constraint alone", "allowed alone"],
)
async def test_fields_that_leave_no_token_together_are_the_clients_error(serving, engine, fields, status, param):
    engine.error = RequestError("no_token_left", "any words")
    engine.words = ("Hello",)
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.every_case
@BOTH
@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFullError("full"), 429), (EngineDeadError("dead"), 503), (ParameterError("seed", "be even", 3), 400)],
    ids=["full", "dead", "parameter"],
)
async def test_what_the_engine_refuses(serving, engine, conforms, error, status, stream):
    engine.generate = refusing(error)
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (status != 400)
    conforms("ErrorResponse", response.json())


@pytest.mark.parametrize(
    ("error", "fields", "param", "code"),
    [
        (ParameterError("logit_bias", "be small", 9), {}, "logit_bias", "invalid_value"),
        (ParameterError("prompt", "be short", 9, "context_length_exceeded"), {}, "prompt", "context_length_exceeded"),
        (ParameterError("request_id", "be unique", "a", "duplicate_request_id"), {}, "prompt", "invalid_value"),
        (ParameterError("stop", "be empty", "a", "no_tokenizer"), {}, "stop", "unsupported_parameter"),
        (ParameterError("regex", "be simple", "("), {"guided_regex": "("}, "guided_regex", "invalid_value"),
        (
            ParameterError("structured", "be None", "a", "unsupported"),
            {"guided_json": {}},
            "guided_json",
            "unsupported_parameter",
        ),
    ],
)
async def test_the_field_that_the_engine_refuses_is_named(serving, engine, error, fields, param, code):
    engine.generate = refusing(error)
    async with serving() as client:
        body = (await client.post("/v1/completions", json={**TEXT, **fields})).json()
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)


async def test_a_value_error_that_is_no_parameter_error_is_a_bug(serving, engine):
    engine.generate = refusing(ValueError("logit_bias is broken"))
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    assert response.status_code == 500
    assert "logit_bias" not in response.text


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
