"""Requests are honoured or refused: no bad value, unknown field or unsupported field passes."""

import json

import pytest
from fa_serve.server.chat.conversation import ChatRequest
from fa_serve.server.schemas import CompletionRequest
from pydantic import ValidationError
from sampled_cases import ALL

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


BAD = [
    pytest.param("/v1/completions", {"prompt": "Hi"}, "model", id="no model"),
    pytest.param("/v1/completions", {"model": "fake"}, "prompt", id="no prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": []}, "prompt", id="no prompts"),
    pytest.param("/v1/completions", {**TEXT, "prompt": ""}, "prompt", id="empty prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": [1, "a"]}, "prompt", id="mixed prompt"),
    pytest.param("/v1/completions", {**TEXT, "prompt": [-1]}, "prompt", id="negative token"),
    pytest.param("/v1/completions", {**TEXT, "prompt": "x" * 64}, "prompt", id="long prompt"),
    pytest.param("/v1/completions", {**TEXT, "max_tokens": 63}, "prompt", id="no room for the answer"),
    pytest.param("/v1/completions", {**TEXT, "max_tokens": 0}, "max_tokens", id="no tokens"),
    pytest.param("/v1/completions", {**TEXT, "temperature": 2.5}, "temperature", id="hot"),
    pytest.param("/v1/completions", {**TEXT, "temperature": "1"}, "temperature", id="number as text"),
    pytest.param("/v1/completions", {**TEXT, "n": True}, "n", id="bool as number"),
    pytest.param("/v1/completions", {**TEXT, "n": 129}, "n", id="too many"),
    pytest.param("/v1/completions", {**TEXT, "top_p": 0}, "top_p", id="top_p"),
    pytest.param("/v1/completions", {**TEXT, "stop": [""]}, "stop", id="empty stop"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"a": 1}}, "logit_bias", id="bias of no token"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"-1": 1}}, "logit_bias", id="bias of a negative token"),
    pytest.param("/v1/completions", {**TEXT, "min_tokens": 17}, "min_tokens", id="min above max"),
    pytest.param("/v1/completions", {**TEXT, "best_of": 2, "n": 3}, "best_of", id="fewer than n"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"1_0": 1}}, "logit_bias", id="bias by a number of Python's"),
    pytest.param("/v1/completions", {**TEXT, "logit_bias": {"٣": 1}}, "logit_bias", id="bias by other digits"),
    pytest.param("/v1/completions", {**TEXT, "guided_json": {}, "guided_regex": "a"}, "guided_regex", id="two constraints"),
    pytest.param("/v1/completions", {**TEXT, "structured_outputs": {}}, "structured_outputs", id="no constraint"),
    pytest.param(
        "/v1/completions",
        {**TEXT, "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        id="two at once",
    ),
    pytest.param("/v1/completions", {**TEXT, "guided_choice": []}, "guided_choice", id="no choice"),
    pytest.param("/v1/completions", {**TEXT, "suffix": "x"}, "suffix", id="suffix"),
    pytest.param("/v1/completions", {**TEXT, "stream_options": {}}, "stream_options", id="stream_options without stream"),
    pytest.param("/v1/completions", {**TEXT, "nonsense": None}, "nonsense", id="unknown field"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": []}, "messages", id="no messages"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content", id="no content"),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "", "content": ""}]}, "messages[0].role", id="role"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url.url",
        id="image",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 64}]}, "messages", id="long"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [*CHAT["messages"], {"role": "system", "content": "x"}]},
        "messages",
        id="the template refuses",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "messages": [{**CHAT["messages"][0], "name": "A"}]}, "messages", id="name"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function", id="half a tool"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD]}, "tools", id="no format known"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD], "tool_choice": "required"}, "tools", id="tools"),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD, ADD]}, "tools", id="twice the same tool"),
    pytest.param("/v1/chat/completions", {**CHAT, "tool_choice": "auto"}, "tool_choice", id="a choice of none"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "tools": [ADD], "tool_choice": {**ADD, "function": {"name": "b"}}},
        "tool_choice",
        id="no such tool",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "tools": [ADD], "tool_choice": "any"}, "tool_choice", id="no such choice"),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "tool", "content": "3", "tool_call_id": "1"}]},
        "messages",
        id="tool message",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "tool", "content": "3"}]},
        "messages[0].tool_call_id",
        id="a tool's message without an id",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{**CHAT["messages"][0], "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        id="calls of a user",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        id="arguments are no object",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "", "audio": {"id": "a"}}]},
        "messages[0].audio",
        id="audio",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        id="no schema",
    ),
    pytest.param(
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
        id="a schema's name",
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort", id="no use for effort"),
    pytest.param("/v1/chat/completions", {**CHAT, "chat_template": "{{ messages }}"}, "chat_template", id="own template"),
    *(
        pytest.param("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs", id=name)
        for name in ("messages", "self", "conversation", "tools", "add_generation_prompt", "tokenize", "enable_thinking")
    ),
    pytest.param("/v1/chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", id="two limits"),
    pytest.param(
        "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", id="template"
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_requests(serving, conforms, path, body, param, stream):
    async with serving() as client:
        content = json.dumps({**body, **({"stream": True} if stream and "stream_options" not in body else {})})
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        conforms("ErrorResponse", response.json())
        assert response.json()["error"]["param"] == param
        assert client.service.in_flight == 0


ODD = [None, True, 0, -1, 2**70, 0.5, -1e308, "", "x" * 300, "\0", [], [[]], [None], [2**70], {}, {"": 0}, {"type": "text"}]


ROUTES = [("/v1/completions", TEXT, CompletionRequest), ("/v1/chat/completions", CHAT, ChatRequest)]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body", "kind"), ROUTES, ids=["completions", "chat"])
async def test_odd_values_of_every_field(serving, conforms, path, body, kind):
    """Every value of every field is honoured, or refused with an error in OpenAI's shape. No sequence stays in flight.

    A sample has each second value, and the others for the next field.
    """
    fields = [*kind.model_fields, *kind.UNSUPPORTED]
    async with serving(max_n=4) as client:
        for number, field in enumerate(fields):
            for odd in ODD if ALL else ODD[number % 2 :: 2]:
                response = await client.post(path, json={**body, field: odd})
                assert response.status_code in (200, 400, 404), (field, odd, response.text)
                if response.status_code != 200:
                    conforms("ErrorResponse", response.json())
        assert client.service.in_flight == 0


async def test_defaults_that_ask_for_nothing(serving):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": None, "stop": None, "user": "me"}
    chat = {
        "logprobs": False,
        "tools": [],
        "parallel_tool_calls": True,
        "safety_identifier": "me",
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
    }
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "A"}]},
        *CHAT["messages"],
        {"role": "assistant", "content": "B", "refusal": None, "tool_calls": None},
    ]
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, **neutral, "best_of": 1})).status_code == 200
        response = await client.post("/v1/chat/completions", json={**CHAT, **neutral, **chat, "messages": history})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 1000}]}),
        (ChatRequest, {"messages": [{str(i): 0 for i in range(1000)}]}),
        (ChatRequest, {**CHAT, "tools": [{}] * 1000}),
        (ChatRequest, {**CHAT, **{str(i): 0 for i in range(1000)}}),
        (CompletionRequest, {**TEXT, "logit_bias": {str(i): "a" for i in range(2000)}}),
        (CompletionRequest, {**TEXT, "guided_choice": [""] * 1000}),
        (CompletionRequest, {**TEXT, "structured_outputs": {"choice": [0] * 1000}}),
        (CompletionRequest, {**TEXT, "stop": [""] * 1000}),
        (CompletionRequest, {**TEXT, "stop_token_ids": [-1] * 1000}),
        (CompletionRequest, {**TEXT, "prompt": ["a"] * 1000 + [1]}),
    ],
)
def test_a_thousand_faults_make_few_errors(model, body):
    """Every error is an object and a text: collecting all of them took a minute for a body of 10 MB."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 6
