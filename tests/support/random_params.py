"""Random combinations of a request's parameters, for tests that no combination needs what was not prepared."""

from __future__ import annotations

import random
from typing import Any

from fa_serve.engine import SamplingParams


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
        "logprobs": one_of(None, 0, 1, 5),
        "prompt_logprobs": one_of(None, 0, 2),
        "n": one_of(1, 2, 3),
        "seed": draw.randint(0, 99),
    }
    return SamplingParams(**drawn | given)
