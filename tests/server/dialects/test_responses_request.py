"""Requests of OpenAI's Responses API: what they become, and what is refused by which name."""

import time
from typing import Any

import pytest
from fa_serve.server.dialects.responses_request import ResponsesRequest
from fa_serve.server.errors import validation_refused
from pydantic import ValidationError

ASK: dict[str, Any] = {"model": "m", "input": "Hi"}
HI = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Well", "annotations": [], "logprobs": []}],
}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
    "encrypted_content": None,
}


def rendered(*items: dict, **fields: Any) -> list[dict]:
    request = ResponsesRequest.model_validate({**ASK, "input": [*items], **fields})
    return [message.rendered() for message in request.chat.messages]


def refused(lenient: bool = False, **fields: Any) -> str | None:
    with pytest.raises(ValidationError) as error:
        ResponsesRequest.model_validate({**ASK, **fields}, context={"lenient": lenient})
    return validation_refused([each | {"loc": ("body", *each["loc"])} for each in error.value.errors()]).param


def test_a_text_is_a_message_of_the_user() -> None:
    chat = ResponsesRequest.model_validate({**ASK, "instructions": "Be"}).chat
    assert [message.rendered() for message in chat.messages] == [{"role": "system", "content": "Be"}, HI]


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    other = {**CALL, "call_id": "c2", "arguments": ""}
    results = [RESULT, {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]}]
    first = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    second = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}}
    assert rendered(HI, THOUGHT, SAID, CALL, other, *results) == [
        HI,
        {"role": "assistant", "content": "Well", "tool_calls": [first, second], "reasoning_content": "Hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "3", "tool_call_id": "c2"},
    ]


def test_another_text_or_thought_begins_another_message() -> None:
    assert [message["content"] for message in rendered(HI, SAID, SAID)] == ["Hi", "Well", "Well"]
    assert [message["content"] for message in rendered(HI, SAID, THOUGHT, SAID)] == ["Hi", "Well", "Well"]
    assert [message["role"] for message in rendered(HI, CALL, SAID, RESULT)] == ["user", "assistant", "assistant", "tool"]


def test_reasoning_without_a_text_is_no_message() -> None:
    assert rendered(HI, {"type": "reasoning", "summary": [], "id": "rs_1"}, HI) == [HI, HI]


def test_the_developer_is_the_system() -> None:
    texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert rendered({"role": "developer", "content": texts}) == [{"role": "system", "content": "a\nb"}]


def test_tools_and_choice() -> None:
    asked = {**ASK, "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False}
    chat = ResponsesRequest.model_validate(asked).chat
    assert (chat.named_tool().function.name, chat.named_tool().function.strict) == ("add", True)
    assert chat.parallel_tool_calls is False
    assert ResponsesRequest.model_validate({**asked, "tool_choice": "required"}).chat.tool_choice == "required"


def test_the_format_of_the_text() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
    chat = ResponsesRequest.model_validate({**ASK, "text": {"format": schema, "verbosity": "medium"}}).chat
    assert chat.response_format.json_schema.schema_ == {"type": "integer"}
    for kind in ("text", "json_object"):
        assert ResponsesRequest.model_validate({**ASK, "text": {"format": {"type": kind}}}).chat.response_format.type == kind


def test_large_tools_do_not_come_back() -> None:
    """A response has them in three of its events, and nothing else bounds a schema that is not in the prompt."""
    for size, expected in ((1000, 1), (300_000, None)):
        tool = {**ADD, "parameters": {"type": "object", "description": "x" * size}}
        request = ResponsesRequest.model_validate({**ASK, "tools": [tool], "tool_choice": "none"})
        assert (request.returned["tools"] and len(request.returned["tools"])) == expected
        assert request.returned["tool_choice"] == "none"


def test_values_that_ask_for_nothing_pass() -> None:
    nothing = {"store": False, "previous_response_id": None, "background": False, "metadata": {}, "truncation": "disabled"}
    ResponsesRequest.model_validate({**ASK, **nothing, "service_tier": "auto", "include": ["reasoning.encrypted_content"]})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [HI, {**CALL, "arguments": "[]"}]}, "input[1].arguments"),
        ({"input": [{**THOUGHT, "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{**HI, "nonsense": 1}]}, "input[0].nonsense"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_refused_is_named(fields, param) -> None:
    assert refused(**fields) == param


def test_a_lenient_server_ignores_unknown_fields_of_items_alone() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "nonsense": 1}], "nonsense": 1}
    request = ResponsesRequest.model_validate({**ASK, "input": [item]}, context={"lenient": True})
    assert request.chat.messages[0].content == "a"
    assert refused(lenient=True, nonsense=1) == "nonsense"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{}] * 1000},
        {"input": [{"type": "function_call"}] * 1000},
        {"input": [{"role": "user", "content": [{}] * 1000}]},
        {"input": [{"type": "reasoning", "summary": [{}] * 1000}]},
        {"tools": [{}] * 100},
        {str(i): 0 for i in range(1000)},
    ],
)
def test_a_thousand_faults_make_few_errors(fields) -> None:
    with pytest.raises(ValidationError) as error:
        ResponsesRequest.model_validate({**ASK, **fields})
    assert error.value.error_count() <= 6


def test_long_instructions_are_not_repeated_in_each_response() -> None:
    """A stream has three objects with them, which are written on the event loop."""
    kept = ResponsesRequest.model_validate({**ASK, "instructions": "x" * 200_000}).returned
    assert len(kept["instructions"]) == 200_000
    left_out = ResponsesRequest.model_validate({**ASK, "instructions": "x" * 300_000, "tool_choice": "none"}).returned
    assert (left_out["instructions"], left_out["tool_choice"]) == (None, "none")


def test_thousands_of_thoughts_behind_a_long_one_are_joined_once() -> None:
    """4,900 copies of 8 MB took 16 s, in the thread that parses the large bodies of all clients."""

    def thought(text: str) -> dict:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    items = [thought("x" * 8_000_000), *[thought("y")] * 4_900, {"role": "user", "content": "Hi"}]
    begin = time.thread_time()
    chat = ResponsesRequest.model_validate({**ASK, "input": items}).chat
    assert time.thread_time() - begin < 2
    assert len(chat.messages[0].reasoning_content) == 8_004_900
    assert [message.role for message in chat.messages] == ["assistant", "user"]


def test_images_in_outputs_of_functions_are_parts_of_messages_of_tools() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,QUJD"}
    text = {"type": "input_text", "text": "a"}
    items = [
        {"role": "user", "content": [text, picture]},
        {"type": "function_call_output", "call_id": "c1", "output": [picture, text]},
        {"type": "function_call_output", "call_id": "c1", "output": [text, text]},
        {"type": "function_call_output", "call_id": "c1", "output": []},
    ]
    chat = ResponsesRequest.model_validate({"model": "m", "input": items}).chat
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    assert [each.model_dump(exclude_none=True)["content"] for each in chat.messages] == [
        [{"type": "text", "text": "a"}, part],
        [part, {"type": "text", "text": "a"}],
        "a\na",
        "",
    ]
    places = [each.place for each in chat.request_images(chat.messages)]
    assert places == ["input[0].content[1].image_url", "input[1].output[0].image_url"]
