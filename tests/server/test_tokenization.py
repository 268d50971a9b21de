"""Prompts as token ids, and conversations through the server's chat template."""

import asyncio
import json
import threading
import time

import pytest
from fa_serve.server import tokenization
from fa_serve.server.chat import templates
from fa_serve.server.tokenization import LONG_TEXT, MAX_TEMPLATES, Tokenization

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


@pytest.mark.usefixtures("warm_trials")
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
    assert response.json()["error"]["message"] == "This model has no chat template. Give a prompt instead."


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_parsed_templates_are_bounded(serving, engine):
    async with serving(allow_request_chat_template=True) as client:
        for number in range(2 * MAX_TEMPLATES):
            body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": f"{number}"}
            assert (await client.post("/tokenize", json=body)).status_code == 200
        assert client.service.tokenization._parsed.cache_info().currsize == MAX_TEMPLATES


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize("operators", [False, True])
async def test_templates_of_requests_do_not_push_out_the_servers_own(serving, monkeypatch, tmp_path, operators):
    """With 16 of them, a client let the next ordinary request pay for the probes again."""
    count = 0
    find_forms = templates.find_forms

    def counted(*given):
        nonlocal count
        count += 1
        return find_forms(*given)

    monkeypatch.setattr(templates, "find_forms", counted)
    path = tmp_path / "template.jinja"
    path.write_text("operator: {{ messages[0].content }}")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with serving(allow_request_chat_template=True, **({"chat_template": path} if operators else {})) as client:
        assert count == 1
        for number in range(MAX_TEMPLATES + 1):
            assert (await client.post("/tokenize", json=body | {"chat_template": f"{number}"})).status_code == 200
        assert count == MAX_TEMPLATES + 2
        assert (await client.post("/tokenize", json=body)).status_code == 200
        assert count == MAX_TEMPLATES + 2


@pytest.mark.slow
async def test_the_template_of_a_request_runs_within_limits(serving, engine):
    """Before: one call that keeps the interpreter's lock stopped the server for good, and memory had no limit."""
    refused = {
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "--template-timeout",
        "{{ (9 ** (9 ** 9)) % 7 }}": "--template-timeout",
        "{{ ('a' * 9000000000)|length }}": "--template-memory",
    }
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    settings = {"allow_request_chat_template": True, "template_timeout": 1.0, "template_memory": 64 << 20}
    async with serving(**settings) as client:
        for template, flag in refused.items():
            begin = time.monotonic()
            reply = await client.post("/tokenize", json=body | {"chat_template": template})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")
            assert reply.json()["error"]["message"].startswith("chat_template must end within ")
            assert flag in reply.json()["error"]["message"]
            assert time.monotonic() - begin < 20
        reply = await client.post("/tokenize", json=body | {"chat_template": "{{ ('a' * 9000)|length }}"})
        assert engine.tokenizer.decode(reply.json()["tokens"]) == "9000"


