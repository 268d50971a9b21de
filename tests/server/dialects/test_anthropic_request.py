"""Requests of Anthropic's Messages API: what they become, and what is refused by which name."""

from typing import Any

import pytest
from fa_serve.server.dialects.anthropic_request import CountTokensRequest, MessagesRequest
from fa_serve.server.errors import validation_refused
from pydantic import ValidationError

HI = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [HI]}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def rendered(*turns: dict, **fields: Any) -> list[dict]:
    request = MessagesRequest.model_validate({**ASK, "messages": [*turns], **fields})
    return [message.rendered() for message in request.chat.messages]


def refused(lenient: bool = False, **fields: Any) -> str | None:
    with pytest.raises(ValidationError) as error:
        MessagesRequest.model_validate({**ASK, **fields}, context={"lenient": lenient})
    return validation_refused([each | {"loc": ("body", *each["loc"])} for each in error.value.errors()]).param


def test_the_system_prompt_is_the_first_message() -> None:
    assert rendered(HI, system="Be") == [{"role": "system", "content": "Be"}, HI]
    assert rendered(HI, system=[TEXT, TEXT])[0] == {"role": "system", "content": "a\na"}
    assert rendered(HI, {"role": "system", "content": [TEXT]}, HI)[1] == {"role": "system", "content": "a"}


def test_blocks_of_the_assistant_are_fields_of_one_message() -> None:
    turn = {"role": "assistant", "content": [THOUGHT, TEXT, USE, {**USE, "id": "t2"}]}
    [_, message, _] = rendered(HI, turn, HI)
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert message == {
        "role": "assistant",
        "content": "a",
        "tool_calls": [call, {**call, "id": "t2"}],
        "reasoning_content": "Hm",
    }


def test_results_are_messages_of_tools_between_the_texts() -> None:
    content = [{**RESULT, "content": "3"}, {**RESULT, "is_error": True, "content": [TEXT, TEXT]}, RESULT, TEXT, TEXT]
    assert rendered({"role": "user", "content": content}) == [
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: a\na"},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "user", "content": "a\na"},
    ]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
OTHER = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "QUJD"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def test_images_in_results_are_parts_of_messages_of_tools() -> None:
    content = [{**RESULT, "content": [TEXT, IMAGE]}, {**RESULT, "is_error": True, "content": [OTHER]}, IMAGE, TEXT]
    turns = [HI, {"role": "user", "content": content}]
    chat = MessagesRequest.model_validate({**ASK, "messages": turns}).chat
    assert [each.model_dump(exclude_none=True) for each in chat.messages[1:]] == [
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a"}, PICTURE]},
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": [
                {"type": "text", "text": "Error: "},
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            ],
        },
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "a"}]},
    ]
    assert [(each.place, each.url[:5]) for each in chat.request_images(chat.messages)] == [
        ("messages[1].content[0].content[1].source.data", "data:"),
        ("messages[1].content[1].content[0].source.url", "https"),
        ("messages[1].content[2].source.data", "data:"),
    ]


@pytest.mark.parametrize(
    ("given", "known"),
    [("image/jpg", "image/jpeg"), ("IMAGE/PNG", "image/png"), ("image/webp; charset=utf-8", "image/webp")],
)
def test_names_of_media_types_that_clients_write(given: str, known: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": given, "data": "QUJD"}}
    chat = MessagesRequest.model_validate({**ASK, "messages": [{"role": "user", "content": [image]}]}).chat
    assert chat.messages[0].images() == [(0, f"data:{known};base64,QUJD")]


@pytest.mark.parametrize(
    ("choice", "chosen", "single"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
    ],
)
def test_choices_of_tools(choice, chosen, single) -> None:
    chat = MessagesRequest.model_validate({**ASK, "tools": [ADD], "tool_choice": choice}).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (chosen, single)
    [tool] = chat.tools
    assert tool.rendered()["function"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def test_a_named_tool() -> None:
    choice = {"type": "tool", "name": "add"}
    chat = MessagesRequest.model_validate({**ASK, "tools": [ADD], "tool_choice": choice}).chat
    assert chat.named_tool().function.name == "add"


def test_sampling_and_format() -> None:
    output = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "stream": True, "output_config": output}
    chat = MessagesRequest.model_validate({**ASK, **fields, "metadata": {"user_id": "me"}}).chat
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stop, chat.stream) == (0.5, 0.9, 5, ["x"], True)
    assert (chat.max_completion_tokens, chat.response_format.json_schema.schema_) == (9, {"type": "integer"})
    counted = CountTokensRequest.model_validate({"model": "m", "messages": [HI], "tools": [ADD]}).chat
    assert counted.max_completion_tokens is None
    assert len(counted.tools) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": [TEXT, USE]}]}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": [THOUGHT]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{**TEXT, "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{**TEXT, "citations": [{}]}]}]}, "messages[0].content[0].citations"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "document"}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "source": PDF}]}]}, "messages[0].content[0].source.media_type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{**ADD, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"temperature": 1.5}, "temperature"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {}}, "context_management"),
        ({"nonsense": 1}, "nonsense"),
        ({"messages": [{**HI, "nonsense": 1}]}, "messages[0].nonsense"),
    ],
)
def test_what_is_refused_is_named(fields, param) -> None:
    assert refused(**fields) == param


def test_a_lenient_server_ignores_unknown_fields_of_turns_and_blocks_alone() -> None:
    turn = {"role": "user", "content": [{**TEXT, "nonsense": 1}], "nonsense": 1}
    request = MessagesRequest.model_validate({**ASK, "messages": [turn]}, context={"lenient": True})
    assert request.chat.messages[0].content == "a"
    assert refused(lenient=True, nonsense=1) == "nonsense"
    assert refused(lenient=True, tools=[{**ADD, "nonsense": 1}]) == "tools[0].nonsense"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 1000},
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{}] * 1000}]}]},
        {"tools": [{}] * 100},
        {"system": [{}] * 1000},
        {"stop_sequences": [""] * 1000},
        {str(i): 0 for i in range(1000)},
    ],
)
def test_a_thousand_faults_make_few_errors(fields) -> None:
    with pytest.raises(ValidationError) as error:
        MessagesRequest.model_validate({**ASK, **fields})
    assert error.value.error_count() <= 6
