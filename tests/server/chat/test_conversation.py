"""The models of chat requests: the form that templates get, the rules between fields, and tools and constraints."""

from __future__ import annotations

from typing import Any

import pytest
from fa_serve.server.chat.conversation import ChatRequest, Message, TokenizeRequest, Tool
from pydantic import ValidationError

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "fake", "messages": [USER]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "function": {"name": "add"}}
TAKE = {"type": "function", "function": {"name": "take"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}


def rendered(**fields: Any) -> dict[str, Any]:
    return Message.model_validate({"role": "user", "content": "Hi"} | fields).rendered()


def test_content_is_one_string() -> None:
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]
    assert rendered() == {"role": "user", "content": "Hi"}
    assert rendered(content=parts) == {"role": "user", "content": "A B"}
    assert rendered(role="assistant", content=None, tool_calls=[CALL])["content"] == ""


def test_content_is_a_list_of_parts_for_templates_that_take_no_string() -> None:
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]

    def in_parts(**fields: Any) -> Any:
        return Message.model_validate({"role": "user", "content": "Hi"} | fields).rendered(in_parts=True)["content"]

    assert in_parts() == [{"type": "text", "text": "Hi"}]
    assert in_parts(content=parts) == parts
    assert in_parts(role="assistant", content=None, tool_calls=[CALL]) == [{"type": "text", "text": ""}]


def test_places_of_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org"}}
    turns = [USER, {"role": "user", "content": [{"type": "text", "text": "A"}, image]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": [image]})
    request = ChatRequest.model_validate(CHAT | {"messages": turns})
    found = request.request_images(request.messages)
    assert [each.place for each in found] == ["messages[1].content[1].image_url.url", "messages[2].content[0].image_url.url"]
    assert {each.url for each in found} == {"https://example.org"}


def test_developer_is_rendered_as_system() -> None:
    assert rendered(role="developer") == rendered(role="system") == {"role": "system", "content": "Hi"}


def test_arguments_are_rendered_as_an_object() -> None:
    empty = CALL | {"function": {"name": "now", "arguments": ""}}
    calls = rendered(role="assistant", tool_calls=[CALL, empty])["tool_calls"]
    assert calls[0] == {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert calls[1]["function"] == {"name": "now", "arguments": {}}


def test_fields_that_are_given_are_rendered() -> None:
    assert rendered(name="Ann") == {"role": "user", "content": "Hi", "name": "Ann"}
    assert rendered(role="tool", tool_call_id="call_1") == {"role": "tool", "content": "Hi", "tool_call_id": "call_1"}
    assert rendered(role="assistant", reasoning_content="Hm")["reasoning_content"] == "Hm"


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    tool = Tool.model_validate(ADD)
    assert tool.parameters() == {"type": "object", "properties": {}}
    assert tool.rendered() == {"type": "function", "function": {"name": "add", "parameters": tool.parameters()}}


def test_a_tool_is_rendered_without_strict() -> None:
    """It concerns the server, not the template."""
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    tool = Tool.model_validate({"type": "function", "function": function | {"strict": True}})
    assert tool.rendered() == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("choice", "offered", "named"),
    [
        (None, ["add", "take"], None),
        ("auto", ["add", "take"], None),
        ("required", ["add", "take"], None),
        ("none", [], None),
        (TAKE, ["add", "take"], "take"),
    ],
    ids=["default", "auto", "required", "none", "named"],
)
def test_which_tools_are_offered(choice: Any, offered: list[str], named: str | None) -> None:
    request = ChatRequest.model_validate(CHAT | {"tools": [ADD, TAKE], "tool_choice": choice})
    assert [tool.function.name for tool in request.offered_tools()] == offered
    tool = request.named_tool()
    assert (tool and tool.function.name) == named


def test_without_tools_none_are_offered() -> None:
    assert ChatRequest.model_validate(CHAT | {"tool_choice": "none"}).offered_tools() == []


PICTURE = [{"type": "image_url", "image_url": {"url": "https://example.org"}}]
MESSAGES = {
    "image-of-an-assistant": (
        {"role": "assistant", "content": PICTURE},
        "content may have images only in messages of the roles user and tool, got the role 'assistant'",
    ),
    "image-of-the-system": (
        {"role": "developer", "content": PICTURE},
        "content may have images only in messages of the roles user and tool, got the role 'developer'",
    ),
    "no-content": ({"role": "user"}, "content must be given"),
    "no-content-of-an-assistant": ({"role": "assistant", "tool_calls": []}, "content must be given"),
    "calls-of-a-user": (USER | {"tool_calls": [CALL]}, "tool_calls is only allowed in assistant messages"),
    "thoughts-of-a-user": (
        USER | {"reasoning_content": "Hm"},
        "reasoning_content is only allowed in assistant messages",
    ),
    "tool-without-id": ({"role": "tool", "content": "3"}, "tool_call_id must be given with the role tool"),
    "id-without-tool": (USER | {"tool_call_id": "1"}, "tool_call_id must be given with the role tool, and with no other role"),
    "role": ({"role": "me!", "content": ""}, "String should match pattern"),
    "arguments-list": (
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "add", "arguments": "[]"}}]},
        "must be a JSON object",
    ),
    "arguments-text": (
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "add", "arguments": "{a"}}]},
        "must be a JSON object",
    ),
    "audio": (USER | {"audio": {"id": "a"}}, "audio is not supported by this server"),
    "annotations": (USER | {"annotations": [1]}, "annotations is not supported by this server"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bad_messages_are_refused(name: str) -> None:
    message, said = MESSAGES[name]
    with pytest.raises(ValidationError) as caught:
        Message.model_validate(message)
    [error] = caught.value.errors()
    assert said in error["msg"]


def test_a_content_has_a_part() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        Message.model_validate(USER | {"content": []})


CHATS = {
    "no-messages": ({"messages": []}, "at least 1 item"),
    "two-limits": (
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens is the old name of max_completion_tokens and must not differ from it",
    ),
    "top-without-logprobs": ({"top_logprobs": 2}, "top_logprobs is only allowed when logprobs is true"),
    "choice-without-tools": ({"tool_choice": "auto"}, "tool_choice is only allowed with tools"),
    "choice-of-another-tool": ({"tools": [ADD], "tool_choice": TAKE}, "tool_choice must name one of the tools"),
    "unknown-choice": ({"tools": [ADD], "tool_choice": "any"}, 'must be "none", "auto", "required" or {"type": "function"'),
    "equal-names": ({"tools": [ADD, TAKE, ADD]}, "must have different names"),
    "schema-missing": (
        {"response_format": {"type": "json_schema"}},
        "json_schema must be given with the type json_schema, and with no other type",
    ),
    "schema-of-another-type": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
        "json_schema must be given with the type json_schema, and with no other type",
    ),
    "store": ({"store": True}, "store is not supported by this server"),
    "store-number": ({"store": 0}, "store is not supported by this server"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities is not supported by this server"),
}


@pytest.mark.parametrize("name", CHATS)
def test_bad_chats_are_refused(name: str) -> None:
    change, said = CHATS[name]
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(CHAT | change)
    [error] = caught.value.errors()
    assert said in error["msg"]


def test_values_that_ask_for_nothing_pass() -> None:
    neutral = {
        "store": False,
        "modalities": ["text"],
        "metadata": {},
        "function_call": "none",
        "service_tier": "auto",
        "audio": None,
    }
    request = ChatRequest.model_validate(CHAT | neutral | {"max_tokens": 3, "max_completion_tokens": 3})
    assert request.max_completion_tokens == 3
    assert ChatRequest.model_validate(CHAT | {"logprobs": True, "top_logprobs": 2}).top_logprobs == 2


def test_a_schema_keeps_its_name_in_json() -> None:
    """`schema` is a method of pydantic's models, so the field has another name in Python."""
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}}
    assert ChatRequest.model_validate(CHAT | fields).response_format.json_schema.schema_ == SCHEMA


