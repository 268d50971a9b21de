"""Fields that vLLM's clients send and that OpenAI's API does not have: usage in each chunk, truncation, tokens by their ids."""

import json

import pytest

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "abcdef", "max_tokens": 3}


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def chunks_of(response) -> list[dict]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {**TEXT, "echo": True}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("n", [1, 2])
async def test_each_chunk_has_the_usage_so_far(serving, path, body, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as client:
        response = await client.post(path, json={**body, "n": n, "stream": True, "stream_options": options})
    chunks = chunks_of(response)
    generated = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert generated == sorted(generated)
    assert generated[0] == 0
    assert set(range(3 * n + 1)) == set(generated)
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chunks[-2]["usage"]


async def test_without_the_usage_at_the_end_no_chunk_has_it(serving):
    async with serving() as client:
        options = {"continuous_usage_stats": True}
        response = await client.post("/v1/completions", json={**TEXT, "stream": True, "stream_options": options})
    assert all("usage" not in chunk for chunk in chunks_of(response))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 100}, "abcdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, "cdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60, "truncation_side": "right"}, "abcd"),
    ],
)
async def test_prompts_are_truncated(serving, engine, fields, kept):
    async with serving() as client:
        reply = (await client.post("/v1/completions", json={**TEXT, "echo": True, **fields})).json()
    assert engine.tokenizer.decode(engine.seen[-1].prompt) == kept
    assert reply["choices"][0]["text"].startswith(kept + "Hello")
    assert reply["usage"]["prompt_tokens"] == len(kept)


async def test_a_conversation_and_each_prompt_of_a_batch_are_truncated(serving, engine):
    async with serving() as client:
        await client.post("/v1/chat/completions", json={**CHAT, "truncate_prompt_tokens": 1})
        assert engine.tokenizer.decode(engine.seen[-1].prompt) == "<|assistant|>"
        long = {**TEXT, "prompt": [[1] * 100, [2] * 100], "truncate_prompt_tokens": 5}
        assert (await client.post("/v1/completions", json=long)).status_code == 200
    assert [len(seen.prompt) for seen in engine.seen[-2:]] == [5, 5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncation_side": "middle", "truncate_prompt_tokens": 1}, "truncation_side"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
async def test_what_is_refused_is_named(serving, fields, param):
    async with serving() as client:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            refused = await client.post(path, json=body | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        defaults = {"use_beam_search": False, "length_penalty": 1.0}
        assert (await client.post("/v1/completions", json=TEXT | defaults)).status_code == 200


async def test_tokens_are_named_by_their_ids(serving):
    async with serving() as client:
        fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
        scores = (await client.post("/v1/completions", json={**TEXT, **fields, "logprobs": 1})).json()["choices"][0]["logprobs"]
        chat = {**CHAT, **fields, "logprobs": True, "top_logprobs": 1}
        [first, _] = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
        plain = {**chat, "return_tokens_as_token_ids": False}
        [named, _] = (await client.post("/v1/chat/completions", json=plain)).json()["choices"][0]["logprobs"]["content"]
    assert scores["tokens"] == ["token_id:0", "token_id:1"]
    assert scores["top_logprobs"][0].keys() == {"token_id:0", "token_id:1"}
    assert scores["text_offset"] == [0, 1]
    assert (first["token"], first["top_logprobs"][0]["token"]) == ("token_id:0", "token_id:1")
    assert first["bytes"] == named["bytes"] == list(named["token"].encode())


async def test_tokenize_returns_the_tokens_as_the_vocabulary_writes_them(serving):
    async with serving() as client:
        asked = {"prompt": "a b", "return_token_strs": True}
        assert (await client.post("/tokenize", json=asked)).json()["token_strs"] == ["a", "Ġ", "b"]
        chat = {"messages": CHAT["messages"], "return_token_strs": True}
        strings = (await client.post("/tokenize", json=chat)).json()["token_strs"]
        assert strings == ["<|user|>", "H", "i", "<|assistant|>"]
        assert "token_strs" not in (await client.post("/tokenize", json={"prompt": "a b"})).json()


async def test_the_tokenizers_configuration_is_served_if_it_is_asked_for(serving, engine, tmp_path):
    async with serving() as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
        assert "/tokenizer_info" not in (await client.get("/openapi.json")).json()["paths"]
    async with serving(tokenizer_info=True) as client:
        info = (await client.get("/tokenizer_info")).json()
        assert "/tokenizer_info" in (await client.get("/openapi.json")).json()["paths"]
    assert (info["tokenizer_class"], info["eos_token"]) == (type(engine.tokenizer).__name__, "<|end|>")
    assert "raise_exception" in info["chat_template"]
    assert not [name for name in info if name.endswith(("_file", "_path", "_object"))]
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    async with serving(tokenizer_info=True, chat_template=path, api_keys="secret") as client:
        assert (await client.get("/tokenizer_info")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        info = (await client.get("/tokenizer_info", headers=headers)).json()
    assert info["chat_template"] == "{{ messages[0].content }}"


async def test_a_lenient_server_ignores_unknown_fields_inside_messages(serving):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, "x": 1}
    extra = [
        {"role": "user", "content": "Hi", "timestamp": 1},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]},
    ]
    called = {"messages": [extra[0], {"role": "assistant", "tool_calls": [call], "x": 1}]}
    async with serving(lenient=True) as client:
        for message in extra:
            assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": [message]})).status_code == 200
        refused = await client.post("/v1/chat/completions", json={**CHAT, **called})
        assert "tool calls" in refused.json()["error"]["message"], "only the template refuses it"
        for fields in ({"x": 1}, {"messages": [{**extra[0], "audio": {}}]}):
            assert (await client.post("/v1/chat/completions", json={**CHAT, **fields})).status_code == 400
    async with serving() as client:
        for message in extra:
            assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": [message]})).status_code == 400


async def test_a_role_passes_where_the_template_writes_it(serving, engine):
    other = {**CHAT, "messages": [{"role": "ipython", "content": " 42\n"}]}
    async with serving() as client:
        assert (await client.post("/v1/chat/completions", json=other)).status_code == 200
        assert "<|ipython|> 42" in engine.tokenizer.decode(engine.seen[-1].prompt)
    engine.error = None
    engine.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}x"
    async with serving() as client:
        refused = await client.post("/v1/chat/completions", json=other)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        bad = {**CHAT, "messages": [{"role": "a|b", "content": "x"}]}
        refused = await client.post("/v1/chat/completions", json=bad)
        assert refused.json()["error"]["param"] == "messages[0].role"
