"""What an error says to a client: the cause, the rule and the remedy, and the name of a field that the request has."""

import gzip
import json
import logging
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": USER}
RESPONSE: dict[str, Any] = {"model": "fake", "input": "Hi"}
MESSAGE: dict[str, Any] = {"model": "fake", "messages": USER, "max_tokens": 5}
PROMPT: dict[str, Any] = {"model": "fake", "prompt": "Hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSE, "/v1/messages": MESSAGE, "/v1/completions": PROMPT}
CHAT_PARTS = "'text' or 'image_url'"
ITEM_PARTS = "'input_text' or 'output_text' or 'input_image'"
NO_OTHERS = "this server takes only text and images; leave out audio, video and files, which it does not support yet."


async def refusal(client, path: str, **request: Any) -> tuple[int, str, str | None, str | None]:
    """The status, the message, the param and the code of a refusal; Anthropic's errors have the first two alone."""
    response = await client.post(path, **request)
    error = response.json()["error"]
    return response.status_code, error["message"], error.get("param"), error.get("code")


@pytest.mark.parametrize(
    ("path", "part", "types", "where"),
    [
        ("/v1/chat/completions", {"type": "input_audio", "input_audio": {}}, CHAT_PARTS, "messages[0].content[0]"),
        ("/v1/chat/completions", {"type": "video_url", "video_url": {}}, CHAT_PARTS, "messages[0].content[0]"),
        ("/v1/chat/completions", {"type": "file", "file": {}}, CHAT_PARTS, "messages[0].content[0]"),
        ("/v1/chat/completions", {"type": "input_text", "text": "Hi"}, CHAT_PARTS, "messages[0].content[0]"),
        ("/tokenize", {"type": "input_audio", "input_audio": {}}, CHAT_PARTS, "messages[0].content[0]"),
        ("/v1/responses", {"type": "input_file"}, ITEM_PARTS, "input[0].content[0]"),
    ],
)
async def test_a_part_that_is_neither_text_nor_image_says_so(serving, path, part, types, where):
    body: dict[str, Any] = {**BODIES.get(path, {"model": "fake"})}
    turn: dict[str, Any] = {"role": "user", "content": [part]}
    body["input" if path == "/v1/responses" else "messages"] = [turn]
    async with serving() as client:
        status, message, param, _ = await refusal(client, path, json=body)
    assert (status, message) == (400, f"{where}.type must be {types}, got {part['type']!r}: {NO_OTHERS}")
    assert param in (f"{where}.type", None)


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "'fake'"), (2, "'fake', 'a0', 'a1'"), (9, "'fake', 'a0', 'a1', 'a2', 'a3', 'a4', 'a5', 'a6' and 2 more")],
)
async def test_an_unknown_model_names_those_that_are_served(serving, engine, count, said):
    """The adapters were left out, of which one is meant."""
    engine.adapters = tuple(f"a{number}" for number in range(count))
    async with serving() as client:
        status, message, param, code = await refusal(client, "/v1/completions", json=PROMPT | {"model": "other"})
    assert (status, param, code) == (404, "model", "model_not_found")
    assert message == f"The model 'other' does not exist. This server serves {said}."


IMAGE_SOURCE = {"type": "url", "url": "https://example.org/a.png"}


async def test_an_image_where_texts_alone_may_be_says_where_images_may_be(serving):
    """Before: "type must be 'text', got 'image': this server takes texts and images, so leave out audio, video and files"."""
    body = MESSAGE | {"system": [{"type": "image", "source": IMAGE_SOURCE}]}
    async with serving() as client:
        status, message, _, _ = await refusal(client, "/v1/messages", json=body)
        assert (status, message) == (
            400,
            "system[0].type must be 'text', got 'image': this field takes only text; images may be in user messages and tool "
            "results.",
        )
        for role, rule in (("system", "roles user and tool"), ("assistant", "roles user and tool")):
            parts = [{"type": "image_url", "image_url": {"url": "https://example.org"}}]
            body = CHAT | {"messages": [{"role": role, "content": parts}]}
            status, message, param, _ = await refusal(client, "/v1/chat/completions", json=body)
            assert (status, param) == (400, "messages[0].content")
            assert message == f"messages[0].content may have images only in messages of the {rule}, got the role {role!r}."
            item = {"role": role, "content": [{"type": "input_image", "image_url": "https://example.org"}]}
            status, message, param, _ = await refusal(client, "/v1/responses", json=RESPONSE | {"input": [item]})
            assert (status, param) == (400, "input[0].content")
            assert message == f"input[0].content may have images only in user messages, got the role {role!r}."


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
async def test_a_content_without_parts_is_refused(serving, role):
    """As OpenAI and Anthropic refuse it. Before, it was an empty text."""
    turn = {"role": role, "content": []}
    async with serving() as client:
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")):
            status, message, param, _ = await refusal(client, path, json=BODIES[path] | {field: [turn]})
            assert (status, param) in ((400, f"{field}[0].content"), (400, None)), path
            assert message.startswith(f"{field}[0].content must have at least 1 item"), message


