"""Beam search: against a plain search without an early end, against a model's own scores, and over a fake engine."""

import asyncio
import itertools
import math
import random

import httpx
import pytest
import torch
from fa_serve.server.answers.beam_search import Search
from transformers import AutoModelForCausalLM

from fa_serve.demo import model_path
from fa_serve.engine import EngineConfig, QueueFullError, RequestError, TokenLogprob

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi", "use_beam_search": True, "max_tokens": 4}


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True}


def entry_of(scores: dict[int, float], count: int) -> TokenLogprob:
    top = sorted(scores.items(), key=lambda pair: -pair[1])[:count]
    return TokenLogprob(top[0][0], top[0][1], top)


def scores_after(tokens: tuple[int, ...], seed: int, vocab_size: int) -> dict[int, float]:
    """Log-probabilities of the next token, which depend on all tokens before it."""
    draw = random.Random(f"{seed} {tokens}")
    weights = [draw.random() ** 3 + 1e-3 for _ in range(vocab_size)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def searched(width: int, max_tokens: int, end_ids: set[int], penalty: float, seed: int, vocab_size: int):
    """-> the best answers, and how many steps were taken"""
    search = Search(width, max_tokens, frozenset(end_ids), penalty)
    steps = 0
    while not search.is_over():
        search.step([entry_of(scores_after(tuple(beam.tokens), seed, vocab_size), 2 * width) for beam in search.live])
        steps += 1
    return [(tuple(beam.tokens), beam.logprob) for beam in search.best()], steps


def expected(width: int, max_tokens: int, end_ids: set[int], penalty: float, scores, count: int):
    """The same without an end before max_tokens, in another form: (tokens, log-probability), the best first.

    scores: of the tokens that may follow some tokens
    """
    live = [((), 0.0)]
    ended = []
    for _ in range(max_tokens):
        found = []
        for tokens, total in live:
            for token, value in sorted(scores(tokens).items(), key=lambda pair: -pair[1])[:count]:
                (ended if token in end_ids else found).append(((*tokens, token), total + value))
        live = sorted(found, key=lambda beam: -beam[1])[:width]
    return sorted(ended + live, key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]


@pytest.mark.parametrize("penalty", [-1.5, 0.0, 0.6, 1.0, 2.0])
def test_the_search_ends_early_and_finds_what_it_would_find_later(penalty):
    early = 0
    for seed, width in itertools.product(range(25), (1, 2, 5)):
        found, steps = searched(width, 9, {0, 3}, penalty, seed, 7)
        wanted = expected(width, 9, {0, 3}, penalty, lambda tokens, seed=seed: scores_after(tokens, seed, 7), 2 * width)
        assert found == [(tokens, pytest.approx(total)) for tokens, total in wanted]
        early += steps < 9
    assert early > 5, "of 75 searches"


def test_as_many_beams_as_answers_find_the_best_of_all():
    def total(tokens):
        return sum(scores_after(tokens[:i], 1, 3)[token] for i, token in enumerate(tokens))

    every = sorted(itertools.product(range(3), repeat=2), key=lambda tokens: -total(tokens))
    found, _ = searched(9, 2, set(), 1.0, 1, 3)
    assert [tokens for tokens, _ in found] == every
    assert searched(1, 2, set(), 1.0, 1, 3)[0][0][1] == pytest.approx(
        max(total((t, u)) for t, u in every if t == found[0][0][0])
    )


def test_tokens_that_cannot_come_are_no_beams():
    search = Search(2, 3, frozenset(), 1.0)
    search.step([TokenLogprob(4, -0.1, [(4, -0.1), (5, -math.inf)])])
    assert [beam.tokens for beam in search.live] == [[4]]


@pytest.mark.slow
async def test_beams_of_the_embedded_model_are_those_of_its_own_scores(served):
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    prompt = [5, 17, 40, 9]
    ids = model.generation_config.eos_token_id
    end_ids = set(ids if isinstance(ids, list) else [ids])

    @torch.no_grad()
    def scores(tokens):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
        return dict(enumerate(logits.log_softmax(-1).tolist()))

    body = {"model": "fa-serve-demo", "prompt": prompt, "use_beam_search": True, "return_token_ids": True, "logprobs": 2}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        for n, penalty in ((3, 1.0), (2, -1.0)):
            wanted = expected(n, 6, end_ids, penalty, scores, 2 * n)
            reply = await client.post("/v1/completions", json={**body, "n": n, "max_tokens": 6, "length_penalty": penalty})
            choices = reply.json()["choices"]
            assert [tuple(choice["token_ids"]) for choice in choices] == [tokens for tokens, _ in wanted]
            totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
            assert totals == pytest.approx([total for _, total in wanted], abs=1e-3)
            assert {choice["finish_reason"] for choice in choices} <= {"length", "stop"}
            again = await client.post("/detokenize", json={"tokens": choices[0]["token_ids"]})
            assert choices[0]["text"].strip() in again.json()["prompt"]
        unknown = await client.post("/v1/completions", json={**body, "max_tokens": 6, "stop_token_ids": [10_000_000]})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "stop_token_ids")
        alone = {**body, "max_tokens": 6, "temperature": 0}
        greedy = await client.post("/v1/completions", json={**alone, "use_beam_search": False})
        [one] = (await client.post("/v1/completions", json=alone)).json()["choices"]
        assert one["text"] == greedy.json()["choices"][0]["text"]


