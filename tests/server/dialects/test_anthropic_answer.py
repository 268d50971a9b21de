"""The anthropic SDK, sync and async, with a real server whose model says what the test wants."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from fa_serve.engine import RequestError

ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ASK: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
CALLING = ("<think>Hm", "m</think>", "I add", ".\n<tool_call>", '{"name": "add", "arg', 'uments": {"a": 1', "}}</tool_call>")


def client(url: str, **given: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "none", "max_retries": 0} | given)


def said(message: Any) -> list[dict]:
    """The blocks without ids and fields that are null."""
    return [{k: v for k, v in block.to_dict().items() if v is not None and k != "id"} for block in message.content]


def test_plain_and_streamed_messages_agree(speaking) -> None:
    url = speaking(*CALLING)
    with client(url) as api:
        plain = api.messages.create(**ASK, tools=[ADD])
        with api.messages.stream(**ASK, tools=[ADD]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    assert said(plain) == [
        {"type": "thinking", "thinking": "Hmm", "signature": "unsigned"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
    ]
    assert said(streamed) == said(plain)
    assert plain.stop_reason == streamed.stop_reason == "tool_use"
    assert plain.usage == streamed.usage
    assert (plain.usage.output_tokens, plain.usage.cache_read_input_tokens) == (7, 2)
    assert plain.id.startswith("msg_")
    assert plain._request_id
    raw = [kind for kind in kinds if kind.startswith(("message", "content_block"))]
    block = ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
    thinking = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]  # the last one is the signature
    assert raw == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]


def test_the_frames_of_a_stream(speaking) -> None:
    url = speaking("Hello", " you")
    text = httpx.post(f"{url}/v1/messages", json={**ASK, "stream": True}).text
    frames = [frame.split("\n") for frame in text.split("\n\n")]
    assert frames.pop() == [""]
    for name, data in frames:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert frames[2][1] == 'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}'


def test_the_async_client(speaking) -> None:
    url = speaking("Hello", " you")

    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
            api.messages.stream(**ASK) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == "Hello you"


def test_a_round_trip_with_a_tool(speaking, prompt_of) -> None:
    url = speaking(*CALLING)
    with client(url) as api:
        message = api.messages.create(**ASK, tools=[ADD])
        result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "2"}
        history = [*ASK["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        api.messages.create(**{**ASK, "messages": history}, tools=[ADD], system="Be")
    call = f'[{message.content[-1].id} add {{"a": 1}}]'
    assert prompt_of().endswith(f"<|system|>Be<|user|>Hi<|assistant|>I add.(Hmm){call}<|tool|>2<|assistant|>")


def test_the_beginning_of_an_answer_is_continued(speaking, prompt_of) -> None:
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    url = speaking(" upon", " a time", template=template)
    with client(url) as api:
        for content in ("Once", [{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}]):
            messages = [*ASK["messages"], {"role": "assistant", "content": content}]
            assert api.messages.create(**ASK | {"messages": messages}).content[0].text == " upon a time"
            assert prompt_of() == "<|user|>Hi<|end|><|assistant|>Once"
        api.messages.create(**ASK)
    assert prompt_of() == "<|user|>Hi<|end|><|assistant|>"


def test_forced_tools(speaking, engine) -> None:
    url = speaking('{"a": ', "1}")
    with client(url) as api:
        message = api.messages.create(**ASK, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    assert (message.stop_reason, said(message)) == ("tool_use", [{"type": "tool_use", "name": "add", "input": {"a": 1}}])
    assert '"properties": {"a": {"type": "integer"}}' in engine.seen[-1].params.structured.grammar


@pytest.mark.parametrize(
    ("words", "given"),
    [(['{"a": 1, "b": "x'], {"a": 1, "b": "x"}), (["{]"], {"arguments": "{]"}), (["[1]"], {"arguments": "[1]"})],
)
def test_arguments_that_are_cut_off_or_no_object(speaking, words, given) -> None:
    url = speaking(*words)
    with client(url) as api:
        message = api.messages.create(**ASK, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    assert [block.input for block in message.content] == [given]


def test_a_forced_call_that_is_cut_off_before_its_name_is_no_text(speaking) -> None:
    url = speaking('[{"na', 'me": "add"')
    with client(url) as api:
        message = api.messages.create(**{**ASK, "max_tokens": 1}, tools=[ADD], tool_choice={"type": "any"})
        with api.messages.stream(**{**ASK, "max_tokens": 1}, tools=[ADD], tool_choice={"type": "any"}) as stream:
            streamed = stream.get_final_message()
    assert said(message) == said(streamed) == []
    assert message.stop_reason == streamed.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "end_turn"), ({"max_tokens": 1}, "max_tokens"), ({"max_tokens": 10_000}, "end_turn")],
)
def test_stop_reasons(speaking, engine, fields, reason) -> None:
    url = speaking("a", "b", "c")
    with client(url) as api:
        assert api.messages.create(**{**ASK, **fields}).stop_reason == reason
    asked = {**ASK, **fields}["max_tokens"]
    assert engine.seen[-1].params.max_tokens == min(asked, 4096 - len(engine.seen[-1].prompt))


def test_the_end_of_the_context_is_a_stop_reason(speaking, engine) -> None:
    url = speaking(*"abcdefgh")
    engine.max_model_len = 8
    with client(url) as api:
        message = api.messages.create(**ASK)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 8 - len(engine.seen[-1].prompt) == 4


def test_a_stop_sequence_is_named(speaking, engine, monkeypatch) -> None:
    url = speaking("a", "b")
    generate = engine.generate

    async def stopped(*given: Any, **more: Any):
        async for output in generate(*given, **more):
            output.stop_string = "END" if output.finished else None
            yield output

    monkeypatch.setattr(engine, "generate", stopped)
    with client(url) as api:
        plain = api.messages.create(**ASK, stop_sequences=["END"])
        with api.messages.stream(**ASK, stop_sequences=["END"]) as stream:
            streamed = stream.get_final_message()
    for message in (plain, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert engine.seen[-1].params.stop == ("END",)


def test_wishes_reach_a_template_that_reads_them(speaking, prompt_of) -> None:
    url = speaking("a")
    with client(url) as api:
        api.messages.create(**ASK, thinking={"type": "disabled"}, output_config={"effort": "low"})
        assert prompt_of().endswith("!low<|assistant|><think>\n\n</think>\n\n")
        api.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        assert prompt_of().endswith("<|user|>Hi<|assistant|>")
    url = speaking("a", template="{{ messages[0].content }}")
    with client(url) as api:
        api.messages.create(**ASK, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert prompt_of() == "Hi"


def test_thoughts_can_be_left_out(speaking) -> None:
    url = speaking("<think>Hm</think>", "4")
    omitted = {"type": "adaptive", "display": "omitted"}
    with client(url) as api:
        plain = api.messages.create(**ASK, thinking=omitted)
        with api.messages.stream(**ASK, thinking=omitted) as stream:
            streamed = stream.get_final_message()
    for message in (plain, streamed):
        assert [getattr(block, "thinking", None) for block in message.content] == ["", None]


def test_structured_output(speaking, engine) -> None:
    url = speaking("42")
    schema = {"type": "integer"}
    with client(url) as api:
        api.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"type": "integer"' in engine.seen[-1].params.structured.grammar  # thoughts may come before it


def test_tokens_are_counted_without_an_answer(speaking, engine) -> None:
    url = speaking("a")
    asked = {"model": "fake", "messages": ASK["messages"], "system": "Be", "tools": [ADD]}
    with client(url) as api:
        counted = api.messages.count_tokens(**asked).input_tokens
        assert engine.seen == []
        usage = api.messages.create(**asked, max_tokens=3).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_headers": {"anthropic-version": "2020-01-01"}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_errors_are_the_sdks_own(speaking, fields, kind, word) -> None:
    url = speaking("a")
    with client(url) as api, pytest.raises(kind) as refused:
        api.messages.create(**{**ASK, **fields})
    assert refused.value.body["error"]["type"] == word
    assert refused.value.body["request_id"] == refused.value.request_id


def test_keys_come_in_either_header(speaking) -> None:
    url = speaking("a", api_keys="secret")
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert httpx.post(f"{url}/v1/messages", json=ASK, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "secret", "authorization": "Bearer wrong"}):
        refused = httpx.post(f"{url}/v1/messages", json=ASK, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    with client(url, api_key="wrong") as api, pytest.raises(anthropic.AuthenticationError):
        api.messages.create(**ASK)


def test_bodies_are_bounded_and_must_be_json(speaking) -> None:
    url = speaking("a", max_body_bytes=400, max_json_fields=40, max_messages=2)
    cases = {
        b"{": (400, "invalid_request_error"),
        b"[]": (400, "invalid_request_error"),
        b" " * 401: (413, "request_too_large"),
        b"[" * 50: (413, "request_too_large"),
        json.dumps({**ASK, "messages": ASK["messages"] * 3}).encode(): (400, "invalid_request_error"),
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for body, expected in cases.items():
            refused = httpx.post(url + path, content=body, headers={"content-type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["type"]) == expected, body
            assert refused.json()["type"] == "error"
            assert refused.headers["request-id"] == refused.headers["x-request-id"]
    lost = httpx.post(f"{url}/v1/messages/batches", json={})
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.slow
def test_a_full_queue(speaking, engine) -> None:
    url = speaking("a", max_num_seqs=1, max_waiting=0)
    engine.gate.clear()
    with ThreadPoolExecutor() as pool, client(url) as api:
        first = pool.submit(httpx.post, f"{url}/v1/messages", json=ASK, timeout=2)
        while not engine.seen:
            time.sleep(0.01)
        with pytest.raises(anthropic.RateLimitError) as refused:
            api.messages.create(**ASK)
        assert refused.value.body["error"]["type"] == "rate_limit_error"
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(httpx.ReadTimeout):
            first.result()


def test_a_stream_that_fails_ends_with_an_error_event(speaking, engine) -> None:
    url = speaking("a", "b")
    engine.error = RequestError("step_failed", "secret")
    with client(url) as api:
        with pytest.raises(anthropic.APIStatusError) as failed, api.messages.stream(**ASK) as stream:
            stream.get_final_message()
        assert failed.value.body["error"]["type"] == "api_error"
        assert "secret" not in str(failed.value.body)
        with pytest.raises(anthropic.InternalServerError) as failed:
            api.messages.create(**ASK)
    assert failed.value.body["error"]["type"] == "api_error"


def test_what_a_coding_agent_sends(speaking, prompt_of) -> None:
    """Claude Code: blocks with cache_control everywhere, thinking, many headers, and a query."""
    url = speaking(*CALLING)
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": "fake",
        "max_tokens": 32_000,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent.", **cached}, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "text", "text": "Hi", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "unsigned"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}, **cached},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2", "is_error": False, **cached}],
            },
        ],
        "tools": [{**ADD, "description": "Adds.", "eager_input_streaming": True, **cached}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "u" * 300},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "temperature": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,x", "x-api-key": "k", "x-app": "cli"}
    reply = httpx.post(f"{url}/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert '"stop_reason":"tool_use"' in reply.text
    begin = "<|system|>You are an agent.\nBe brief.<|user|>Look.\nHi<|assistant|>I look.(Hm)"
    assert prompt_of().endswith(begin + '[call_1 add {"a": 1}]<|tool|>2!high<|assistant|>')
    counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking", "tool_choice")}
    assert httpx.post(f"{url}/v1/messages/count_tokens?beta=true", json=counted, headers=headers).json()["input_tokens"] > 50
