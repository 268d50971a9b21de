"""openai-python's client of the Responses API with a real server whose model says what the test wants."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from fa_serve.engine import RequestError

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
ASK: dict[str, Any] = {"model": "fake", "input": "Hi"}
CALLING = ("<think>Hm", "m</think>", "I add", ".\n<tool_call>", '{"name": "add", "arg', 'uments": {"a": 1', "}}</tool_call>")


class Verdict(BaseModel):
    sure: bool


def client(url: str, **given: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0} | given)


def said(response: Any) -> list[tuple]:
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments), item.status))
        else:
            [content] = item.content
            found.append((item.type, content.text, item.status))
    return found


def events_of(url: str, **fields: Any) -> list[dict]:
    text = httpx.post(f"{url}/v1/responses", json={**ASK, "stream": True, **fields}).text
    frames = [frame.split("\n") for frame in text.split("\n\n")]
    assert frames.pop() == [""]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_plain_and_streamed_responses_agree(speaking) -> None:
    url = speaking(*CALLING)
    with client(url) as api:
        plain = api.responses.create(**ASK, tools=[ADD])
        with api.responses.stream(**ASK, tools=[ADD]) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
    assert said(plain) == [
        ("reasoning", "Hmm", "completed"),
        ("message", "I add.", "completed"),
        ("add", {"a": 1}, "completed"),
    ]
    assert said(streamed) == said(plain)
    assert plain.output_text == streamed.output_text == "I add."
    assert plain.status == streamed.status == "completed"
    assert plain.usage == streamed.usage
    assert (plain.usage.output_tokens, plain.usage.output_tokens_details.reasoning_tokens) == (7, 2)
    assert (plain.usage.input_tokens_details.cached_tokens, plain.store, plain.id[:5]) == (2, False, "resp_")


def test_the_sequence_of_events(speaking) -> None:
    url = speaking(*CALLING)
    events = events_of(url, tools=[ADD])
    text = ["content_part.added", "{}.delta", "{}.delta", "{}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"]

    def item(*inside: str, kind: str = "") -> list[str]:
        return ["output_item.added", *(name.format(kind) for name in inside), "output_item.done"]

    parts = [*item(*text, kind="reasoning_text"), *item(*text, kind="output_text"), *item(*call)]
    expected = ["created", "in_progress", *parts, "completed"]
    assert [event["type"] for event in events] == [f"response.{name}" for name in expected]
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert final["output"] == done
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("content") for item in added] == [[], [], None]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]


def test_replies_have_openais_fields_alone(speaking) -> None:
    url = speaking(*CALLING)
    reply = httpx.post(f"{url}/v1/responses", json={**ASK, "tools": [ADD], "instructions": "Be", "user": "me"}).json()
    assert reply.keys() - {"store"} <= Response.model_fields.keys()
    Response.model_validate(reply, strict=False)
    assert (reply["instructions"], reply["user"], reply["tools"][0]["name"]) == ("Be", "me", "add")
    assert reply["text"] == {"format": {"type": "text"}}


def test_the_async_client(speaking) -> None:
    url = speaking("Hello", " you")

    async def ask() -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
            api.responses.stream(**ASK) as stream,
        ):
            return (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == "Hello you"


def test_a_round_trip_with_a_tool(speaking, prompt_of) -> None:
    url = speaking(*CALLING)
    with client(url) as api:
        first = api.responses.create(**ASK, tools=[ADD])
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
        history = [{"role": "user", "content": "Hi"}, *first.output, result]
        api.responses.create(**{**ASK, "input": history}, tools=[ADD], instructions="Be", store=False)
    call = f'[{first.output[-1].call_id} add {{"a": 1}}]'
    assert prompt_of().endswith(f"<|system|>Be<|user|>Hi<|assistant|>I add.(Hmm){call}<|tool|>2<|assistant|>")


def test_a_parsed_response(speaking, engine) -> None:
    url = speaking('{"sure"', ": true}")
    with client(url) as api:
        parsed = api.responses.parse(**ASK, text_format=Verdict)
        with api.responses.stream(**ASK, text_format=Verdict) as stream:
            streamed = stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Verdict(sure=True)
    assert '"sure"' in engine.seen[-1].params.structured.grammar


def test_an_answer_that_is_cut_off_is_incomplete(speaking, engine) -> None:
    url = speaking("a", "b", "c")
    with client(url) as api:
        plain = api.responses.create(**ASK, max_output_tokens=2)
    streamed = events_of(url, max_output_tokens=2)[-1]
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said(plain) == [("message", "ab", "incomplete")]
    assert streamed["type"] == "response.incomplete"
    assert streamed["response"]["output"][0]["status"] == "incomplete"
    assert engine.seen[-1].params.max_tokens == 2


@pytest.mark.parametrize(("tokens", "output"), [(1, []), (2, [("function_call", "add", '{"a": ', "incomplete")])])
def test_a_required_call_that_is_cut_off_is_no_text(speaking, tokens, output) -> None:
    """What was written before the end of the function's name was a message of JSON."""
    url = speaking('[{"na', 'me": "add", "parameters": {"a": ', "1}}]")
    asked = {"tools": [ADD], "tool_choice": "required", "max_output_tokens": tokens}
    with client(url) as api:
        plain = api.responses.create(**ASK, **asked)
    streamed = Response.model_validate(events_of(url, **asked)[-1]["response"])
    for response in (plain, streamed):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [(item.type, item.name, item.arguments, item.status) for item in response.output] == output


