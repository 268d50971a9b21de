"""The routes over a fake engine: the models, the tokenizer, and unknown paths."""

import json
import re
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


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


async def test_load_balancers_may_ask_with_head(serving):
    async with serving() as client:
        for path in ("/health", "/ready", "/"):
            response = await client.head(path)
            assert (response.status_code, response.content) == (200, b""), path
        client.service.draining = True
        assert (await client.head("/ready")).status_code == 503
        assert "head" not in json.dumps((await client.get("/openapi.json")).json()["paths"]["/health"])


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_load_nothing_and_can_be_framed_by_nobody(serving, path):
    async with serving() as client:
        response = await client.get(path)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", response.text)


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
            await client.post("/detokenize", json={"tokens": [5] * 65}),
        ]
        assert [response.status_code for response in bad] == [400] * 6
        assert (await client.post("/tokenize", json={"prompt": "", "model": "other"})).status_code == 404


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


@pytest.mark.parametrize("field", ["user", "model", "prompt", "cache_salt", "truncation_side", "x"])
async def test_a_long_value_is_not_repeated_by_its_error(serving, field):
    async with serving() as client:
        response = await client.post("/v1/completions", json={**TEXT, field: "long" * 100_000})
    assert response.status_code in (400, 404)
    assert len(response.content) < 1000