async def test_each_step_asks_for_one_token_after_each_beam(serving, engine):
    engine.eos_ids = frozenset({99})
    async with serving() as client:
        reply = (await client.post("/v1/completions", json={**TEXT, "n": 3, "max_tokens": 2, "logprobs": 1})).json()
        counted = (await client.get("/metrics")).text
    prompt = engine.seen[0].prompt
    assert [seen.prompt for seen in engine.seen] == [prompt, [*prompt, 1]]
    assert {(seen.params.max_tokens, seen.params.logprobs, seen.params.greedy) for seen in engine.seen} == {(1, 6, True)}
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-0.25, -0.25]
    assert reply["usage"]["completion_tokens"] == 2
    assert 'fa_serve:request_success_total{finished_reason="length",model_name="fake"} 1.0' in counted, (
        "one sequence, two steps"
    )


async def test_an_end_token_ends_a_beam_and_is_not_in_its_text(serving, engine):
    engine.eos_ids = frozenset({1})
    async with serving() as client:
        reply = (await client.post("/v1/completions", json={**TEXT, "return_token_ids": True})).json()
        ignored = (await client.post("/v1/completions", json={**TEXT, "return_token_ids": True, "ignore_eos": True})).json()
    [choice] = reply["choices"]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([1], "", "stop")
    [choice] = ignored["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([1, 1, 1, 1], "length")


async def test_as_many_log_probabilities_as_were_asked_for(serving, engine):
    """The search of one beam needs two, and of three beams six."""
    async with serving() as client:
        one = (await client.post("/v1/completions", json={**TEXT, "logprobs": 5})).json()["choices"][0]["logprobs"]
        none = (await client.post("/v1/completions", json=TEXT)).json()["choices"][0]["logprobs"]
    assert {seen.params.logprobs for seen in engine.seen} == {5, 2}
    assert [len(top) for top in one["top_logprobs"]] == [5] * 4
    assert none is None


async def test_a_chat_has_beams_too(serving):
    async with serving() as client:
        reply = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, "n": 1, "logprobs": True})
    [choice] = reply.json()["choices"]
    assert choice["message"]["content"]
    assert len(choice["logprobs"]["content"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 11}, "n"),
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
async def test_what_beams_cannot_have_is_refused_by_name(serving, engine, fields, param):
    async with serving() as client:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            refused = await client.post(path, json=body | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": [], "repetition_penalty": 1, "stream": False, "seed": 1}
        assert (await client.post("/v1/completions", json=TEXT | neutral)).status_code == 200
        for field in ({"best_of": 2}, {"echo": True}):
            refused = await client.post("/v1/completions", json=TEXT | field)
            assert [refused.json()["error"]["param"]] == list(field)
        warm = await client.post("/v1/completions", json=TEXT | {"temperature": 0.7})
        assert warm.json()["error"]["message"] == "temperature must be 0 or 1 with use_beam_search."


async def test_tools_whose_arguments_are_enforced_are_refused(serving):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}}
    async with serving(tool_call_parser="hermes") as client:
        refused = await client.post("/v1/chat/completions", json={**CHAT, "tools": [tool]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_searches_that_would_cost_much_are_refused(serving, engine, monkeypatch):
    async with serving() as client:
        long = await client.post("/v1/completions", json={**TEXT, "max_tokens": 1025})
        assert long.json()["error"]["param"] == "prompt", "the context of this model is shorter"
        monkeypatch.setattr(engine, "max_model_len", 4096)
        long = await client.post("/v1/completions", json={**TEXT, "max_tokens": 1025})
        assert long.json()["error"]["message"].endswith("may have at most 1024 tokens, got 1025.")
        monkeypatch.setattr("fa_serve.server.answers.answer.MAX_BEAM_PROMPTS", 5)
        many = await client.post("/v1/completions", json={**TEXT, "n": 3})
        assert many.json()["error"]["message"].endswith("at most 5, got 3 times 2.")
        monkeypatch.setattr(engine, "config", EngineConfig(prefix_caching=False))
        uncached = await client.post("/v1/completions", json=TEXT)
        assert uncached.json()["error"]["param"] == "use_beam_search"
    assert not engine.seen


async def test_a_failure_ends_all_beams(serving, engine):
    engine.error = RequestError("step_failed", "out of pages")
    async with serving() as client:
        failed = await client.post("/v1/completions", json=TEXT)
        assert (failed.status_code, client.service.in_flight) == (500, 0)
        engine.error = None

        async def refuse(*_, **__):
            raise QueueFullError("full")
            yield

        engine.generate = refuse
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 429
        assert client.service.in_flight == 0
        counted = (await client.get("/metrics")).text
    assert 'request_success_total{finished_reason="error",model_name="fake"} 1.0' in counted, "what is refused is not counted"
    assert 'finished_reason="abort"' not in counted


async def test_a_client_that_leaves_ends_its_beams(serving, engine):
    engine.gate.clear()
    async with serving() as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        while not engine.seen:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        for _ in range(100):
            if not client.service.in_flight:
                break
            await asyncio.sleep(0.01)
        assert client.service.in_flight == 0
    assert [request.rsplit("-", 3)[1:] for request in engine.aborted] == [["0", "0", "0"]]
