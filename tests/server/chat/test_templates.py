"""Chat templates: what a template does not support is refused, and requests may bring one if the server allows it."""

import json
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from fa_serve.server.chat.templates import Template

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


@pytest.mark.usefixtures("warm_trials")
async def test_a_template_of_the_request(teller, engine):
    async with teller(("a",), allow_request_chat_template=True) as client:
        own = {**ASK, "chat_template": "<{{ messages[0].content }}{{ x }}>", "chat_template_kwargs": {"x": 3}}
        assert (await client.post("/v1/chat/completions", json=own)).status_code == 200
        for bad in ("{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ x.y.z }}"):
            response = await client.post("/v1/chat/completions", json={**ASK, "chat_template": bad})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages"), bad
        for invalid in ("{% if %}", "{% for message in messages %}", "{{ messages | nothing }}", "{{ 'a"):
            response = await client.post("/v1/chat/completions", json={**ASK, "chat_template": invalid})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template"), invalid
            assert response.json()["error"]["message"].startswith("The chat template is not valid: ")
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "<Hi3>"


ENDS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon "}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("place", ["model", "request"])
@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, CONTINUED], ids=["answer", "closed", "continued"])
async def test_where_a_prompt_ends(teller, engine, fields, place):
    """As transformers has it, by both routes, and where the template comes with the request and runs in another process."""
    given = {"chat_template": ENDS} if place == "request" else {}
    parts = [{**BEGUN[1], "content": [{"type": "text", "text": "Once upon "}]}]
    async with teller(("a",), ENDS, allow_request_chat_template=True) as client:
        for messages in (BEGUN, [BEGUN[0], *parts]):
            body = {"model": "fake", "messages": messages, **fields, **given}
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            asked = {"add_generation_prompt": True} | fields
            expected = engine.tokenizer.apply_chat_template(BEGUN, chat_template=ENDS, tokenize=False, **asked)
            assert engine.tokenizer.decode(tokens) == engine.tokenizer.decode(engine.seen[-1].prompt) == expected
    assert expected.endswith("<assistant>Once upon") == (fields == CONTINUED)


MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else m.content ~ '</s>' }}{% endfor %}"
)
LOOP = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "refuses"),
    [
        (ENDS, False),
        (LOOP, False),
        (LOOP.replace("</s>", ""), False),
        (LOOP + "<assistant>", True),
        (LOOP + "{% if true %}\n<assistant>{% endif %}", True),
        (MISTRAL, False),
    ],
    ids=["reads it", "never begins", "without end", "always begins", "begins in a line", "mistral"],
)
async def test_a_start_of_the_answer_that_cannot_be_left_out_is_refused(teller, template, refuses):
    """Nothing would show the client that the prompt has what it did not ask for. Continuing a message leaves it out."""
    async with teller(("a",), template) as client:
        for route in ("/tokenize", "/v1/chat/completions"):
            reply = await client.post(route, json={"model": "fake", "messages": BEGUN, "add_generation_prompt": False})
            assert reply.status_code == (400 if refuses else 200), reply.text
            if refuses:
                error = reply.json()["error"]
                assert (error["param"], error["code"]) == ("add_generation_prompt", "unsupported_parameter")
                assert "begins the assistant's turn whatever the value is" in error["message"]
            for fields in ({}, {"add_generation_prompt": True}, CONTINUED):
                body = {"model": "fake", "messages": BEGUN} | fields
                assert (await client.post(route, json=body)).status_code == 200


CALLED = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"continue_final_message": True}, "is only allowed when add_generation_prompt is false"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "is only allowed when add_generation_prompt is false",
        ),
        (CONTINUED | {"messages": [{"role": "assistant", "content": "a", "tool_calls": [CALLED]}]}, "ends with text"),
        (CONTINUED | {"messages": [{"role": "assistant", "tool_calls": [CALLED]}]}, "ends with text"),
        (CONTINUED | {"prompt": "a", "messages": None}, "is only allowed with messages"),
    ],
)
async def test_a_message_that_cannot_go_on_is_refused(teller, fields, word):
    async with teller(("a",), ENDS) as client:
        for route in ("/tokenize", "/v1/chat/completions"):
            body = {"model": "fake", "messages": BEGUN} | fields
            if "prompt" in fields and route != "/tokenize":
                continue
            error = (await client.post(route, json=body)).json()["error"]
            assert error["param"] in ("continue_final_message", "add_generation_prompt"), error
            assert word in error["message"]


async def test_a_template_that_leaves_the_last_message_out_continues_none(teller):
    async with teller(("a",), "{{ messages[0].content }}") as client:
        refused = await client.post("/v1/chat/completions", json={"model": "fake", "messages": BEGUN} | CONTINUED)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "the final message does not appear" in refused.json()["error"]["message"]


