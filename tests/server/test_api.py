"""The routes over a fake engine: status, shape, frames, and nothing accepted that is not honoured."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fa_serve.server.schemas import ChatRequest, CompletionRequest

from fa_serve.engine import EngineDeadError, QueueFullError

pytestmark = pytest.mark.anyio
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "fake", "prompt": "Hi"}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


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


async def test_chat(serving, conforms, engine):
    async with serving() as client:
        reply = (await client.post("/v1/chat/completions", json=CHAT)).json()
    conforms("CreateChatCompletionResponse", reply)
    message = {"role": "assistant", "content": "Hello, wörld", "refusal": None}
    assert reply["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "<|user|>Hi<|assistant|>"
    assert engine.seen[0].params.max_tokens == engine.max_model_len - len(engine.seen[0].prompt)


async def test_chat_stream(serving, conforms):
    async with serving() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    chunks = frames(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk)
        assert "usage" not in chunk
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:]] == ["Hello", ",", " wörld"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert len({c["id"] for c in chunks}) == 1


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


async def test_sampling_reaches_the_engine(serving, engine):
    wanted = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "stop": "x", "stop_token_ids": [3], "ignore_eos": True}
    same = {"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 2}
    wanted |= {**same, "logit_bias": {"5": -100}, "allowed_token_ids": [5, 6], "max_tokens": 9, "priority": -3}
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, **wanted})).status_code == 200
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 4})).status_code == 200
    params = engine.seen[0].params
    assert engine.seen[0].priority == -3
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0, 0.5, 0, 7, 9)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (3,), True)
    assert {name: getattr(params, name) for name in same} == same
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -100}, (5, 6))
    assert engine.seen[1].params.max_tokens == 4


def top(token, logprob):
    """What the fake engine's token ids are as text: the byte-level alphabet in order, which begins with "!"."""
    return {"token": chr(0x21 + token), "logprob": logprob, "bytes": [0x21 + token]}


async def test_chat_logprobs(serving, conforms):
    async with serving() as client:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        chunks = frames((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        none = (await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True})).json()
        for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
            assert (await client.post("/v1/chat/completions", json={**CHAT, **wrong})).status_code == 400
    conforms("CreateChatCompletionResponse", reply)
    content = [{**top(i, -0.5), "top_logprobs": [top(i + 1, -0.25), top(i + 2, -9999.0)]} for i in range(3)]
    assert reply["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content
    assert [entry["top_logprobs"] for entry in none["choices"][0]["logprobs"]["content"]] == [[], [], []]


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
    """The prompt is three bytes, whose tokens are their letters; nothing is before the first."""
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


async def test_guided_outputs_reach_the_engine(serving, engine):
    schema = {"type": "object"}
    asked = [
        ({"guided_json": schema}, "json_schema", schema),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",)),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
    ]
    chat = [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}},
            "json_schema",
            schema,
        ),
    ]
    async with serving() as client:
        for path, body, cases in (("/v1/completions", TEXT, asked), ("/v1/chat/completions", CHAT, asked + chat)):
            for fields, name, value in cases:
                assert (await client.post(path, json={**body, **fields})).status_code == 200, fields
                assert getattr(engine.seen[-1].params.structured, name) == value
        assert (
            await client.post("/v1/chat/completions", json={**CHAT, "response_format": {"type": "text"}})
        ).status_code == 200
        assert engine.seen[-1].params.structured is None


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


async def test_models_and_operation(serving, conforms):
    async with serving(served_model_name="org/name") as client:
        listed = (await client.get("/v1/models")).json()
        conforms("ListModelsResponse", listed)
        conforms("Model", (await client.get("/v1/models/org/name")).json())
        assert (await client.get("/v1/models/other")).status_code == 404
        for path in ("/health", "/ready", "/version", "/docs"):
            assert (await client.get(path)).status_code == 200
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "422" not in json.dumps(paths)


