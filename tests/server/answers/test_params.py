"""A request's fields as the engine's parameters."""

import pytest

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_sampling_reaches_the_engine(serving, engine):
    wanted = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "stop": "x", "stop_token_ids": [3], "ignore_eos": True}
    same = {
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "speculative": False,
    }
    wanted |= {**same, "logit_bias": {"5": -100}, "allowed_token_ids": [5, 6], "max_tokens": 9, "priority": -3}
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, **wanted})).status_code == 200
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 4})).status_code == 200
    params = engine.seen[0].params
    assert engine.seen[0].priority == -3
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0, 0.5, 0, 7, 9)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (3,), True)
    assert {name: getattr(params, name) for name in same} == same
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -100}, (5, 6))
    assert engine.seen[1].params.max_tokens == 4


async def test_a_token_id_of_thousands_of_digits_is_refused_unread(serving, engine):
    """1,024 keys of 4,290 digits held up the event loop for 275 ms."""
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | {"logit_bias": {"9" * 17: 1}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
        assert "at most 16 characters" in response.json()["error"]["message"]
