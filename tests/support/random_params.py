"""Random combinations of a request's parameters, for tests that no combination needs what was not prepared."""

from __future__ import annotations

import random
from typing import Any

from fa_serve.engine import SamplingParams, StructuredOutput

STRUCTURED = (
    StructuredOutput(regex="[a-f]{3,9}"),
    StructuredOutput(choice=("yes", "no")),
    StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)


def random_params(draw: random.Random, **given: Any) -> SamplingParams:
    """Each parameter is neutral in half of the requests. given: fields that are not drawn"""

    def one_of(neutral: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.5 else neutral

    drawn = {
        "max_tokens": draw.randint(1, 5),
        "temperature": one_of(0.0, 0.3, 1.0, 2.0),
        "top_k": one_of(0, 1, 7, 50),
        "top_p": one_of(1.0, 0.1, 0.9),
        "min_p": one_of(0.0, 0.05, 1.0),
        "presence_penalty": one_of(0.0, 0.4),
        "frequency_penalty": one_of(0.0, 0.7),
        "repetition_penalty": one_of(1.0, 1.2),
        "logit_bias": one_of(None, {3: 2.0, 5: -1.0}),
        "allowed_token_ids": one_of(None, (1, 2, 3, 4, 5)),
        "bad_token_ids": one_of((), (2, 7)),
        "stop": one_of((), ("ab", "q")),
        "stop_token_ids": one_of((), (9, 11)),
        "min_tokens": one_of(0, 1),
        "logprobs": one_of(None, 0, 1, 5, 20),
        "prompt_logprobs": one_of(None, 0, 2, 20),
        "n": one_of(1, 2, 3),
        "seed": one_of(None, 0, 99),
        "speculative": one_of(True, False),
    }
    return SamplingParams(**drawn | given)


def random_requests(
    draw: random.Random, counts: tuple[int, ...], *, vocab: int, longest: int, max_tokens: int = 24
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with the parameters of each: one of them or many, some with grammars, a common beginning, or n-grams to guess by.

    counts: how many requests there may be; longest: tokens of a prompt
    """
    params = []
    for _ in range(draw.choice(counts)):
        structured = draw.choice(STRUCTURED) if draw.random() < 0.4 else None
        # a grammar and a list of tokens may have no token in common
        given = {"structured": structured, "allowed_token_ids": None, "logit_bias": None} if structured else {}
        params.append(random_params(draw, **{"max_tokens": draw.randint(1, max_tokens)} | given))
    shared = [draw.randrange(12, vocab) for _ in range(draw.choice((0, longest // 2)))]
    lengths = [int(longest ** draw.random()) for _ in params]
    if draw.random() < 0.4:
        shared = shared[:4] * (longest // 8)
    prompts = [(shared + [draw.randrange(12, vocab) for _ in range(length)])[:longest] for length in lengths]
    return prompts, params