async def test_tokenize(serving, engine):
    text = "Grüße"
    async with serving() as client:
        reply = (await client.post("/tokenize", json={"prompt": text})).json()
        assert reply == {"tokens": engine.tokenizer.encode(text), "count": 7, "max_model_len": 64}
        assert (await client.post("/detokenize", json={"tokens": reply["tokens"]})).json() == {"prompt": text}
        chat = (await client.post("/tokenize", json={"model": "fake", "messages": CHAT["messages"]})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": chat})).json() == {"prompt": "<|user|>Hi<|assistant|>"}
        await client.post("/v1/chat/completions", json=CHAT)
        assert engine.seen[0].prompt == chat
        bad = [
            await client.post("/tokenize", json={}),
            await client.post("/tokenize", json={"prompt": "", "messages": CHAT["messages"]}),
            await client.post("/tokenize", json={"messages": CHAT["messages"], "add_special_tokens": True}),
            await client.post("/detokenize", json={"tokens": [10_000]}),
            await client.post("/detokenize", json={"tokens": [2**80]}),
        ]
        assert [response.status_code for response in bad] == [400] * 5
        assert (await client.post("/tokenize", json={"prompt": "", "model": "other"})).status_code == 404


BAD = [
    pytest.param("/v1/completions", {"prompt": "Hi"}, "model", id="no model"),
    pytest.param("/v1/completions", {"model": "fake"}, "prompt", id="no prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": []}, "prompt", id="no prompts"),
    pytest.param("/v1/completions", {**TEXT, "prompt": ""}, "prompt", id="empty prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": [1, "a"]}, "prompt", id="mixed prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": [-1]}, "prompt", id="negative token"),
    pytest.param("/v1/completions", {**TEXT, "prompt": "x" * 64}, "prompt", id="long prompt"),
    pytest.param("/v1/completions", {**TEXT, "max_tokens": 63}, "prompt", id="no room for the answer"),
    pytest.param("/v1/completions", {**TEXT, "max_tokens": 0}, "max_tokens", id="no tokens"),
    pytest.param("/v1/completions", {**TEXT, "temperature": 2.5}, "temperature", id="hot"),
    pytest.param("/v1/completions", {**TEXT, "temperature": "1"}, "temperature", id="number as text"),
    pytest.param("/v1/completions", {**TEXT, "n": True}, "n", id="bool as number"),
    pytest.param("/v1/completions", {**TEXT, "n": 129}, "n", id="too many"),
    pytest.param("/v1/completions", {**TEXT, "top_p": 0}, "top_p", id="top_p"),
    pytest.param("/v1/completions", {**TEXT, "stop": [""]}, "stop", id="empty stop"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"a": 1}}, "logit_bias", id="bias of no token"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"-1": 1}}, "logit_bias", id="bias of a negative token"),
    pytest.param("/v1/completions", {**TEXT, "min_tokens": 17}, "min_tokens", id="min above max"),
    pytest.param("/v1/completions", {**TEXT, "best_of": 2, "n": 3}, "best_of", id="fewer than n"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"1_0": 1}}, "logit_bias", id="bias by a number of Python's"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"٣": 1}}, "logit_bias", id="bias by other digits"),
    pytest.param("/v1/completions", {**TEXT, "guided_json": {}, "guided_regex": "a"}, "guided_regex", id="two constraints"),
    pytest.param("/v1/completions", {**TEXT, "structured_outputs": {}}, "structured_outputs", id="no constraint"),
    pytest.param(
        "/v1/completions",
        {**TEXT, "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        id="two at once",
    ),
    pytest.param("/v1/completions", {**TEXT, "guided_choice": []}, "guided_choice", id="no choice"),
    pytest.param("/v1/completions", {**TEXT, "suffix": "x"}, "suffix", id="suffix"),
    pytest.param("/v1/completions", {**TEXT, "stream_options": {}}, "stream_options", id="stream_options without stream"),
    pytest.param("/v1/completions", {**TEXT, "nonsense": None}, "nonsense", id="unknown field"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": []}, "messages", id="no messages"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content", id="no content"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "me", "content": ""}]}, "messages[0].role", id="role"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        id="image",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 64}]}, "messages", id="long"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [*CHAT["messages"], {"role": "system", "content": "x"}]},
        "messages",
        id="the template refuses",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{**CHAT["messages"][0], "name": "A"}]}, "messages", id="name"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function", id="half a tool"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD]}, "tools", id="no format known"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD], "tool_choice": "required"}, "tools", id="tools"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD, ADD]}, "tools", id="twice the same tool"),
    pytest.param("/v1/chat/completions", {**CHAT, "tool_choice": "auto"}, "tool_choice", id="a choice of none"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "tools": [ADD], "tool_choice": {**ADD, "function": {"name": "b"}}},
        "tool_choice",
        id="no such tool",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD], "tool_choice": "any"}, "tool_choice", id="no such choice"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "tool", "content": "3", "tool_call_id": "1"}]},
        "messages",
        id="tool message",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "tool", "content": "3"}]},
        "messages[0].tool_call_id",
        id="a tool's message without an id",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{**CHAT["messages"][0], "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        id="calls of a user",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        id="arguments are no object",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "", "audio": {"id": "a"}}]},
        "messages[0].audio",
        id="audio",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        id="no schema",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
        id="a schema's name",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort", id="no use for effort"),
    pytest.param("/v1/chat/completions", {**CHAT, "chat_template": "{{ messages }}"}, "chat_template", id="own template"),
    *(
        pytest.param("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs", id=name)
        for name in ("messages", "self", "conversation", "tools", "add_generation_prompt", "tokenize", "enable_thinking")
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", id="two limits"),
    pytest.param(
        "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", id="template"
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_requests(serving, conforms, path, body, param, stream):
    async with serving() as client:
        content = json.dumps({**body, **({"stream": True} if stream and "stream_options" not in body else {})})
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        conforms("ErrorResponse", response.json())
        assert response.json()["error"]["param"] == param
        assert client.service.in_flight == 0


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "null", '{"model": NaN}', '{"model": "\\ud800"}', "[" * 50_000], ids=range(8)
)
async def test_no_json_object(serving, conforms, content):
    async with serving() as client:
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    conforms("ErrorResponse", response.json())


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("", 400),
        ("text/plain", 400),
        ("text/json", 400),
        ("application/jsonl", 400),
        ("multipart/form-data", 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_only_json_is_read(serving, path, content_type, status):
    """A page elsewhere can have a browser send other types without asking first."""
    body = TEXT if path == "/v1/completions" else {"prompt": "x"}
    async with serving() as client:
        response = await client.post(path, content=json.dumps(body), headers={"content-type": content_type})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["message"].endswith("sent with Content-Type: application/json.")


ODD = [None, True, 0, -1, 2**70, 0.5, -1e308, "", "x" * 300, "\0", [], [[]], [None], [2**70], {}, {"": 0}, {"type": "text"}]


ROUTES = [("/v1/completions", TEXT, CompletionRequest), ("/v1/chat/completions", CHAT, ChatRequest)]


@pytest.mark.parametrize(("path", "body", "kind"), ROUTES, ids=["completions", "chat"])
async def test_odd_values_of_every_field(serving, conforms, path, body, kind):
    """Whatever a field is given, it is honoured or refused in OpenAI's shape, and nothing is left behind."""
    fields = [*kind.model_fields, *kind.UNSUPPORTED]
    async with serving(max_n=4) as client:
        for field in fields:
            for odd in ODD:
                response = await client.post(path, json={**body, field: odd})
                assert response.status_code in (200, 400, 404), (field, odd, response.text)
                if response.status_code != 200:
                    conforms("ErrorResponse", response.json())
        assert client.service.in_flight == 0


async def test_defaults_that_ask_for_nothing(serving):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": None, "stop": None, "user": "me"}
    chat = {
        "logprobs": False,
        "tools": [],
        "parallel_tool_calls": True,
        "safety_identifier": "me",
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
    }
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "A"}]},
        *CHAT["messages"],
        {"role": "assistant", "content": "B", "refusal": None, "tool_calls": None},
    ]
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, **neutral, "best_of": 1})).status_code == 200
        response = await client.post("/v1/chat/completions", json={**CHAT, **neutral, **chat, "messages": history})
        assert response.status_code == 200, response.text


