"""The fields that ask for a structured output."""

import pytest

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_guided_outputs_reach_the_engine(serving, engine):
    schema = {"type": "object"}
    asked = [
        ({"guided_json": schema}, "json_schema", schema),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",)),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
    ]
    chat = [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}},
            "json_schema",
            schema,
        ),
    ]
    async with serving() as client:
        for path, body, cases in (("/v1/completions", TEXT, asked), ("/v1/chat/completions", CHAT, asked + chat)):
            for fields, name, value in cases:
                assert (await client.post(path, json={**body, **fields})).status_code == 200, fields
                assert getattr(engine.seen[-1].params.structured, name) == value
        assert (
            await client.post("/v1/chat/completions", json={**CHAT, "response_format": {"type": "text"}})
        ).status_code == 200
        assert engine.seen[-1].params.structured is None
