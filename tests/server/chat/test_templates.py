"""Chat templates: what a template does not support is refused, and requests may bring one if the server allows it."""

import pytest

pytestmark = pytest.mark.anyio


NO_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}"
ADD = {"type": "function", "function": {"name": "add"}}
ASK = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_template_without_tools_names_them(teller, conforms):
    async with teller(("a",), NO_TOOLS) as client:
        for choice in ("required", "auto"):
            response = await client.post("/v1/chat/completions", json={**ASK, "tools": [ADD], "tool_choice": choice})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
            conforms("ErrorResponse", response.json())


async def test_a_template_of_the_request(teller, engine):
    async with teller(("a",), allow_request_chat_template=True) as client:
        own = {**ASK, "chat_template": "<{{ messages[0].content }}{{ x }}>", "chat_template_kwargs": {"x": 3}}
        assert (await client.post("/v1/chat/completions", json=own)).status_code == 200
        for bad in ("{% if %}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ x.y.z }}"):
            response = await client.post("/v1/chat/completions", json={**ASK, "chat_template": bad})
            assert response.status_code == 400, bad
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "<Hi3>"


async def test_effort_is_the_templates(teller, engine):
    async with teller(("a",), "{{ reasoning_effort }}") as client:
        assert (await client.post("/v1/chat/completions", json={**ASK, "reasoning_effort": "low"})).status_code == 200
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "low"