async def test_wrong_model_path_and_method(serving, conforms):
    async with serving() as client:
        responses = [
            (404, await client.post("/v1/completions", json={**TEXT, "model": "gpt"})),
            (404, await client.get("/nowhere")),
            (405, await client.get("/v1/completions")),
        ]
    for status, response in responses:
        assert response.status_code == status
        conforms("ErrorResponse", response.json())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_engine_error(serving, engine, conforms, stream, caplog):
    engine.error = "out of pages"
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
    last = response.text.strip().split("data: ")[-1]
    assert response.status_code == (200 if stream else 500)
    conforms("ErrorResponse", json.loads(last))
    assert "out of pages" not in last
    assert "out of pages" in caplog.text


REFUSALS = [(QueueFullError("full"), 429), (EngineDeadError("dead"), 503), (ValueError("bad"), 400)]


@pytest.mark.parametrize(("error", "status"), REFUSALS, ids=["full", "dead", "bad"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_what_the_engine_refuses(serving, engine, conforms, error, status, stream):
    async def refuse(*_, **__):
        raise error
        yield

    engine.generate = refuse
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (status != 400)
    conforms("ErrorResponse", response.json())


@pytest.mark.parametrize(("message", "param"), [("logit_bias must be below 9", "logit_bias"), ("no such token", "prompt")])
async def test_what_the_engine_refuses_is_named(serving, engine, message, param):
    async def refuse(*_, **__):
        raise ValueError(message)
        yield

    engine.generate = refuse
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    assert response.json()["error"]["param"] == param


async def test_unforeseen_failure_tells_no_internals(serving, engine, conforms, caplog):
    engine.reader = SimpleNamespace(encode=None)
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT)
    assert response.status_code == 500
    conforms("ErrorResponse", response.json())
    assert "NoneType" not in response.text
    assert response.headers["x-request-id"].startswith("req-")
    [record] = [record for record in caplog.records if record.exc_info]
    assert response.headers["x-request-id"] in record.getMessage()


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


async def test_metrics(serving, engine):
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, "n": 2})).status_code == 200
        engine.gate.clear()
        leaving = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        while len(engine.seen) < 2:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'model_name="fake"'
    expected = {
        f"fa_serve:num_requests_running{{{label}}}": 1,
        f"fa_serve:kv_cache_usage_perc{{{label}}}": 0.5,
        f"fa_serve:generation_tokens_total{{{label}}}": 8,
        f"fa_serve:time_to_first_token_seconds_count{{{label}}}": 2,
        f"fa_serve:inter_token_latency_seconds_count{{{label}}}": 4,
        f'fa_serve:request_success_total{{finished_reason="stop",{label}}}': 2,
        f'fa_serve:request_success_total{{finished_reason="abort",{label}}}': 1,
    }
    assert {name: float(values.get(name, "nan")) for name in expected} == expected
