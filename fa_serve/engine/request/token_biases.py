"""What a request adds to the logits of single tokens, as arrays that are made once and not in each step.

    biases = TokenBiases.of(params, end_ids, vocab_size)
    tokens, values = biases.at(num_output_tokens)        # of the next token

A request may name thousands of tokens and have a hundred answers. Going through them in Python would add 50 ms to each step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.request.params import SamplingParams

NEG_INF = float("-inf")
Biases = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids, each at most once, and what is added to their logits."""


def _arrays(biases: Mapping[int, float]) -> Biases:
    return np.fromiter(biases, np.int64, len(biases)), np.fromiter(biases.values(), np.float32, len(biases))


@dataclass(frozen=True, slots=True, eq=False)
class TokenBiases:
    """The biases of one request, which all its answers share.

    early:      biases before `min_tokens` tokens, while no token may end the answer
    late:       biases afterwards
    min_tokens: as in `SamplingParams`
    allowed:    ids of the only tokens that are kept, or None for all
    """

    early: Biases
    late: Biases
    min_tokens: int = 0
    allowed: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, params: SamplingParams, end_ids: Collection[int], vocab_size: int) -> TokenBiases:
        """The biases of a request. Ids of `end_ids` that the model does not have are left out."""
        given = params.allowed_token_ids
        allowed = None if given is None else np.array(given, dtype=np.int64)
        if not (params.logit_bias or params.bad_token_ids or params.min_tokens):
            return NO_BIASES if allowed is None else cls(NO_BIASES.early, NO_BIASES.late, 0, allowed)
        always = dict(params.logit_bias or {}) | dict.fromkeys(params.bad_token_ids, NEG_INF)
        late = _arrays(always)
        early = late
        if params.min_tokens:
            early = _arrays(always | dict.fromkeys((token for token in end_ids if token < vocab_size), NEG_INF))
        return cls(early, late, params.min_tokens, allowed)

    def at(self, num_output_tokens: int) -> Biases:
        """The biases of the next token, after `num_output_tokens` tokens of the answer."""
        return self.early if num_output_tokens < self.min_tokens else self.late


NO_BIASES = TokenBiases(_arrays({}), _arrays({}))