async def test_a_block_in_a_result_of_a_tool_of_another_kind(serving):
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "document"}]}
    async with serving() as client:
        body = MESSAGE | {"messages": [{"role": "user", "content": [result]}]}
        status, message, _, _ = await refusal(client, "/v1/messages", json=body)
    assert (status, message) == (
        400,
        "messages[0].content[0].content[0].type must be text or image, because this server supports no other blocks in a "
        "tool_result, got 'document': leave it out.",
    )


async def test_a_block_of_another_kind_says_what_was_sent(serving):
    block = {"type": "document", "source": {"type": "url", "url": "https://example.org"}}
    item = {"type": "web_search_call", "id": "x"}
    async with serving() as client:
        _, message, *_ = await refusal(
            client, "/v1/messages", json=MESSAGE | {"messages": [{"role": "user", "content": [block]}]}
        )
        assert message.endswith("because this server supports no other blocks, got 'document': leave it out.")
        _, message, *_ = await refusal(client, "/v1/responses", json=RESPONSE | {"input": [item]})
        assert message.endswith("because this server supports no other items, got 'web_search_call': leave it out.")


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        ("/v1/chat/completions", "max_token", "max_tokens"),
        ("/v1/chat/completions", "maxTokens", "max_tokens"),
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/responses", "max_token", "max_output_tokens"),  # other APIs' names, which are not alike
        ("/v1/responses", "max_completion_tokens", "max_output_tokens"),
        ("/v1/responses", "response_format", "text"),
        ("/v1/responses", "messages", "input"),
        ("/v1/chat/completions", "max_new_tokens", "max_tokens"),
        ("/v1/chat/completions", "prompt", "messages"),  # and not prompt_logprobs
        ("/v1/chat/completions", "stop_sequences", "stop"),
        ("/v1/completions", "input", "prompt"),
        ("/v1/completions", "guided_decoding", "structured_outputs"),
        ("/v1/messages", "instructions", "system"),
        ("/v1/chat/completions", "xyzzy", None),
        ("/v1/chat/completions", "verbosty", None),  # verbosity is known and not supported
    ],
)
async def test_an_unknown_field_has_a_hint(serving, path, field, meant):
    async with serving() as client:
        status, message, param, code = await refusal(client, path, json=BODIES[path] | {field: 5})
    remedy = f"Did you mean {meant}?" if meant else "Leave it out."
    assert (status, message) == (400, f"Unknown or unsupported field: {field}. {remedy}")
    assert (param, code) in ((field, "unknown_parameter"), (None, None))


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": 99999 * "x"}]}, "messages: prompt must be"),
        ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": 99999 * "x"}]}, "messages: prompt must be"),
        ("/v1/responses", RESPONSE | {"input": 99999 * "x"}, "input: prompt must be"),
    ],
)
async def test_messages_name_the_fields_of_their_api(serving, path, body, begin):
    """What the dialects send on as a chat completion is refused in the words of the request."""
    async with serving() as client:
        status, message, param, _ = await refusal(client, path, json=body)
    assert (status, message[: len(begin)]) == (400, begin)
    assert param in (begin.split()[0].rstrip(":"), None)  # Anthropic's errors have no param


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/chat/completions", "Did you mean /v1/chat/completions?"),  # a base_url without /v1
        ("POST", "/v1/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/chat/completions", "Did you mean /v1/chat/completions?"),
        ("GET", "/v1/chat/completions", "This path takes POST."),
        ("POST", "/v1/models", "This path takes GET."),
        ("POST", "/v1/models/name", "This path takes GET."),
        ("POST", "/health", "This path takes GET, HEAD."),  # two routes, one for each method
        ("GET", "/v1", ""),
        ("GET", "/nothing", ""),
        ("GET", "/" + 4000 * "x", ""),
    ],
)
async def test_an_unknown_route_has_a_hint(serving, method, path, hint):
    async with serving() as client:
        reply = await client.request(method, path)
    assert reply.status_code == (405 if "takes" in hint else 404)
    assert reply.json()["error"]["message"] == f"There is no route {method} {path}. {hint}".strip()
    assert reply.headers.get("allow") == (hint.removeprefix("This path takes ").rstrip(".") if "takes" in hint else None)


