"""Logits into tokens, for a whole batch on the device and without waiting for it.

    tokens = sample(logits, params)          # int64 (n,); -1 where the logits are not finite

Each row is drawn by itself: its random numbers are a hash of the request's seed and the token's position, so a seed gives the
same numbers alone, in any batch, and after preemption. A draw is an exponential race, argmax p / E with E ~ Exp(1), which
chooses i with probability p_i / sum(p) and needs no normalisation. It is run in two rounds, first among blocks of BLOCK tokens
and then within the winning block, so that a row needs vocab / BLOCK + BLOCK random numbers and not one for each token.

top_k and top_p keep tokens that tie with the last one kept. Left out: end tokens and stop strings (scheduler.py,
detokenizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.scheduler import INVALID_TOKEN

BLOCK = 256
NEG_INF = float("-inf")
_GOLDEN = 0x9E3779B97F4A7C15  # the constants of splitmix64 (Steele, Lea, Flood 2014)
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SampleParams:
    """Per row of the logits, on their device; None means that no row uses it.

    keys:        (n,) int64, from `random_keys`; None when every row is greedy
    temperature: (n,) float32, 0 is greedy
    top_k:       (n,) int64, at least 1; top_p: (n,) float32
    """

    keys: Tensor | None = None
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None


def sample(logits: Tensor, params: SampleParams) -> Tensor:
    """logits (n, vocab), any float dtype -> (n,) int64."""
    best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    if params.keys is not None and params.temperature is not None:
        greedy = params.temperature == 0
        scores = logits.float() / params.temperature.masked_fill(greedy, 1.0)[:, None]
        if params.top_k is not None or params.top_p is not None:
            scores = scores.masked_fill(scores < _threshold(scores, params)[:, None], NEG_INF)
        tokens = torch.where(greedy, tokens, _race(scores, params.keys))
    return tokens.masked_fill(~torch.isfinite(best), INVALID_TOKEN)


def random_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """One 64-bit key for each (seed, position), on the host."""
    with np.errstate(over="ignore"):
        mixed = _mix_host(seeds.astype(np.uint64) + np.uint64(_GOLDEN))
        return _mix_host(mixed ^ (positions.astype(np.uint64) * np.uint64(_GOLDEN))).view(np.int64)


def _mix_host(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


def _threshold(scores: Tensor, params: SampleParams) -> Tensor:
    """(n,) the lowest score that is kept: first the top_k, then of their distribution the top_p."""
    ordered = scores.sort(dim=-1, descending=True).values
    if params.top_k is not None:
        last = ordered.gather(1, (params.top_k.clamp(max=scores.shape[1]) - 1)[:, None])
        ordered = ordered.masked_fill(ordered < last, NEG_INF)
        if params.top_p is None:
            return last[:, 0]
    assert params.top_p is not None
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # rounding must not cut the tail of a row that wants everything
    kept = (before < params.top_p[:, None]) | (params.top_p[:, None] >= 1.0)
    kept[:, 0] = True
    return ordered.masked_fill(~kept, float("inf")).min(dim=-1).values


def _race(scores: Tensor, keys: Tensor) -> Tensor:
    """(n, vocab) float32 scores, keys (n,) -> (n,) the token that wins each row's race."""
    n, vocab = scores.shape
    blocks = -(-vocab // BLOCK)
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - vocab)).view(n, blocks, BLOCK)
    exponentials = _exponentials(keys, blocks + BLOCK)
    block = (weights.sum(dim=-1) / exponentials[:, :blocks]).argmax(dim=-1)
    inside = weights.gather(1, block[:, None, None].expand(n, 1, BLOCK))[:, 0]
    return block * BLOCK + (inside / exponentials[:, blocks:]).argmax(dim=-1)


def _exponentials(keys: Tensor, count: int) -> Tensor:
    """(n, count) float32, Exp(1), positive and finite: splitmix64 from each key."""
    x = keys[:, None] + torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    # the smallest of the exponentials decides, so they must be fine near 0, and never 0 or infinite
    uniform = ((_shift(x, 32) ^ _shift(x, 63)).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
