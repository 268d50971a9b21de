"""Chats over a fake engine that says what a model would say, with tools and thoughts, read by openai-python's stream reader."""

import json
from typing import Any

import openai
import pytest
from fa_serve.server.chat.conversation import Tool
from fa_serve.server.chat.tool_schemas import call_list_schema

from fa_serve.engine.request.params import MAX_STRUCTURED

pytestmark = pytest.mark.anyio


THINKING = (
    "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    "{% if open %}<think>\n{% elif enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}


NOW = {"type": "function", "function": {"name": "now"}}


CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "tools": [ADD, NOW]}


CALLS = (
    "I",
    " add",
    ".\n<tool",
    '_call>\n{"name": "a',
    'dd", "arguments": {"a"',
    ": 1, ",
    '"b": 2}}',
    "\n</tool_call>\n",
    '<tool_call>{"name": "now"}',
    "</tool_call>",
)


def spoken_by(client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client)


async def both(client, conforms, **body):
    """The plain reply, and the chunks of its stream. openai-python's sum of the chunks must equal the reply, except for ids."""
    api = spoken_by(client)
    plain = await api.chat.completions.create(**body)
    conforms("CreateChatCompletionResponse", trimmed(plain))
    chunks = []
    whole = None
    async with api.chat.completions.stream(**body) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        whole = stream.current_completion_snapshot
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", trimmed(chunk))
    for one, other in zip(plain.choices, whole.choices, strict=True):
        assert other.finish_reason == one.finish_reason
        assert (other.message.content or "") == (one.message.content or "")
        assert called(other.message) == called(one.message)
        assert len({call.id for call in other.message.tool_calls or ()}) == len(called(one.message))
    return plain, chunks


def called(message) -> list[tuple[str, str]]:
    assert all(call.type == "function" for call in message.tool_calls or ())
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def trimmed(reply) -> Any:
    """The reply without reasoning_content, which OpenAI's schemas do not have."""
    data = reply.model_dump(exclude_unset=True)
    for choice in data["choices"]:
        choice.get("message", choice.get("delta")).pop("reasoning_content", None)
    return data


async def test_calls(teller, conforms, engine):
    async with teller(CALLS) as client:
        plain, chunks = await both(client, conforms, **CHAT)
    [choice] = plain.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    assert called(choice.message) == [("add", '{"a": 1, "b": 2}'), ("now", "{}")]
    pieces = [call.function.arguments for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 3, "the arguments stream as they come"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
    prompt = engine.tokenizer.decode(engine.seen[0].prompt)
    given = json.JSONDecoder().raw_decode(prompt)[0]
    assert given == ADD
    assert '"parameters": {"type": "object", "properties": {}}' in prompt, "templates expect parameters"


async def test_no_call_is_plain_content(teller, conforms):
    async with teller((" 1 <", " 2\n")) as client:
        plain, _ = await both(client, conforms, **CHAT)
    assert (plain.choices[0].message.content, plain.choices[0].message.tool_calls) == (" 1 < 2\n", None)
    assert plain.choices[0].finish_reason == "stop"


async def test_a_single_call_and_none(teller, conforms, engine):
    async with teller(CALLS) as client:
        plain, _ = await both(client, conforms, **CHAT, parallel_tool_calls=False)
        assert [call.function.name for call in plain.choices[0].message.tool_calls] == ["add"]
        plain, _ = await both(client, conforms, **CHAT, tool_choice="none")
    assert plain.choices[0].message.content == "".join(CALLS)
    assert "Adds." not in engine.tokenizer.decode(engine.seen[-1].prompt)


async def test_cut_off_in_a_call(teller, conforms):
    async with teller(CALLS) as client:
        plain, _ = await both(client, conforms, **CHAT, max_tokens=6)
    assert plain.choices[0].finish_reason == "length"
    assert plain.choices[0].message.tool_calls[0].function.arguments == '{"a": 1, '


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["required", "named"])
async def test_forced(teller, conforms, engine, choice):
    arguments = '{"a": 1, "b": 2}'
    text = arguments if choice != "required" else f'[{{"name": "add", "parameters": {arguments}}}]'
    async with teller(tuple(text)) as client:
        plain, _ = await both(client, conforms, **CHAT, tool_choice=choice, parallel_tool_calls=False)
    [message] = [choice.message for choice in plain.choices]
    assert (message.content, called(message)) == (None, [("add", arguments)])
    assert plain.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop"), (
        "OpenAI says stop for a named function"
    )
    schema = engine.seen[0].params.structured.json_schema
    if choice == "required":
        assert (schema["minItems"], schema["maxItems"], len(schema["items"]["anyOf"])) == (1, 1, 2)
        assert schema["$defs"]["add"] == NUMBERS
    else:
        assert schema == NUMBERS