def test_effort_reaches_a_template_that_reads_it(speaking, prompt_of) -> None:
    url = speaking("a")
    with client(url) as api:
        api.responses.create(**ASK, reasoning={"effort": "low", "summary": "auto"})
        assert prompt_of().endswith("!low<|assistant|>")
        api.responses.create(**ASK, reasoning={"effort": "none"})
        assert prompt_of().endswith("!none<|assistant|><think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"input": "x" * 5000}, openai.BadRequestError, "input"),
        ({"max_output_tokens": 5000}, openai.BadRequestError, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}}, None, None),
    ],
)
def test_errors_name_fields_of_this_api(speaking, fields, kind, param) -> None:
    url = speaking("a")
    with client(url) as api:
        if kind is None:  # the fake engine compiles nothing
            assert api.responses.create(**{**ASK, **fields}).status == "completed"
            return
        with pytest.raises(kind) as refused:
            api.responses.create(**{**ASK, **fields})
    assert refused.value.param == param


def test_keys_and_bounds(speaking) -> None:
    url = speaking("a", api_keys="secret", max_body_bytes=400, max_json_fields=40, max_messages=2)
    assert httpx.post(f"{url}/v1/responses", json=ASK).json()["error"]["code"] == "invalid_api_key"
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    many = {**ASK, "input": [{"role": "user", "content": "a"}] * 3}
    for body, status, code in (
        (b"{", 400, None),
        (b" " * 401, 413, "request_too_large"),
        (b"[" * 50, 413, "too_many_values"),
        (json.dumps(many).encode(), 400, None),
    ):
        refused = httpx.post(f"{url}/v1/responses", content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    with client(url, api_key="wrong") as api, pytest.raises(openai.AuthenticationError):
        api.responses.create(**ASK)


def test_a_stream_that_fails_ends_with_a_failed_response(speaking, engine) -> None:
    url = speaking("a", "b")
    engine.error = RequestError("step_failed", "secret")
    *_, failed = events_of(url)
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"
    assert "secret" not in json.dumps(failed)
    with client(url) as api, pytest.raises(openai.InternalServerError):
        api.responses.create(**ASK)


def test_what_a_coding_agent_sends(speaking, prompt_of) -> None:
    """Codex: instructions, a developer message, items that come back, and hints for a cache."""
    url = speaking(*CALLING)
    body = {
        "model": "fake",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "add", "arguments": '{"a":1}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        ],
        "tools": [{**ADD, "description": "Adds."}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-abcd",
    }
    reply = httpx.post(f"{url}/v1/responses", json=body, headers={"openai-beta": "responses=experimental"})
    assert reply.status_code == 200, reply.text
    assert "event: response.completed" in reply.text
    begin = "<|system|>You are an agent.<|user|>Hi<|assistant|>I look."
    assert prompt_of().endswith(begin + '[call_1 add {"a": 1}]<|tool|>2!medium<|assistant|>')
    assert '"prompt_cache_key":"0199-abcd"' in reply.text
