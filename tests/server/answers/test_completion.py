"""Completions over a fake engine: plain and streamed, several prompts, echo, log-probabilities, best_of."""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


def frames(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_completion(serving, conforms):
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    reply = response.json()
    assert response.status_code == 200
    conforms("CreateCompletionResponse", reply)
    assert reply["choices"] == [{"index": 0, "text": "Hello, wörld", "finish_reason": "stop", "logprobs": None}]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_completion_stream_with_usage(serving):
    async with serving() as client:
        body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
        chunks = frames((await client.post("/v1/completions", json=body)).text)
    assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["Hello", ","]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_batch_times_n(serving, engine, stream):
    async with serving() as client:
        body = {"model": "fake", "prompt": [[1, 2], [3]], "n": 2, "seed": 5, "stream": stream}
        response = await client.post("/v1/completions", json=body)
    replies = frames(response.text) if stream else [response.json()]
    texts: dict[int, str] = {}
    for choice in (choice for reply in replies for choice in reply["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello, wörld")
    assert [(seen.prompt, seen.params.n, seen.params.seed) for seen in engine.seen] == [([1, 2], 2, 5), ([3], 2, 5)]
    if not stream:
        assert replies[0]["usage"]["prompt_tokens"] == 3
        assert replies[0]["usage"]["completion_tokens"] == 12


async def test_completion_logprobs(serving, conforms):
    async with serving() as client:
        reply = (await client.post("/v1/completions", json={**TEXT, "logprobs": 1})).json()
        chunks = frames((await client.post("/v1/completions", json={**TEXT, "logprobs": 1, "stream": True})).text)
    conforms("CreateCompletionResponse", reply)
    expected = {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5] * 3,
        "tokens": ["!", '"', "#"],
        "top_logprobs": [{'"': -0.25, "!": -0.5}, {"#": -0.25, '"': -0.5}, {"$": -0.25, "#": -0.5}],
    }
    assert reply["choices"][0]["logprobs"] == expected
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [value for part in parts for value in part[name]] for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_logprobs_of_an_echo(serving, engine, stream):
    """The prompt has three tokens of one byte each. The first has no log-probability, because no token comes before it."""
    body = {"model": "fake", "prompt": "abc", "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    async with serving() as client:
        response = await client.post("/v1/completions", json=body)
    choices = [choice for reply in (frames(response.text) if stream else [response.json()]) for choice in reply["choices"]]
    assert engine.seen[0].params.prompt_logprobs == 1
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "abcHello, wörld"
        scores = {name: [x for choice in mine for x in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
        assert scores["tokens"] == ["a", "b", "c", "!", '"', "#"]
        assert scores["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert scores["token_logprobs"] == [None, *[-0.5] * 5]
        assert scores["top_logprobs"][:3] == [None, {"c": -0.25, "b": -0.5}, {"d": -0.25, "c": -0.5}]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_prompt_is_scored_without_an_answer(serving, engine, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"model": "fake", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    async with serving() as client:
        response = await client.post("/v1/completions", json=body | {"n": 2, "stream": stream} | options)
    assert response.status_code == 200, response.text
    replies = frames(response.text) if stream else [response.json()]
    choices = [choice for reply in replies for choice in reply["choices"]]
    assert engine.seen[0].params.max_tokens == 1
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "abc"
        assert mine[-1]["finish_reason"] == "length"
        assert [token for choice in mine for token in choice["token_ids"]] == []
        [scores] = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        assert scores["tokens"] == ["a", "b", "c"]
        assert scores["token_logprobs"] == [None, -0.5, -0.5]
    usage = replies[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


async def test_no_tokens_are_for_prompts_that_come_back(serving):
    async with serving() as client:
        for fields, param in (({}, "max_tokens"), ({"echo": True, "min_tokens": 1}, "min_tokens")):
            refused = await client.post("/v1/completions", json={**TEXT, "max_tokens": 0} | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        chat = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 0})
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompt_logprobs(serving, engine):
    a, b, c = (engine.tokenizer.encode(letter)[0] for letter in "abc")
    likeliest = {"logprob": -0.25, "rank": 1}
    expected = [
        None,
        {str(b): {"logprob": -0.5, "rank": None, "decoded_token": "b"}, str(b + 1): {**likeliest, "decoded_token": "c"}},
        {str(c): {"logprob": -0.5, "rank": None, "decoded_token": "c"}, str(c + 1): {**likeliest, "decoded_token": "d"}},
    ]
    async with serving() as client:
        reply = (await client.post("/v1/completions", json={**TEXT, "prompt": [a, b, c], "prompt_logprobs": 1, "n": 2})).json()
        chat = (await client.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0, "n": 2})).json()
        refused = await client.post("/v1/completions", json={**TEXT, "prompt_logprobs": 1, "stream": True})
    assert [choice["prompt_logprobs"] for choice in reply["choices"]] == [expected] * 2
    assert [score and len(score) for score in chat["prompt_logprobs"]] == [None, 1, 1, 1]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_best_of(serving, engine):
    async with serving(max_n=4) as client:
        assert (await client.post("/v1/completions", json={**TEXT, "best_of": 3, "n": 2})).status_code == 200
        for wrong in ({"best_of": 5}, {"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}):
            response = await client.post("/v1/completions", json={**TEXT, **wrong})
            assert response.status_code == 400, wrong
        assert response.json()["error"]["param"] == "best_of"
    assert (engine.seen[0].params.best_of, engine.seen[0].params.n) == (3, 2)


async def test_echo_and_token_ids(serving):
    body = {**TEXT, "echo": True, "return_token_ids": True}
    async with serving() as client:
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        chunks = frames((await client.post("/v1/completions", json={**body, "stream": True})).text)
        [ids] = (await client.post("/v1/completions", json={**body, "prompt": [1, 2]})).json()["choices"]
    assert choice["text"] == "HiHello, wörld"
    assert choice["token_ids"] == [0, 1, 2]
    assert len(choice["prompt_token_ids"]) == 2
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert ids["prompt_token_ids"] == [1, 2]


async def test_an_echo_counts_the_characters_of_its_prompt(serving, engine):
    """A token may stand for a hundred characters, so that n = 128 gave answers of many times the limit."""
    engine.tokenizer.add_tokens(["-" * 100])
    body = {"model": "fake", "prompt": "-" * 800, "echo": True, "max_tokens": 1}
    async with serving(max_answer_bytes=8000) as client:
        assert (await client.post("/v1/completions", json=body | {"n": 9})).status_code == 200
        response = await client.post("/v1/completions", json=body | {"n": 10})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "answer_too_large")