async def test_history(teller, engine):
    """A client sends the message of the reply back, together with the tool's answer."""
    async with teller(CALLS) as client:
        api = spoken_by(client)
        reply = (await api.chat.completions.create(**CHAT)).choices[0].message
        answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": [{"type": "text", "text": "3"}]}
        reply.tool_calls = reply.tool_calls[:1]
        await api.chat.completions.create(**{**CHAT, "messages": [*CHAT["messages"], reply, answer], "tools": openai.omit})
    prompt = engine.tokenizer.decode(engine.seen[1].prompt)
    assert prompt == f"<|user|>Hi<|assistant|>I add.[{reply.tool_calls[0].id}:add:2]<|tool|>3<|assistant|>"


async def test_special_tokens_are_shown_where_they_are_markers(teller, engine):
    async with teller(CALLS) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        del client.service.tokenization.special_tokens
        engine.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "tool_choice": "none"})
        await client.post("/v1/completions", json={"model": "fake", "prompt": "Hi", "skip_special_tokens": False})
    assert [seen.params.skip_special_tokens for seen in engine.seen] == [True, False, True, False]


async def test_the_operator_names_the_format(teller, conforms):
    words = ("[TOOL_CALLS]", "now[ARGS]", '{"a": 1}')
    plain_template = teller.template.replace("<tool_call></tool_call>", "")
    async with teller(words, plain_template, tool_call_parser="mistral") as client:
        plain, _ = await both(client, conforms, **CHAT)
    [call] = plain.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, len(call.id)) == ("now", '{"a": 1}', 9)


THOUGHTS = ("<thi", "nk>\nOne", "\nand", "\n", "</think>", "\n\n", "Four", ".")


ASK = {"model": "fake", "messages": CHAT["messages"]}


@pytest.mark.parametrize("mode", ["own", "open", "closed", "off"])
async def test_thoughts(teller, conforms, mode):
    words = THOUGHTS if mode in ("own", "off") else ("One\nand\n</think>Four.",) if mode == "open" else ("Four.",)
    variables = {"open": True} if mode == "open" else {"enable_thinking": False} if mode == "closed" else {}
    async with teller(words, THINKING, reasoning_parser="none" if mode == "off" else "auto") as client:
        plain, chunks = await both(client, conforms, **ASK, n=2, extra_body={"chat_template_kwargs": variables})
    streamed = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice.delta, "reasoning_content", "")
    for choice in plain.choices:
        thoughts = getattr(choice.message, "reasoning_content", "")
        assert thoughts == streamed[choice.index] == ("One\nand" if mode in ("own", "open") else "")
        assert choice.message.content == ("".join(THOUGHTS) if mode == "off" else "Four.")


async def test_thoughts_that_go_on(teller, conforms):
    """The last message has begun to think, or does not think: the answer begins where it ends, with its spaces."""
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    begun = [*CHAT["messages"], {"role": "assistant", "content": "<think>Hm,"}]
    async with teller((" well", ".</think>\n", "Four."), THINKING) as client:
        plain, _ = await both(client, conforms, model="fake", messages=begun, extra_body=asked)
        message = plain.choices[0].message
        assert (message.reasoning_content, message.content) == (" well.", "Four.")
        begun[-1] = {"role": "assistant", "content": "It is"}
        plain, _ = await both(client, conforms, model="fake", messages=begun, extra_body=asked)
        message = plain.choices[0].message
        assert message.content == " well.</think>\nFour."
        assert not hasattr(message, "reasoning_content")


async def test_thoughts_before_a_call(teller, conforms):
    async with teller((*THOUGHTS, *CALLS), THINKING + teller.template) as client:
        plain, _ = await both(client, conforms, **CHAT)
    message = plain.choices[0].message
    assert (message.reasoning_content, message.content) == ("One\nand", "Four.I add.")
    assert len(message.tool_calls) == 2


