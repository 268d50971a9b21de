"""Mixtures of experts in the engine: the tokens are those of the model's own experts, whatever happens to the batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hf_families import VOCAB, Family
from moe_families import MIXTURES
from sampled_cases import each_nth
from tiny_models import make_model, random_prompts

from benchmarks.soak.long_run import long_run
from fa_serve import hf
from fa_serve.engine import SamplingParams
from fa_serve.hf.surgery.experts import mixtures as experts

SERVED = [family for family in MIXTURES if family.paged is True]
by_family = pytest.mark.parametrize("family", each_nth(4, SERVED), ids=lambda family: family.name)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    return [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in random_prompts(6, longest=20)]


@cache
def expected(family: Family) -> list[list[int]]:
    """What transformers generates with eager attention and eager experts."""
    model = family.build()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 8}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts()]


@by_family
def test_tokens_are_those_of_generate(make_engine, family, monkeypatch) -> None:
    calls: list[int] = []
    call = experts.call_operator
    monkeypatch.setattr(experts, "call_operator", lambda x, *rest: calls.append(len(x)) or call(x, *rest))
    engine = make_engine(model=family.build(), num_pages=10, max_model_len=40, max_num_batched_tokens=11)
    asked = prompts()
    tokens = expected(family)
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == tokens
    assert engine.stats().num_preemptions > 0
    assert set(calls) > {1, 11}, "prompts and single tokens were computed by our experts"
    hit = engine.generate([asked[-1]], GREEDY)[0]
    assert hit.num_cached_tokens > 0
    assert hit.token_ids == tokens[-1]
    engine.check_integrity()


@by_family
def test_deterministic_answers_are_bitwise_the_same_alone_and_in_a_batch(make_engine, family) -> None:
    first, *others = prompts()
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)

    def bits(completion) -> tuple:
        return completion.token_ids, [(x.logprob, x.top) for x in completion.logprobs]

    alone = bits(make_engine(model=family.build(), deterministic=True).generate([first], params)[0])
    engine = make_engine(model=family.build(), deterministic=True, max_num_batched_tokens=11)
    assert bits(engine.generate([first, *others], params)[0]) == alone
    assert alone[0] == expected(family)[0]


@pytest.mark.parametrize("settings", [{"fusion": False}, {"eager": True}], ids=["no-fusion", "eager"])
def test_experts_stay_as_they_are_where_nothing_is_to_be_replaced(make_engine, settings) -> None:
    engine = make_engine("qwen3-moe", **settings)
    assert engine._runner.model.config._experts_implementation == "batched_mm"


def test_deterministic_mode_refuses_experts_that_are_not_taken(make_engine, monkeypatch, caplog) -> None:
    """Their grouped products depend on the batch."""
    monkeypatch.setattr("fa_serve.engine.runner.model_runner.take_experts", lambda model: 0)
    model = make_model("qwen3-moe")
    model.set_experts_implementation("grouped_mm")
    engine = make_engine(model=model, deterministic=True)
    assert engine.generate([[5, 6, 7]], GREEDY)[0].finish_reason == "error"
    assert "deterministic must be False for this model" in caplog.text


@pytest.mark.slow
def test_nothing_is_lost_in_random_traffic(make_engine) -> None:
    engine = make_engine("gpt-oss", num_pages=48, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=12)
    assert engine._runner.model.config._experts_implementation == hf.NAME
    report = long_run(engine, 30, alive=16, longest=60)
    assert set(report["answers"]) >= {"length", "abort"}
    assert report["preemptions"] > 0
    assert report["cached_tokens"] > 0
