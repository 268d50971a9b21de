"""Of tokens with equal logits, which are frequent in bfloat16, every path takes the one with the lower id first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, make_model, random_prompts
from transformers import PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner.log_probabilities import log_probabilities

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
FIRST_ONLY = {
    "top_k": SamplingParams(max_tokens=12, top_k=1, seed=3),
    "top_p": SamplingParams(max_tokens=12, top_p=1e-6, seed=3),
    "min_p": SamplingParams(max_tokens=12, min_p=1.0, seed=3),
    "among others": SamplingParams(max_tokens=12, top_k=40, top_p=1e-6, min_p=0.01, seed=3),
    "penalised": SamplingParams(max_tokens=12, top_p=1e-6, seed=3, repetition_penalty=1.0001),
}


def model_with_ties() -> PreTrainedModel:
    """Every token of the upper half of the vocabulary has the logit of one of the lower half."""
    model = make_model()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[VOCAB // 2 :] = head[: VOCAB // 2].flip(0)
    return model


def engine_with_ties(**settings: object) -> Engine:
    config = EngineConfig(**{"device": "cpu", "num_pages": 128, "page_size": 4, "max_num_seqs": 8, "seed": 0} | settings)
    return Engine(config, model=model_with_ties())


@pytest.mark.parametrize("settings", [{}, {"speculative": "ngram", "num_speculative_tokens": 4}], ids=["plain", "speculative"])
def test_parameters_that_keep_one_token_give_the_greedy_answer(settings) -> None:
    engine = engine_with_ties(**settings)
    prompts = [*random_prompts(3), [5, 6, 7] * 6]
    expected = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    assert max(max(tokens) for tokens in expected) < VOCAB // 2, "greedy takes the lower of two ids"
    for name, params in FIRST_ONLY.items():
        if name == "penalised":
            greedy = replace(GREEDY, repetition_penalty=params.repetition_penalty)
            expected = [completion.token_ids for completion in engine.generate(prompts, greedy)]
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected, name


def test_top_k_keeps_exactly_k_tokens_of_an_answer() -> None:
    """Two of four pairs of equal logits, and one token of the third: the fifth token's equal is never drawn."""
    engine = engine_with_ties()
    five = SamplingParams(max_tokens=1, temperature=3.0, top_k=5, logprobs=6)
    prompt = [5, 6, 7]
    drawn = engine.generate([prompt] * 200, [replace(five, seed=seed) for seed in range(200)])
    most_likely = [token for token, _ in drawn[0].logprobs[0].top]
    assert most_likely[5] == VOCAB - 1 - most_likely[4]
    assert {completion.token_ids[0] for completion in drawn} == set(most_likely[:5])


def test_the_most_likely_tokens_are_reported_in_that_order() -> None:
    engine = engine_with_ties()
    completion = engine.generate([[5, 6, 7]], replace(GREEDY, logprobs=5, prompt_logprobs=5))[0]
    for entry in [*completion.logprobs, *completion.prompt_logprobs[1:]]:
        tokens = [token for token, _ in entry.top]
        assert tokens[1::2] == [VOCAB - 1 - token for token in tokens[:4:2]]
        assert all(token < VOCAB // 2 for token in tokens[::2])
    assert [entry.top[0][0] for entry in completion.logprobs] == completion.token_ids


@pytest.mark.parametrize("top", [0, 1, 3, 20])
def test_reported_tokens_that_tie_are_those_with_the_lowest_ids(top: int) -> None:
    logits = torch.zeros(2, 300, dtype=torch.bfloat16)
    logits[0, 200] = 1.0
    _, values, ids = log_probabilities(logits, torch.tensor([7, 8]), top)
    assert ids.tolist() == [[200, *range(top - 1)][:top], [*range(top)]]
    assert values.shape == (2, top)
    torch.testing.assert_close(values, logits.float().log_softmax(-1).gather(1, ids), rtol=1e-6, atol=0)