async def test_what_the_engine_is_told_to_hold_to(teller, engine):
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBERS}}}
    grammar = {"guided_grammar": 'start: "a"'}

    async def held(client, **fields):
        response = await client.post("/v1/chat/completions", json={**ASK, **fields})
        if response.status_code != 200:
            return response.json()["error"]["param"]
        output = engine.seen[-1].params.structured
        return output and (output.grammar.split("\n")[0] if output.grammar else output.json_schema)

    async with teller(("a",)) as client:
        assert await held(client, tools=[ADD]) is None, "nothing asks for a grammar"
        assert await held(client, tools=[ADD, strict | NOW]) is None
        assert await held(client, tools=[strict]) == "start: (call (WS call)* | TEXT?)"
        assert await held(client, tools=[strict], parallel_tool_calls=False) == "start: (call | TEXT?)"
        assert await held(client, tools=[strict], tool_choice="none") is None
        assert await held(client, tools=[ADD], **schema) == "start: (answer | call (WS call)*)"
        assert await held(client, tools=[ADD], tool_choice="none", **schema) == NUMBERS
        assert await held(client, tools=[ADD], tool_choice="required", **schema) == "tool_choice"
        assert await held(client, tools=[ADD], **grammar) == "guided_grammar"
        assert await held(client, **grammar) == 'start: "a"'
        engine.tokenizer.chat_template = THINKING
        assert await held(client, **schema) == 'start: ("<think>" thoughts WS)? (answer)'
        assert await held(client, **schema, chat_template_kwargs={"open": True}) == "start: thoughts WS (answer)"
        assert await held(client, **schema, chat_template_kwargs={"enable_thinking": False}) == NUMBERS
        assert await held(client, **grammar) == 'start: "a"', "the grammar of a request constrains the whole answer"
        assert await held(client, guided_json="{") == "guided_json"


async def test_errors_of_a_composed_grammar_are_those_of_what_the_client_has_written(teller, engine):
    """The engine names and quotes the part to blame. What makes the grammar too long is not quoted either."""
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBERS}}}
    calls = call_list_schema([Tool(**strict)], "parameters", False)

    async def parts(client, **fields):
        await client.post("/v1/chat/completions", json={**ASK, **fields})
        return [each.json_schema for each in engine.seen[-1].params.structured.parts]

    async with teller(("a",), THINKING) as client:
        assert await parts(client, **schema) == [NUMBERS]
        long = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "guided_regex": "a" * MAX_STRUCTURED}
        response = await client.post("/v1/chat/completions", json=long)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "guided_regex")
        rule = f"have at most {MAX_STRUCTURED} characters together with the grammar of thoughts and calls"
        assert error["message"].startswith(f"guided_regex: regex must {rule}, got 'aaa")
    async with teller(("a",)) as client:
        assert await parts(client, tools=[strict]) == [calls]
        assert await parts(client, tools=[ADD], **schema) == [NUMBERS, call_list_schema([Tool(**ADD)], "parameters", False)]


def frames(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_chat(serving, conforms, engine):
    async with serving() as client:
        reply = (await client.post("/v1/chat/completions", json=ASK)).json()
    conforms("CreateChatCompletionResponse", reply)
    message = {"role": "assistant", "content": "Hello, wörld", "refusal": None}
    assert reply["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    assert engine.tokenizer.decode(engine.seen[0].prompt) == "<|user|>Hi<|assistant|>"
    assert engine.seen[0].params.max_tokens == engine.max_model_len - len(engine.seen[0].prompt)


async def test_chat_stream(serving, conforms):
    async with serving() as client:
        response = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
    chunks = frames(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk)
        assert "usage" not in chunk
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:]] == ["Hello", ",", " wörld"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert len({c["id"] for c in chunks}) == 1


def top(token, logprob):
    """An entry for a token of the fake engine, whose ids count the characters of the byte-level alphabet from "!" on."""
    return {"token": chr(0x21 + token), "logprob": logprob, "bytes": [0x21 + token]}


async def test_chat_logprobs(serving, conforms):
    async with serving() as client:
        body = {**ASK, "logprobs": True, "top_logprobs": 2}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        chunks = frames((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        none = (await client.post("/v1/chat/completions", json={**ASK, "logprobs": True})).json()
        for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
            assert (await client.post("/v1/chat/completions", json={**ASK, **wrong})).status_code == 400
    conforms("CreateChatCompletionResponse", reply)
    content = [{**top(i, -0.5), "top_logprobs": [top(i + 1, -0.25), top(i + 2, -9999.0)]} for i in range(3)]
    assert reply["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content
    assert [entry["top_logprobs"] for entry in none["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_a_long_text_is_read_beside_the_event_loop(serving, engine):
    """Calls are found character by character, which takes 100 ms for 100,000 of them."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    engine.tokenizer.chat_template = "{% if tools %}T{% endif %}{{ messages[0].content }}"
    threads = []
    async with serving(tool_call_parser="hermes") as client:
        write = client.service.write

        async def noted(work, key):
            threads.append(key)
            return await write(work, key)

        client.service.write = noted
        for length, count in ((100, 0), (10_000, 1)):
            engine.words = ('<tool_call>{"name": "add", "arguments": {"a": "' + "x" * length + '"}}</tool_call>',)
            reply = (await client.post("/v1/chat/completions", json=CHAT | {"tools": [tool], "max_tokens": 4})).json()
            [call] = reply["choices"][0]["message"]["tool_calls"]
            assert call["function"]["arguments"] == '{"a": "' + "x" * length + '"}'
            assert len(threads) == count