async def test_effort_is_the_templates(teller, engine):
    async with teller(("a",), "{{ reasoning_effort }}{{ messages[0].content }}") as client:
        assert (await client.post("/v1/chat/completions", json={**ASK, "reasoning_effort": "low"})).status_code == 200
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "lowHi"


WRITES_ROLES = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "status"),
    [
        (WRITES_ROLES, 200),
        (WRITES_ROLES.replace("in messages", "in messages | reverse"), 200),
        (WRITES_ROLES.replace("in messages", "in messages[:-1]"), 400),
    ],
    ids=["in order", "in another order", "leaves one out"],
)
async def test_messages_of_unusual_roles_are_in_the_prompt(teller, template, status):
    messages = [{"role": f"critic{i}", "content": f" {i} of them "} for i in range(3)]
    async with teller(("a",), template) as client:
        reply = await client.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert reply.status_code == status
    if status == 400:
        assert "leaves out messages of the role 'critic2'" in reply.json()["error"]["message"]


def test_many_messages_of_unusual_roles_are_found_in_linear_time():
    """5,000 messages behind 16 MB took a minute of searches that keep the interpreter's lock, and take 0.1 s."""
    tokenizer = type("Tokenizer", (), {"apply_chat_template": staticmethod(lambda messages, *_, **__: text)})
    messages = [{"role": "user", "content": "x" * 16_000_000}]
    messages += [{"role": "critic", "content": f"the {i}th"} for i in range(5000)]
    text = "".join(message["content"] for message in messages)
    begin = time.thread_time()
    reader = SimpleNamespace(max_chars=1 << 30)
    assert Template(tokenizer(), "", reader).render(messages, None, {}) == text
    assert time.thread_time() - begin < 1


READS_CALLS = "{# reads tool_calls #}"
# each writes a text that a request gives once for each message
REPEATING = {
    "output": "{% for message in messages %}{{ message.content }}{{ x }}{% endfor %}",
    "macro": "{% macro all() %}{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}{% endmacro %}{{ all()|length }}",
    "block": "{% set all %}{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}{% endset %}{{ all|length }}",
    "tools": "{% for m in messages %}{{ m.content }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endfor %}{{ x }}",
    "reasoning": "{% for m in messages %}{{ m.content }}{{ messages[0].reasoning_content }}{% endfor %}{{ x }}{{ tools }}",
    "calls": "{% for m in messages %}{{ m.content }}{{ messages[0].tool_calls }}{% endfor %}{{ x }}{{ tools }}",
}


async def assert_rendering_stops(client, engine, kind, **template) -> None:
    """362 kB became a prompt of 980 MB, which was refused when it was complete."""
    text = "x" * 100_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    first = {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]}
    messages = [first] + [{"role": "user", "content": ""}] * 900
    body = {"model": "fake", "messages": messages, "chat_template_kwargs": {"x": text}, **template}
    if kind in ("tools", "reasoning", "calls"):
        body["tools"] = [{"type": "function", "function": {"name": "add", "description": text}}]
    await client.post("/v1/chat/completions", json=body)  # starts threads and processes
    tracemalloc.start()
    reply = await client.post("/v1/chat/completions", json=body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages"), kind
    assert f"more than {engine.reader.max_chars}" in error["message"]
    assert peak < 8 * 2**20, f"{kind}: {peak >> 20} MB"


@pytest.mark.parametrize("kind", REPEATING)
async def test_rendering_stops_when_the_output_is_longer_than_a_prompt_can_be(teller, engine, kind):
    async with teller(("a",), REPEATING[kind] + READS_CALLS, tool_call_parser="hermes") as client:
        await assert_rendering_stops(client, engine, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_rendering_a_template_of_the_request_stops_there_too(teller, engine):
    async with teller(("a",), READS_CALLS, allow_request_chat_template=True, tool_call_parser="hermes") as client:
        for kind, template in REPEATING.items():
            await assert_rendering_stops(client, engine, kind, chat_template=template + READS_CALLS)


@pytest.mark.every_case
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["eos_token", "bos_token", "pad_token", "messages", "tools", "add_generation_prompt"])
async def test_a_request_cannot_set_what_the_template_takes_from_the_tokenizer(teller, route, name):
    template = "{{ messages[0].content }}{{ eos_token }}{{ bos_token }}{{ pad_token }}{{ tools }}{{ add_generation_prompt }}"
    async with teller(("a",), template) as client:
        reply = await client.post(route, json={**ASK, "chat_template_kwargs": {name: "x"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert name in reply.json()["error"]["message"]
