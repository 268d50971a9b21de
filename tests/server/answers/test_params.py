"""A request's fields as the engine's parameters."""

import pytest

from fa_serve.engine import SamplingParams

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


async def test_the_parameters_of_a_request_are_validated_once_for_all_its_prompts(serving, engine, monkeypatch):
    """128 prompts and 3 fields of 1,024 token ids took the event loop 90 ms."""
    checked = []
    check = SamplingParams._check_tokens
    monkeypatch.setattr(SamplingParams, "_check_tokens", lambda self: checked.append(self) or check(self))
    ids = list(range(8))
    body = {"model": "fake", "prompt": ["x" * (1 + i % 3) for i in range(128)], "stop_token_ids": ids}
    body |= {"allowed_token_ids": ids, "logit_bias": dict.fromkeys(map(str, ids), 1)}
    async with serving() as client:
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert len(checked) == 1
    assert [len(each.prompt) + each.params.max_tokens for each in engine.seen[:3]] == [17, 18, 19]
    assert len({id(each.params.stop_token_ids) for each in engine.seen}) == 1


async def test_an_answer_that_is_cut_to_its_size_below_min_tokens_is_refused(serving):
    async with serving(max_answer_bytes=2000) as client:
        body = {"model": "fake", "prompt": "x", "min_tokens": 16, "logprobs": 20, "n": 4}
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "min_tokens"