async def test_a_hint_inside_of_a_message(serving):
    body = CHAT | {"messages": [{"role": "user", "contents": "Hi"}]}
    async with serving() as client:
        _, message, param, _ = await refusal(client, "/v1/chat/completions", json=body)
    assert (message, param) == (
        "Unknown or unsupported field: messages[0].contents. Did you mean content?",
        "messages[0].contents",
    )


@pytest.mark.parametrize(
    ("path", "field", "value", "rule"),
    [
        ("/v1/chat/completions", "messages", [], "must have at least 1 item, got []"),
        ("/v1/messages", "messages", [], "must have at least 1 item, got []"),
        ("/v1/responses", "input", [], "must have at least 1 item, got []"),
        ("/v1/responses", "input", 5, "must be a string or a list, got 5"),
        ("/v1/completions", "guided_choice", [], "must have at least 1 item, got []"),
        ("/v1/chat/completions", "temperature", 3, "must be at most 2, got 3"),
        ("/v1/chat/completions", "max_tokens", "5", "must be an integer, got '5'"),
        ("/v1/chat/completions", "stream", "yes", "must be true or false, got 'yes'"),
    ],
)
async def test_rules_are_positive_and_in_our_words(serving, path, field, value, rule):
    async with serving() as client:
        status, message, param, _ = await refusal(client, path, json=BODIES[path] | {field: value})
    assert (status, message) == (400, f"{field} {rule}.")
    assert param in (field, None)


