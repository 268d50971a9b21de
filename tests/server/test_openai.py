"""openai-python with every route of a real server, and each night its async client, whose requests are the same.

The embedded model knows neither tools nor JSON. Grammars make it write both, so these tests show the service, not the model.
"""

import asyncio
import inspect
import json
from operator import attrgetter
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from sampled_cases import whole_runs

MODEL = "fa-serve-demo"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 250}
DIGITS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Digit"}, "b": {"$ref": "#/$defs/Digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
ADD = {"type": "function", "function": {"name": "add", "parameters": DIGITS, "strict": True}}


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sure: bool
    word: Literal["yes", "no"]


@pytest.fixture(params=["sync", pytest.param("async", marks=whole_runs)])
def api(request, sdk_server):
    """`api(path, **fields)`: the reply of that method of openai-python, or the list of chunks of a stream."""

    def sync(path: str, *arguments: Any, **fields: Any) -> Any:
        with openai.OpenAI(base_url=f"{sdk_server}/v1", api_key="secret", max_retries=0) as client:
            reply = attrgetter(path)(client)(*arguments, **fields)
            return list(reply) if isinstance(reply, openai.Stream | openai.pagination.SyncPage) else reply

    async def later(path: str, *arguments: Any, **fields: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{sdk_server}/v1", api_key="secret", max_retries=0) as client:
            reply = attrgetter(path)(client)(*arguments, **fields)
            reply = await reply if inspect.isawaitable(reply) else reply
            return [item async for item in reply] if hasattr(reply, "__aiter__") else reply

    if request.param == "sync":
        return sync
    return lambda *arguments, **fields: asyncio.run(later(*arguments, **fields))


@pytest.fixture(scope="module")
def chat(conforms):
    """`chat(api, **fields)`: the choice of the plain reply. It conforms to OpenAI's schema and equals the sum of its stream."""

    def ask(api, **fields: Any) -> Any:
        plain = api("chat.completions.create", **{**ASK, **fields})
        conforms("CreateChatCompletionResponse", as_openai(plain))
        choice = plain.choices[0]
        message = plain.choices[0].message
        content = ""
        thoughts = ""
        calls = {}
        reason = None
        for chunk in api("chat.completions.create", **{**ASK, **fields}, stream=True):
            conforms("CreateChatCompletionStreamResponse", as_openai(chunk))
            delta = chunk.choices[0].delta
            reason = chunk.choices[0].finish_reason
            content = content + (delta.content or "")
            thoughts = thoughts + getattr(delta, "reasoning_content", "")
            for call in delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.function.name or ""), arguments + call.function.arguments)
        assert (content, thoughts) == (message.content or "", getattr(message, "reasoning_content", ""))
        assert [*calls.values()] == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        assert reason == choice.finish_reason
        return choice

    return ask


def as_openai(reply: BaseModel) -> Any:
    """The reply without reasoning_content, which OpenAI's schemas do not have."""
    data = reply.model_dump(exclude_unset=True)
    for choice in data["choices"]:
        choice.get("message", choice.get("delta")).pop("reasoning_content", None)
    return data


