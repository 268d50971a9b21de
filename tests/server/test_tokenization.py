"""Prompts as token ids, and conversations through the server's chat template."""

import pytest
from fa_serve.server.tokenization import MAX_TEMPLATES

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_a_text_that_cannot_fit_is_refused_unread(serving, engine):
    engine.tokenizer.backend_tokenizer.post_processor = (
        None  # the longest token has 13 characters, and a prompt at most 64 tokens
    )
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": "x" * (64 * 13 + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "832" in response.json()["error"]["message"]


async def test_the_chat_template_of_the_operator_or_of_the_request_is_used(serving, engine, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("operator: {{ messages[0].content }}")
    body = {"messages": [{"role": "user", "content": "Hi"}]}

    async def prompt(client, **fields):
        tokens = (await client.post("/tokenize", json=body | fields)).json()["tokens"]
        return engine.tokenizer.decode(tokens)

    async with serving(chat_template=path, allow_request_chat_template=True) as client:
        assert await prompt(client) == "operator: Hi"
        assert await prompt(client, chat_template="request: {{ messages[0].content }}") == "request: Hi"
    engine.tokenizer.chat_template = None
    async with serving() as client:
        response = await client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_parsed_templates_are_bounded(serving, engine):
    async with serving(allow_request_chat_template=True) as client:
        for number in range(2 * MAX_TEMPLATES):
            body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": f"{number}"}
            assert (await client.post("/tokenize", json=body)).status_code == 200
        assert client.service.tokenization._parsed.cache_info().currsize == MAX_TEMPLATES


async def test_a_template_that_makes_half_of_a_surrogate_pair_is_refused(serving, engine):
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ '\\ud800' }}"}
    async with serving(allow_request_chat_template=True) as client:
        response = await client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
