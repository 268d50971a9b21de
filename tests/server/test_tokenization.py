"""Prompts as token ids."""

import pytest

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_a_text_that_cannot_fit_is_refused_unread(serving, engine):
    engine.tokenizer.backend_tokenizer.post_processor = None  # its longest token has 13 characters, a prompt 64 tokens
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": "x" * (64 * 13 + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "832" in response.json()["error"]["message"]
