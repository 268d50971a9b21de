"""Deterministic mode: not a bit of an answer depends on the other requests in the engine."""

from __future__ import annotations

import pytest
import torch
from sampled_cases import each_nth
from tiny_models import VOCAB, greedy, make_model, random_prompts

from fa_serve.engine import SamplingParams
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.spec import UnsupportedModelError

ASKED = [
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=1),
    SamplingParams(max_tokens=8, temperature=1.0, seed=7, top_p=0.9, logprobs=0),
]


def bits(completion) -> tuple:
    prompt = [entry and (entry.logprob, entry.top) for entry in completion.prompt_logprobs or []]
    return completion.token_ids, [(x.logprob, x.top) for x in completion.logprobs], prompt


@pytest.mark.slow
@pytest.mark.parametrize("family", each_nth(3, ["gemma2", "qwen3", "qwen3-moe", "gpt-oss", "llama4"]))
def test_answers_are_bitwise_the_same_alone_and_in_any_batch(make_engine, family) -> None:
    prompt, *others = random_prompts(9)
    prompt = prompt * 3
    alone = [bits(make_engine(family, deterministic=True).generate([prompt], params)[0]) for params in ASKED]
    assert alone[0][0] == greedy(make_model(family), prompt, 8)
    crowd = [SamplingParams(max_tokens=12, temperature=1.0, logprobs=1)] * len(others)
    for settings in ({"max_num_batched_tokens": 11}, {"num_pages": 26, "max_model_len": 100}):
        engine = make_engine(family, deterministic=True, **settings)
        completions = engine.generate([prompt, *others, prompt], [ASKED[0], *crowd, ASKED[1]])
        assert [bits(completions[0]), bits(completions[-1])] == alone, settings
        again = engine.generate([prompt, prompt], ASKED)
        assert [bits(c) for c in again] == alone, "what is taken from the prefix cache is what would be computed"
        assert engine.stats().num_preemptions > 0 or "num_pages" not in settings


def test_rows_of_the_operators_do_not_know_each_other() -> None:
    torch.manual_seed(0)
    x = torch.randn(65, 200)
    weight = torch.randn(VOCAB, 200)
    bias = torch.randn(VOCAB)
    functions = {
        "linear": lambda x: torch.nn.functional.linear(x, weight, bias),
        "matmul": lambda x: x @ weight.t(),
        "addmm": lambda x: torch.addmm(bias, x, weight.t()),
        "mean": lambda x: x.mean(-1, keepdim=True),
        "sum": lambda x: x.sum(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
    }
    for name, function in functions.items():
        exact = function(x.double()) if name not in ("linear", "matmul", "addmm") else None
        with torch.inference_mode(), DeterministicMode():
            whole = function(x)
            for rows in (slice(0, 1), slice(3, 7), slice(64, 65), slice(1, 64)):
                assert torch.equal(function(x[rows]), whole[rows]), name
        expected = function(x) if exact is None else exact.float()
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [5, 64])
def test_rows_of_functions_do_not_know_each_other(width: int) -> None:
    """Laguna's gates have a number for each head, too few for a vector register."""
    x = torch.randn(33, width)
    functional = torch.nn.functional
    for function in (functional.softplus, functional.elu, functional.mish, functional.silu, torch.exp2, torch.sigmoid):
        with torch.inference_mode(), DeterministicMode():
            whole = function(x)
            for rows in (slice(0, 1), slice(3, 7), slice(32, 33)):
                assert torch.equal(function(x[rows]), whole[rows]), function
        torch.testing.assert_close(whole, function(x))


def test_what_has_no_invariant_form_is_refused() -> None:
    with torch.inference_mode(), DeterministicMode(), pytest.raises(UnsupportedModelError, match="deterministic must be False"):
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))


def test_a_frozen_weight_that_is_repeated_for_each_sequence_is_one_matrix() -> None:
    """PyTorch multiplies rows that are no contiguous memory so, as of the last tokens of each sequence."""
    weight = torch.randn(7, 8)
    x = torch.randn(3, 6, 8, requires_grad=True)
    with DeterministicMode():
        found = torch.nn.functional.linear(x[:, -4:], weight)
        expected = torch.nn.functional.linear(x[:, -4:].contiguous(), weight)
        alone = torch.nn.functional.linear(x[1:2, -1:], weight)
    assert torch.equal(found, expected)
    assert torch.equal(found[1:2, -1:], alone)
    found.sum().backward()
    assert x.grad is not None
