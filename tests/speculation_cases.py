"""Requests with every parameter that speculation could change the answers of, for the tests of its drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_serve.engine import Completion, SamplingParams, StructuredOutput

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
