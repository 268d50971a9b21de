"""Steps that fail or are interrupted: what becomes of their requests, and what the others get."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import pytest
import torch
from tiny_models import greedy, make_model, random_prompts

from fa_serve.engine import SamplingParams, StructuredOutput
from fa_serve.engine.runner import model_runner

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
BIASED = SamplingParams(max_tokens=4, temperature=0.0, logit_bias={7: 1.0})
FORCED = SamplingParams(max_tokens=4, temperature=0.0, structured=StructuredOutput(regex="[a-z]+"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("call", ["launch", "sample"])
def test_an_interrupted_step_is_computed_again(make_engine, monkeypatch, depth, call) -> None:
    """As by Ctrl-C in a notebook, which then steps on."""
    engine = make_engine()
    engine._steps.depth = depth
    asked = random_prompts(3)
    for i, prompt in enumerate(asked):
        engine.add_request(str(i), prompt, GREEDY)
    got = {str(i): [] for i in range(3)}
    for number in range(100):
        if not engine.has_unfinished():
            break
        with monkeypatch.context() as patch:
            if number % 3 == 1:
                patch.setattr(engine._runner, call, Mock(side_effect=KeyboardInterrupt))
            with suppress(KeyboardInterrupt):
                for output in engine.step():
                    got[output.request_id] += output.token_ids
        engine.check_integrity()
    assert [*got.values()] == [greedy(make_model(), prompt, 12) for prompt in asked]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_interrupted_step_keeps_the_outputs_that_it_has_made(make_engine, monkeypatch, depth) -> None:
    """Masks follow the tokens of the step before, which become outputs in the middle of a step. A timeout is an output too."""
    engine = make_engine()
    asked = {"text": GREEDY, "digits": replace(GREEDY, structured=StructuredOutput(regex="[0-9]{6}"))}
    expected = {name: engine.generate([[5, 6, 7]], params)[0].token_ids for name, params in asked.items()}
    engine._steps.depth = depth
    engine.add_request("late", [8, 9], GREEDY, timeout=1e-9)
    for name, params in asked.items():
        engine.add_request(name, [5, 6, 7], params)
    outputs = []
    for number in range(100):
        if not engine.has_unfinished():
            break
        with monkeypatch.context() as patch:
            if not number % 2:
                patch.setattr(engine._runner, "sample", Mock(side_effect=KeyboardInterrupt))
            with suppress(KeyboardInterrupt):
                outputs += engine.step()
    assert {x.request_id: x.finish_reason for x in outputs if x.finished}.keys() == {"late", *asked}
    assert {name: [t for x in outputs if x.request_id == name for t in x.token_ids] for name in asked} == expected


def test_a_failed_step_fails_its_requests_and_no_others(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine(max_num_seqs=2)
    expected = greedy(make_model(), [9, 9], 12)
    for name, prompt in (("a", [1]), ("b", [2]), ("c", [9, 9])):
        engine.add_request(name, prompt, GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("fa_serve.engine.runner.model_runner.paged_forward", lambda *_: (_ for _ in ()).throw(KeyError("broken")))
        outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert outputs[0].error.code == "step_failed"
    assert "KeyError: 'broken'" in outputs[0].error.message
    assert "2 requests end with an error" in caplog.text
    engine.check_integrity()
    tokens = [token for _ in range(12) for output in engine.step() for token in output.token_ids]
    assert tokens == expected
    # what the failed step should have written is not taken from the prefix cache
    assert engine.generate([[1]], GREEDY)[0].token_ids == greedy(make_model(), [1], 12)


@pytest.mark.parametrize("where", ["schedule", "commit"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_scheduler_ends_all_requests_and_starts_afresh(make_engine, monkeypatch, caplog, where, depth) -> None:
    engine = make_engine(max_num_seqs=2, speculative="ngram")
    engine._steps.depth = depth
    for name in "abc":
        engine.add_request(name, [1, 2, 3, 4, 5], GREEDY)
    engine.step()
    monkeypatch.setattr(engine._scheduler, where, lambda *_: {}["lost"])
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(name, "error") for name in "abc"]
    assert outputs[0].error.code == "scheduler_failed"
    assert "the scheduler failed: KeyError: 'lost'" in outputs[0].error.message
    assert "all requests end with an error" in caplog.text
    assert not engine.has_unfinished()
    completion = engine.generate([[1, 2, 3, 4, 5]], GREEDY)[0]
    assert (completion.token_ids, completion.num_cached_tokens) == (greedy(make_model(), [1, 2, 3, 4, 5], 12), 0)
    engine.check_integrity()
    assert engine._scheduler.speculation.drafter._indices == {}, "nothing is remembered of the lost sequences"


def test_out_of_memory_makes_steps_smaller_and_loses_nothing(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    asked = random_prompts(6)
    real = engine._runner.launch

    def launch(batch):
        if batch.num_tokens > 20:
            raise torch.OutOfMemoryError("too large")
        return real(batch)

    monkeypatch.setattr(engine._runner, "launch", launch)
    completions = engine.generate(asked, GREEDY)
    reference = make_model()
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 12) for prompt in asked]
    assert "out of memory in a step of 64 tokens" in caplog.text
    engine.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_out_of_memory_after_a_token_was_sampled_changes_nothing(make_engine, monkeypatch, depth, penalty) -> None:
    """The device keeps the last tokens and the counts of all tokens. A step that is undone must lose neither."""
    engine = make_engine()
    engine._steps.depth = depth
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, frequency_penalty=penalty)
    expected = [answer.token_ids for answer in engine.generate([[5, 6, 7], [8, 9]], params)]
    real = model_runner.log_probabilities
    calls = count()

    def failing(*arguments):
        if next(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    monkeypatch.setattr(model_runner, "log_probabilities", failing)
    assert [answer.token_ids for answer in engine.generate([[5, 6, 7], [8, 9]], params)] == expected
    assert next(calls) > 5
    engine.check_integrity()


@pytest.mark.every_case
@pytest.mark.parametrize("attack", [GREEDY, BIASED, FORCED, None], ids=["plain", "biased", "regex", "aborted"])
@pytest.mark.parametrize("victim", [BIASED, FORCED], ids=["biased", "regex"])
def test_values_that_are_not_finite_reach_no_other_request(make_engine, attack, victim) -> None:
    """A step that goes wrong once fails the requests in it, and no later one that begins with the same tokens."""
    model = make_model()
    engine = make_engine(model=model, max_num_batched_tokens=16)
    prompt = [5, *range(20, 45)]
    embedding = model.get_input_embeddings().weight
    expected = engine.generate([prompt], replace(victim, seed=1))[0].token_ids
    engine = make_engine(model=model, max_num_batched_tokens=16)
    sound = embedding[5].clone()
    embedding.data[5] = float("nan")
    if attack is None:  # leaves before any logits are there
        engine.add_request("attack", prompt, GREEDY)
        engine.step()
        engine.abort("attack")
    else:
        assert engine.generate([prompt], attack)[0].error.code == "not_finite"
    embedding.data[5] = sound
    for _ in range(3):
        completion = engine.generate([[*prompt, 3]], victim)[0]
        assert completion.error is None
    assert engine.generate([prompt], replace(victim, seed=1))[0].token_ids == expected
    engine.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tokens", [64, 16])
def test_a_request_is_right_that_shares_pages_with_one_that_is_not_finite(make_engine, tokens, depth) -> None:
    """Kernels multiply hidden values by 0, so a token that is not finite spoils the tokens before it, which requests share."""
    model = make_model()
    common = [*range(20, 45)]
    asked = {"bad": [*common, 5, 6, 7], "good": [*common, 8, 9], "bad too": [*common, 8, 5], "good too": [*common, 9]}
    expected = {name: greedy(model, prompt, 12) if "good" in name else [] for name, prompt in asked.items()}
    model.get_input_embeddings().weight.data[5] = float("nan")
    engine = make_engine(model=model, max_num_batched_tokens=tokens)
    engine._steps.depth = depth
    for name, prompt in asked.items():
        engine.add_request(name, prompt, GREEDY)
    got = {name: [] for name in asked}
    ended = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.token_ids or output.finished, "an empty output"
            got[output.request_id] += output.token_ids
            ended |= {output.request_id: output.error and output.error.code} if output.finished else {}
        engine.check_integrity()
    assert got == expected
    assert ended == {"bad": "not_finite", "good": None, "bad too": "not_finite", "good too": None}


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_a_step_that_fails_after_logits_that_are_not_finite_is_computed_again(make_engine, monkeypatch, failure) -> None:
    """Masks follow the tokens of the step before, so a request has been put back when the sampling fails."""
    model = make_model()
    engine = make_engine(model=model)
    prompt = [5, *range(20, 45)]
    expected = [answer.token_ids for answer in engine.generate([prompt, [8, 9]], [FORCED, GREEDY])]
    engine._steps.depth = 1
    for kv_cache in (x for pair in engine._runner.kv_caches.values() for x in pair):
        kv_cache.fill_(float("nan"))
    engine.add_request("shares", prompt, FORCED)
    engine.add_request("other", [8, 9], GREEDY)
    outputs = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "sample", Mock(side_effect=failure))
        with suppress(KeyboardInterrupt):
            outputs += engine.step()
    engine.check_integrity()
    while engine.has_unfinished():
        outputs += engine.step()
    got = {name: [t for x in outputs if x.request_id == name for t in x.token_ids] for name in ("shares", "other")}
    assert [*got.values()] == expected


def test_a_request_that_finds_pages_that_are_not_finite_withdraws_them_and_is_computed_again(make_engine) -> None:
    model = make_model()
    engine = make_engine(model=model)
    prompt = [5, *range(20, 45)]
    expected = engine.generate([prompt], BIASED)[0].token_ids
    for kv_cache in (x for pair in engine._runner.kv_caches.values() for x in pair):
        kv_cache.fill_(float("nan"))
    completion = engine.generate([prompt], BIASED)[0]
    assert (completion.token_ids, completion.num_cached_tokens) == (expected, 0)
    completion = engine.generate([prompt], BIASED)[0]
    assert (completion.token_ids, completion.num_cached_tokens) == (expected, 24)