@pytest.mark.usefixtures("warm_trials")
async def test_a_template_that_makes_too_much_text_is_cut_before_it_is_sent(serving, engine):
    """More than the tokenizer takes does not pass from the process of the template to that of the server."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ 'a' * 9000000 }}"}
    async with serving(allow_request_chat_template=True) as client:
        reply = await client.post("/tokenize", json=body)
    limit = engine.reader.max_chars
    assert limit < 10_000
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"got 'more than {limit}'" in reply.json()["error"]["message"]


@pytest.mark.usefixtures("warm_trials")
async def test_a_template_that_makes_half_of_a_surrogate_pair_is_refused(serving, engine):
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ '\\ud800' }}"}
    async with serving(allow_request_chat_template=True) as client:
        response = await client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for message in messages %}{{ message.content }}", "is not valid|Unexpected end of template"),
        ("{{ messages[0].text.upper() }}", "has no attribute"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if messages is none %}x{% endif %}", "writes nothing"),
    ],
    ids=["syntax", "a field that is not there", "refuses everything", "ignores the message"],
)
async def test_a_broken_chat_template(serving, tmp_path, text, said):
    """The application of these settings does not become ready, and its process ends."""
    (tmp_path / "template").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        async with serving(chat_template=tmp_path / "template"):
            pass
    assert str(tmp_path / "template") in str(error.value)


async def test_a_chat_template_that_does_not_end(serving, tmp_path):
    loops = "".join("{% for _ in range(100) %}" for _ in range(3)) + "{% endfor %}" * 3
    (tmp_path / "template").write_text(loops * 10)
    with pytest.raises(ValueError, match=r"must end within 0\.2 s"):
        async with serving(chat_template=tmp_path / "template", template_timeout=0.2):
            pass


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content }}", "{{ messages[0].content[0].text }}", "{{ messages[1].content }}"]
)
async def test_a_chat_template_for_one_kind_of_conversation_is_enough(serving, tmp_path, text):
    (tmp_path / "template").write_text(text)
    async with serving(chat_template=tmp_path / "template") as client:
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("kind", ["prompt", "messages"])
async def test_a_short_text_does_not_wait_for_long_ones(serving, engine, monkeypatch, kind):
    """The tokenizer needs seconds for many megabytes. All prompts of all clients waited for them."""
    monkeypatch.setattr(tokenization, "LONG_TEXT", 100)
    encode = engine.reader.encode
    gate = threading.Event()

    def slow(text, *options):
        if len(text) > 100:
            gate.wait(20)
        return encode(text, *options)

    engine.reader.encode = slow
    long, short = (
        {"prompt": text} if kind == "prompt" else {"messages": [{"role": "user", "content": text}]} for text in ("x" * 200, "x")
    )
    async with serving() as client:
        waits = asyncio.create_task(client.post("/tokenize", json=long))
        await asyncio.sleep(0.05)
        reply = await asyncio.wait_for(client.post("/tokenize", json=short), 10)
        assert not waits.done()
        gate.set()
        assert (reply.status_code, (await waits).status_code) == (200, 200)


async def test_a_list_of_tokens_that_is_too_large_is_refused(serving, engine):
    async with serving(max_answer_bytes=800) as client:
        assert (await client.post("/tokenize", json={"prompt": "x" * 100})).json()["count"] == 100
        for fields in ({"prompt": "x" * 101}, {"prompt": "x" * 51, "return_token_strs": True}):
            response = await client.post("/tokenize", json=fields)
            assert response.status_code == 400
            assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("answer_too_large", "prompt")


async def test_the_texts_of_a_request_have_a_bounded_number_of_tokens(serving, engine):
    engine.reader.max_ids = 100
    async with serving() as client:
        one, all_ = [await client.post("/v1/completions", json=TEXT | {"prompt": ["a b c " * 8] * n}) for n in (1, 12)]
    assert (one.status_code, all_.status_code, all_.json()["error"]["param"]) == (200, 400, "prompt")
    assert "at most 100 tokens in total" in all_.json()["error"]["message"]


BIG = "x" * 70_000
USER = {"role": "user", "content": "Hi"}


def called(**function: str) -> list[dict]:
    """A conversation in which the assistant has called a function."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


EVERYWHERE = {
    "content": {"messages": [{"role": "user", "content": BIG}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": BIG}]}]},
    "name": {"messages": [USER | {"name": BIG}]},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": BIG}]},
    "name of a call": {"messages": called(name=BIG)},
    "arguments of a call": {"messages": called(arguments=json.dumps({"a": BIG}))},
    "id of a call": {"messages": [*called(), {"role": "tool", "content": "", "tool_call_id": BIG}]},
    "description of a tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "description": BIG}}],
    },
    "schema of a tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {BIG: {}}}}],
    },
    "variables": {"messages": [USER], "chat_template_kwargs": {"x": [{"y": BIG}]}},
    "keys of variables": {"messages": [USER], "chat_template_kwargs": {"x": {BIG: 1}}},
    "numbers": {"messages": [USER], "chat_template_kwargs": {"x": [1] * 35_000}},
}


@pytest.mark.parametrize("place", EVERYWHERE)
async def test_every_text_that_a_template_gets_is_counted(serving, engine, monkeypatch, place):
    """Megabytes in other places than the content had the thread of short texts, and chats of others waited for it."""
    lengths = []
    thread_for = Tokenization._thread_for
    monkeypatch.setattr(Tokenization, "_thread_for", lambda self, length: lengths.append(length) or thread_for(self, length))
    engine.tokenizer.chat_template = "{{ messages[0].content }}{# message.name tool_calls tools #}{{ x }}{{ tools }}"
    async with serving() as client:
        reply = await client.post("/tokenize", json=EVERYWHERE[place])
        assert (await client.post("/tokenize", json={"messages": [USER]})).status_code == 200
    assert reply.status_code in (200, 400), reply.text
    assert lengths[0] > LONG_TEXT, (place, reply.text)
    assert lengths[-1] < 100