@pytest.mark.parametrize("path", BODIES)
async def test_a_compressed_body_is_named(serving, path):
    content = gzip.compress(json.dumps(BODIES[path]).encode())
    headers = {"content-type": "application/json"}
    async with serving() as client:
        for coding in ("gzip", "br", "GZIP, identity"):
            status, message, _, code = await refusal(
                client, path, content=content, headers=headers | {"content-encoding": coding}
            )
            assert (status, code) in ((415, "unsupported_content_encoding"), (415, None))
            assert message == (
                f"The body must not be compressed, got Content-Encoding: {coding}. Send plain JSON without this header."
            )
        status, message, *_ = await refusal(client, path, content=content, headers=headers)
        assert (status, message) == (400, "The body is not valid JSON: it is compressed with gzip. Send plain JSON in UTF-8.")
        plain = json.dumps(BODIES[path]).encode()
        response = await client.post(path, content=plain, headers=headers | {"content-encoding": "identity"})
        assert response.status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_another_encoding_is_named(serving, encoding):
    content = json.dumps(CHAT).encode(encoding)
    async with serving() as client:
        _, message, *_ = await refusal(
            client, "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    assert message.startswith("The body is not valid JSON: it is UTF-")
    assert message.endswith(". Send plain JSON in UTF-8.")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_an_id_without_a_text_names_the_prompt(serving, engine, stream):
    """The model may have more embeddings than the tokenizer has tokens."""
    known = len(engine.tokenizer)
    async with serving() as client:
        for prompt in ([1, known], [[1], [known]]):
            body = {"model": "fake", "prompt": prompt, "echo": True, "stream": stream}
            status, message, param, code = await refusal(client, "/v1/completions", json=body)
            assert (status, param, code) == (400, "prompt", "invalid_value")
            assert message == (
                f"With echo, prompt must hold only token ids that have a text, from 0 to {known - 1}, got {known}. "
                "Leave out echo or the id."
            )
            assert (await client.post("/v1/completions", json=body | {"echo": False})).status_code == 200
        _, message, param, _ = await refusal(client, "/detokenize", json={"tokens": [known]})
        assert (message, param) == (f"tokens must hold token ids from 0 to {known - 1}, got {known}.", "tokens")


BROKEN = {
    "syntax": ("{% for message in messages %}{{ message.content }}", "Unexpected end of template"),
    "attribute": ("{{ messages[0].text.upper() }}", "has no attribute"),
    "raises": ("{{ raise_exception('never') }}", "never"),
    "nothing": ("{% if messages is none %}x{% endif %}", "it writes nothing for a message that says Xylophone"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "reason"), BROKEN.values(), ids=BROKEN)
async def test_the_models_own_broken_template_is_not_the_clients_fault(serving, engine, caplog, template, reason, stream):
    engine.tokenizer.chat_template = template
    with caplog.at_level(logging.WARNING):
        async with serving() as client:
            assert "the model's chat template must accept a user message" in caplog.text
            assert "chats are refused until --chat-template replaces it" in caplog.text
            assert reason in caplog.text
            assert not client.service.tokenization.writes_chats
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
                body = BODIES.get(path, {"messages": USER}) | ({"stream": stream} if path in BODIES else {})
                status, message, param, code = await refusal(client, path, json=body)
                assert (status, param) == (501, None), path
                assert code in ("broken_chat_template", None)
                assert message.startswith("This model's chat template is broken: it must accept a user message (")
                assert reason in message
                assert message.endswith("The operator can replace it with --chat-template. /v1/completions needs no template.")
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
            assert (await client.get("/ready")).status_code == 200


async def test_each_of_the_models_templates_is_rendered_once(serving, engine, caplog):
    """The one for tools is broken, so chats without tools are served."""
    engine.tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].nothing.x }}"}
    tool = {"type": "function", "function": {"name": "add"}}
    async with serving() as client:
        assert caplog.text.count("chats are refused until") == 1
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        status, _, _, code = await refusal(
            client, "/v1/chat/completions", json=CHAT | {"tools": [tool], "tool_choice": "required"}
        )
        assert (status, code) == (501, "broken_chat_template")


async def test_a_template_that_does_not_end_is_found_at_the_start(serving, engine, caplog):
    engine.tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    async with serving(template_timeout=0.3) as client:
        assert "the model's chat template must end within 0.3 s (--template-timeout), and runs longer" in caplog.text
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_a_template_that_only_these_messages_break_is_not_broken(serving, engine, caplog):
    engine.tokenizer.chat_template = (
        "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    )
    async with serving() as client:
        assert "chat template" not in caplog.text
        status, message, param, _ = await refusal(client, "/v1/chat/completions", json=CHAT | {"messages": USER * 2})
    assert (status, message, param) == (400, "The chat template refuses these messages: one.", "messages")


NEVER_ENDS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize("choice", [{"strict": True}, {"strict": False}])
async def test_a_tool_whose_parameters_never_end_is_named(serving, engine, choice):
    """A call is a part of a larger grammar, in which the reference has another place."""
    engine.tokenizer.chat_template = TOOLS
    engine.max_model_len = 4096
    tool = {"type": "function", "function": {"name": "add", "parameters": NEVER_ENDS, **choice}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    more = {} if choice["strict"] else {"response_format": schema}
    async with serving() as client:
        status, message, param, _ = await refusal(client, "/v1/chat/completions", json=CHAT | {"tools": [tool]} | more)
    assert (status, param) == (400, "tools")
    assert message.startswith(
        "tools: json_schema must have no endless references, but '#/$defs/add/$defs/a' leads back to itself"
    )


async def test_a_format_that_never_ends_is_named_beside_tools(serving, engine):
    engine.tokenizer.chat_template = TOOLS
    engine.max_model_len = 4096
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": NEVER_ENDS}}
    tool = {"type": "function", "function": {"name": "add"}}
    async with serving() as client:
        status, message, param, _ = await refusal(
            client, "/v1/chat/completions", json=CHAT | {"tools": [tool], "response_format": schema}
        )
    assert (status, param) == (400, "response_format")
    assert "'#/$defs/a' leads back to itself" in message