@pytest.mark.slow
def test_forced_calls(api, chat):
    named = chat(api, tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.finish_reason == "stop"
    required = chat(api, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    assert required.finish_reason == "tool_calls"
    for choice in (named, required):
        [call] = choice.message.tool_calls
        assert (choice.message.content, call.function.name) == (None, "add")
        jsonschema.validate(json.loads(call.function.arguments), DIGITS)


def test_strict_tools_may_be_left_alone_or_called(api, chat):
    assert chat(api, tools=[ADD], max_tokens=8).message.tool_calls is None
    # the grammar of a response_format leaves the model only the choice between an object and a call
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    other = {"type": "json_schema", "json_schema": {"name": "nothing", "schema": nothing}}
    choice = chat(api, tools=[ADD], response_format=other, parallel_tool_calls=False)
    for call in choice.message.tool_calls or ():
        assert call.function.name == "add"
    assert choice.message.tool_calls or json.loads(choice.message.content) == {}


def test_a_conversation_with_a_tool(api, chat):
    message = chat(api, tools=[ADD], tool_choice="required", parallel_tool_calls=False).message
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    chat(api, messages=[*ASK["messages"], message, answer], tools=[ADD], max_tokens=4)


def test_structured_outputs(api, chat):
    schema = {"type": "json_schema", "json_schema": {"name": "digits", "schema": DIGITS, "strict": True}}
    jsonschema.validate(json.loads(chat(api, response_format=schema).message.content), DIGITS)
    assert isinstance(json.loads(chat(api, response_format={"type": "json_object"}).message.content), dict)
    parsed = api("chat.completions.parse", **ASK, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    assert chat(api, extra_body={"guided_choice": ["maybe", "never"]}).message.content in ("maybe", "never")
    text = api("completions.create", model=MODEL, prompt="x", extra_body={"guided_regex": "[0-9]{3}/[ab]"}).choices[0].text
    assert text[:3].isdecimal()
    assert text[3:] in ("/a", "/b")
    assert chat(api, extra_body={"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}).message.content in ("ab", "cd")


def test_thoughts(api, chat):
    """The prompt opens the thoughts, and the model never closes them. The chat template handles thoughts in the history."""
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "max_tokens": 12}
    choice = chat(api, **thinking)
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning_content
    held = chat(api, **thinking, response_format={"type": "json_object"})
    assert held.message.reasoning_content, "thoughts come before what is held to a format"
    later = {"role": "assistant", "content": "42", "reasoning_content": choice.message.reasoning_content}
    assert chat(api, messages=[*ASK["messages"], later, *ASK["messages"]], max_tokens=4).message.content


# each rule leads to the next; the depth of such a grammar once overflowed the compiler's stack and ended a server
DEEP = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(15_000)) + 'a15000: "x"'
BAD = [
    ({"tools": [{**ADD, "function": {"name": "f", "parameters": {"type": "nonsense"}}}], "tool_choice": "required"}, "tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}}, "response_format"),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ({"extra_body": {"guided_grammar": "nonsense"}}, "guided_grammar"),
    ({"extra_body": {"guided_grammar": "start: start"}}, "guided_grammar"),
    ({"extra_body": {"guided_grammar": DEEP + " " * (1 << 18)}}, "guided_grammar"),
    ({"extra_body": {"guided_regex": "[0-9]{30}", "allowed_token_ids": [5]}}, "guided_regex"),
    ({"extra_body": {"guided_json": "{"}}, "guided_json"),
    ({"extra_body": {"structured_outputs": {"json": {"type": "nonsense"}}}}, "structured_outputs"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("fields", "param"), BAD, ids=[param for _, param in BAD])
def test_what_cannot_be_followed_is_named(api, conforms, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        api("chat.completions.create", **{**ASK, **fields})
    assert refused.value.param == param
    conforms("ErrorResponse", refused.value.response.json())


def test_a_deep_grammar_is_followed(api, chat):
    assert chat(api, extra_body={"guided_grammar": DEEP}).message.content == "x"


def test_completions(api, conforms):
    body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    plain = api("completions.create", **body, echo=True)
    scores = plain.choices[0].logprobs
    alone = api("completions.create", **body)
    conforms("CreateCompletionResponse", alone.model_dump(exclude_unset=True))
    assert scores.token_logprobs[0] is None
    assert "".join(scores.tokens) == plain.choices[0].text == "import os\n" + alone.choices[0].text
    answer = len(alone.choices[0].logprobs.tokens)
    assert scores.tokens[-answer:] == alone.choices[0].logprobs.tokens
    assert scores.token_logprobs[-answer:] == pytest.approx(alone.choices[0].logprobs.token_logprobs, abs=1e-3)
    chunks = api("completions.create", **body, echo=True, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
    streamed = [score for chunk in chunks for choice in chunk.choices for score in choice.logprobs.token_logprobs]
    assert streamed[1:] == pytest.approx(scores.token_logprobs[1:], abs=1e-3)


def test_the_best_are_the_likeliest(api):
    body = {"model": MODEL, "prompt": "import", "max_tokens": 6, "temperature": 1, "seed": 5, "logprobs": 0}
    body["extra_body"] = {"ignore_eos": True}
    every = api("completions.create", **body, n=6).choices
    best = api("completions.create", **body, n=2, best_of=6).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best] == [choice.text for choice in ranked[:2]]


def test_prompt_logprobs(api):
    [choice] = api(
        "completions.create", model=MODEL, prompt="import os", max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices
    first, *others = choice.prompt_logprobs
    assert first is None
    assert others
    assert all(score["logprob"] <= 0 for entry in others for score in entry.values())
    assert all(min(score["rank"] or 2 for score in entry.values()) == 1 for entry in others)


def test_models_and_what_is_beyond_openai(api, sdk_server):
    assert [model.id for model in api("models.list")] == [MODEL]
    card = api("models.retrieve", MODEL)
    assert (card.owned_by, card.task, card.input_modalities) == ("fa_serve", "generate", ["text"])
    with httpx.Client(base_url=sdk_server, headers={"authorization": "Bearer secret"}) as client:
        tokens = client.post("/tokenize", json={"messages": ASK["messages"], "tools": [ADD]}).json()
        assert '"name": "add"' in client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
        for path in ("health", "ready", "version", "metrics", "openapi.json", "docs"):
            assert client.get(f"/{path}").status_code == 200, path
