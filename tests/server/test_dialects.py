"""The SDKs of Anthropic and OpenAI with a real server process and the embedded model, on the routes beside chat completions.

The embedded model knows no tools. Grammars make it write calls, so these tests show the service, not the model. What a model
can say is tested in tests/server/dialects/.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict

MODEL = "fa-serve-demo"
QUESTION = {"role": "user", "content": "What is 17 + 25?"}
DIGITS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def claude(sdk_server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=sdk_server, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def openais(sdk_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sdk_server}/v1", api_key="secret", max_retries=0) as client:
        yield client


def message(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """The plain message, which equals the one that the SDK builds from the stream."""
    asked = {"model": MODEL, "max_tokens": 40, "messages": [QUESTION], "extra_body": {"temperature": 0}} | fields
    plain = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [b.to_dict() | {"id": ""} for b in plain.content]
    assert (streamed.stop_reason, streamed.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
    assert streamed.usage.output_tokens == plain.usage.output_tokens
    return plain


@pytest.mark.slow
def test_messages(claude) -> None:
    plain = message(claude)
    assert (plain.content[0].text, plain.stop_reason) == ("17 + 25 = 42.", "end_turn")
    cut = message(claude, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = message(claude, stop_sequences=["42", "never"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("17 + 25 = ", "stop_sequence", "42")
    whole = message(claude, max_tokens=10_000)
    assert whole.content[0].text == "17 + 25 = 42."


@pytest.mark.slow
def test_tools_of_messages(claude) -> None:
    tool = {"name": "take", "input_schema": DIGITS}
    for choice in ({"type": "tool", "name": "take"}, {"type": "any", "disable_parallel_tool_use": True}):
        called = message(claude, tools=[tool], tool_choice=choice, max_tokens=250)
        [use] = called.content
        jsonschema.validate(use.input, DIGITS)
        assert (use.name, called.stop_reason) == ("take", "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "42"}]}
    history = [QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert message(claude, messages=history, tools=[tool], max_tokens=4).usage.output_tokens == 4


def test_formats_of_messages(claude) -> None:
    output = {"format": {"type": "json_schema", "schema": DIGITS}}
    jsonschema.validate(json.loads(message(claude, output_config=output, max_tokens=250).content[0].text), DIGITS)


def test_counts_of_messages(claude) -> None:
    asked = {"model": MODEL, "messages": [QUESTION], "system": "Be brief."}
    usage = message(claude, **asked).usage
    assert claude.messages.count_tokens(**asked).input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_of_messages(claude, sdk_server) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "messages": [QUESTION]}
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        claude.messages.create(**asked | {"messages": [{"role": "user", "content": "x " * 3000}]})
    bad = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(**asked, output_config=bad)
    with (
        anthropic.Anthropic(base_url=sdk_server, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**asked)


def response(openais: openai.OpenAI, **fields: Any) -> Any:
    """The plain response, which equals the one that the SDK builds from the stream."""
    asked = {"model": MODEL, "input": [QUESTION], "temperature": 0} | fields
    plain = openais.responses.create(**asked)
    with openais.responses.stream(**asked) as stream:
        final = [event for event in stream if event.type in ("response.completed", "response.incomplete")][-1].response
    assert final.output_text == plain.output_text
    assert [item.type for item in final.output] == [item.type for item in plain.output]
    assert (final.status, final.usage.output_tokens) == (plain.status, plain.usage.output_tokens)
    return plain


def test_responses(openais) -> None:
    assert response(openais).output_text == response(openais, input=QUESTION["content"]).output_text == "17 + 25 = 42."
    cut = response(openais, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == ("incomplete", "max_output_tokens", 3)
    later = response(openais, input=[QUESTION, *response(openais).output, QUESTION], instructions="Be brief.")
    assert later.output_text


@pytest.mark.slow
def test_tools_of_responses(openais) -> None:
    tool = {"type": "function", "name": "take", "parameters": DIGITS, "strict": True}
    for choice in ("required", {"type": "function", "name": "take"}):
        called = response(openais, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        [call] = called.output
        jsonschema.validate(json.loads(call.arguments), DIGITS)
        assert (call.name, called.status) == ("take", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    assert response(openais, input=[QUESTION, call, result], tools=[tool], max_output_tokens=4).usage.output_tokens == 4


def test_a_parsed_response(openais) -> None:
    """With the most likely tokens: the chat template knows thoughts, so the grammar lets the model open some first."""
    parsed = openais.responses.parse(model=MODEL, input=[QUESTION], text_format=Verdict, temperature=0)
    assert isinstance(parsed.output_parsed, Verdict)


def test_errors_of_responses(openais) -> None:
    for fields, kind, param in (
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"input": "x " * 3000}, openai.BadRequestError, "input"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}},
            openai.BadRequestError,
            "text.format",
        ),
    ):
        with pytest.raises(kind) as refused:
            openais.responses.create(**{"model": MODEL, "input": "x"} | fields)
        assert refused.value.param == param


def test_many_at_once_in_every_dialect(sdk_server) -> None:
    async def ask() -> list[str]:
        async with (
            anthropic.AsyncAnthropic(base_url=sdk_server, api_key="secret", max_retries=0) as claude,
            openai.AsyncOpenAI(base_url=f"{sdk_server}/v1", api_key="secret", max_retries=0) as openais,
        ):

            async def one(number: int) -> str:
                if number % 3 == 0:
                    said = await claude.messages.create(
                        model=MODEL, max_tokens=40, messages=[QUESTION], extra_body={"temperature": 0}
                    )
                    return said.content[0].text
                if number % 3 == 1:
                    return (await openais.responses.create(model=MODEL, input=[QUESTION], temperature=0)).output_text
                chat = await openais.chat.completions.create(model=MODEL, messages=[QUESTION], temperature=0)
                return chat.choices[0].message.content

            return await asyncio.gather(*map(one, range(18)))

    assert set(asyncio.run(ask())) == {"17 + 25 = 42."}
