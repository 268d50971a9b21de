"""Requests with every parameter that speculation could change the answers of, and the check that a drafter changes none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_models import random_prompts

from fa_serve.engine import Completion, Engine, SamplingParams, StructuredOutput

SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CASES = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0),
    "sampled": replace(SAMPLED, top_k=40, top_p=0.95, min_p=0.01),
    "penalties": replace(SAMPLED, presence_penalty=0.3, frequency_penalty=0.5, repetition_penalty=1.2, top_k=30),
    "logprobs": replace(SAMPLED, logprobs=2, prompt_logprobs=1),
    "regex": replace(SAMPLED, structured=StructuredOutput(regex="[ab]{6}c{3,9}")),
    "schema": replace(SAMPLED, structured=StructuredOutput(json_schema=SCHEMA), logprobs=0),
    "choice": replace(SAMPLED, structured=StructuredOutput(choice=("the quick", "the slow")), frequency_penalty=0.5),
    "ids": replace(SAMPLED, logit_bias={5: 4.0, 9: -100.0}, bad_token_ids=(8,)),
    "allowed": replace(SAMPLED, allowed_token_ids=(3, 5, 7), frequency_penalty=1.0),
    "answers": replace(SAMPLED, n=2, max_tokens=9),
    "best": replace(SAMPLED, n=1, best_of=3, max_tokens=9),
    "one": replace(SAMPLED, max_tokens=1),
    "two": replace(SAMPLED, max_tokens=2),
    "three": replace(SAMPLED, max_tokens=3),
}
TIGHT = {"num_pages": 20, "max_model_len": 64, "max_num_batched_tokens": 24}


def shown(completion: Completion) -> tuple[object, ...]:
    logprobs = [
        (entry.token_id, pytest.approx(entry.logprob, abs=1e-4), [token for token, _ in entry.top])
        for entry in [*(completion.logprobs or ()), *(completion.prompt_logprobs or ())]
        if entry is not None
    ]
    return completion.token_ids, completion.text, completion.finish_reason, completion.index, logprobs


def check_answers(make: Callable[..., Engine], speculative: str, params: SamplingParams, depth: int, **given: object) -> Engine:
    """Answers with a draft model or a head are those without it -> the engine that had it.

    make: makes an engine of its settings, of which `given` are some
    """
    prompts = random_prompts(4)
    plain = make(**given)
    expected = plain.generate(prompts, params)
    engine = make(speculative=speculative, num_speculative_tokens=5, **given)
    engine._steps.depth = depth
    assert list(map(shown, engine.generate(prompts, params))) == list(map(shown, expected))
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_pages_used, stats.num_output_tokens) == (0, plain.stats().num_output_tokens)
    assert engine._scheduler.speculation.drafter._caches == {}, "nothing is remembered of sequences that have ended"
    return engine


def check_case(check: Callable[[SamplingParams], Engine], case: str) -> None:
    """One of CASES, with a drafter that is right sometimes."""
    speculation = check(CASES[case]).stats().speculation
    assert speculation.num_draft_tokens > 0 or case in ("one", "two"), "a last token needs no draft"
    if case in ("greedy", "sampled", "logprobs", "ids", "answers"):
        assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens, "some drafts are right, some are wrong"