SOURCES = {
    "neither": ({}, "prompt must be given if messages is not"),
    "both": ({"prompt": "Hi", "messages": [USER]}, "must not be given together with it"),
    "special-tokens-of-messages": (
        {"messages": [USER], "add_special_tokens": True},
        "add_special_tokens is only allowed with prompt, because chat templates write special tokens",
    ),
    "tools-of-a-prompt": ({"prompt": "Hi", "tools": [ADD]}, "tools is only allowed with messages"),
    "template-of-a-prompt": ({"prompt": "Hi", "chat_template": "x"}, "chat_template is only allowed with messages"),
    "variables-of-a-prompt": (
        {"prompt": "Hi", "chat_template_kwargs": {}},
        "chat_template_kwargs is only allowed with messages",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_bad_requests_for_tokens_are_refused(name: str) -> None:
    body, said = SOURCES[name]
    with pytest.raises(ValidationError) as caught:
        TokenizeRequest.model_validate(body)
    [error] = caught.value.errors()
    assert said in error["msg"]


def test_requests_for_tokens() -> None:
    assert TokenizeRequest.model_validate({"prompt": "", "add_special_tokens": False}).prompt == ""
    assert TokenizeRequest.model_validate({"messages": [USER], "tools": [ADD]}).messages[0].content == "Hi"


def test_json_inside_of_a_text_is_bounded_before_it_is_parsed() -> None:
    long = '{"a":[' + "{}," * 50_000 + "{}]}"
    call = CALL | {"function": {"name": "add", "arguments": long}}
    with pytest.raises(ValidationError, match="at most 131072 characters"):
        Message.model_validate({"role": "assistant", "tool_calls": [call]})
    with pytest.raises(ValidationError, match="at most 1024 items"):
        Message.model_validate({"role": "assistant", "tool_calls": [CALL] * 1025})
    with pytest.raises(ValidationError, match="at most 262144 characters"):
        ChatRequest.model_validate(CHAT | {"guided_json": long + " " * 200_000})


@pytest.mark.anyio
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
async def test_the_arguments_of_all_calls_are_bounded_together(serving, route) -> None:
    """Each call is within its bounds. Before: 16 MB of them were 5 million objects, which took 353 MB."""
    arguments = '{"a":[' + "{}," * 400 + "{}]}"
    if route == "/v1/responses":
        items = [{"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments} for _ in range(8)]
        body = {"model": "fake", "input": items}
    else:
        call = CALL | {"function": {"name": "add", "arguments": arguments}}
        turn = {"role": "assistant", "tool_calls": [call] * 2}
        body = {"messages": [{"role": "user", "content": "Hi"}, *[turn] * 4]}
    async with serving(max_json_fields=3000) as client:
        refused = await client.post(route, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_values")
    assert refused.json()["error"]["message"].startswith("The arguments of all tool calls must have at most 3000 objects")
    async with serving(max_json_fields=4000) as client:
        assert (await client.post(route, json=body)).status_code != 413
