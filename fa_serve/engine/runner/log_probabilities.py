"""The log-probabilities of sampled tokens, and of the most likely ones.

    chosen, values, ids = log_probabilities(logits, tokens, top=5)
    scores = processed_scores(logits, tokens, params, counts, slots)     # of the distribution that tokens are drawn from

Trainers of reinforcement learning want log-probabilities of the distribution that tokens are drawn from; other users want those
of the model. Left out: how tokens are drawn (sampler.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.engine.runner.sampler import NEG_INF, SampleParams, TokenCounts, adjusted_logits
from fa_serve.ops.sampling.fallback import kept_tokens


def processed_scores(
    logits: Tensor, tokens: Tensor, params: SampleParams, counts: TokenCounts | None = None, slots: Tensor | None = None
) -> Tensor:
    """The logits of the distribution that tokens are drawn from: (n, vocab) float32, -inf for tokens that are not kept.

    The arguments are those of `sample`, before the tokens (n,) that it has drawn are counted. A greedy row has a temperature of
    1 and no limits.
    """
    adjusted = adjusted_logits(logits, params, counts, slots).float()
    if params.temperature is None:
        return adjusted
    greedy = params.temperature == 0
    temperature = params.temperature.masked_fill(greedy, 1.0)[:, None]
    scores = adjusted / temperature
    if params.top_k is None and params.top_p is None and params.min_p is None:
        return scores
    # the limits are applied to the same numbers as in the draw
    centred = (adjusted - adjusted.amax(dim=-1, keepdim=True)) / temperature
    kept = torch.ones_like(centred, dtype=torch.bool)
    if params.top_k is not None or params.top_p is not None:
        kept = kept_tokens(centred, params.top_k, params.top_p, params.largest_top_k)
    if params.min_p is not None:
        kept &= centred >= params.min_p.log()[:, None]
    # a kernel may round the sum at the limit differently, but a token that was drawn must have been kept
    kept = kept.scatter(1, tokens.clamp(min=0)[:, None], True) | greedy[:, None]
    return scores.masked_fill(~kept, NEG_INF)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the distribution of these logits: the model's own, or that of `processed_scores`.

    Returns those of the chosen `tokens` (n,), those of the `top` most likely tokens (n, top), and the ids of these (n, top).
    """
    total = logits.float().logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None]).float() - total
    values, ids = ops.most_likely(logits, top)
    return chosen[:, 0], values.float() - total, ids
