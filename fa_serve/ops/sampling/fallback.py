"""Sampling in plain PyTorch, for devices without the kernel of `kernel.py`.

    tokens = sample_rows(logits, keys, temperature, top_k, top_p, min_p, slots, last_tokens, largest_top_k)

The limits (top_k, top_p, min_p) keep the first tokens of one order: higher scores come first, and of equal scores the one with
the lower id. The draw is an exponential race, see `exponential_race.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.ops.sampling.exponential_race import BLOCK, GOLDEN, MIX1, MIX2

MAX_SORTED = 1024
"""Up to this top_k the most likely tokens are selected. Beyond it the whole vocabulary is sorted."""
_NEG_INF = float("-inf")


def torch_sample_rows(
    logits: Tensor,
    keys: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    slots: Tensor | None,
    last_tokens: Tensor | None,
    largest_top_k: int | None,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.sample_rows`."""
    best, tokens = logits.max(dim=-1)  # NaN if the row holds any
    if keys is not None and temperature is not None:
        greedy = temperature == 0
        # the maximum becomes 0, so that no temperature is too low for a finite result
        scores = (logits.float() - best.float()[:, None]) / temperature.masked_fill(greedy, 1.0)[:, None]
        if top_k is not None or top_p is not None:
            scores = scores.masked_fill(~kept_tokens(scores, top_k, top_p, largest_top_k), _NEG_INF)
        if min_p is not None:
            scores = scores.masked_fill(scores < min_p.log()[:, None], _NEG_INF)
        tokens = torch.where(greedy, tokens, _race(scores, keys))
    tokens = tokens.masked_fill(~torch.isfinite(best), -1)
    if last_tokens is not None:
        last_tokens[slots] = tokens.clamp(min=0)
    return tokens


def kept_tokens(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, largest_top_k: int | None = None) -> Tensor:
    """Which tokens each row keeps: the first top_k, and of their distribution the fewest whose probabilities sum to top_p.

    scores: (n, vocab) float32, logits divided by the temperature

    Returns (n, vocab) bool.
    """
    if largest_top_k is None or largest_top_k > MAX_SORTED:
        ordered = scores.sort(dim=-1, descending=True).values
    else:
        ordered = scores.topk(min(largest_top_k, scores.shape[1]), dim=-1).values
    count = torch.full_like(scores[:, :1], ordered.shape[1], dtype=torch.int64)
    if top_k is not None:
        count = top_k[:, None].clamp(max=ordered.shape[1])
    if top_p is not None:
        is_candidate = torch.arange(ordered.shape[1], device=scores.device) < count
        weights = (ordered - ordered[:, :1]).exp().masked_fill(~is_candidate, 0.0)
        before = (weights.cumsum(dim=-1) - weights) / weights.sum(dim=-1, keepdim=True)
        nucleus = (is_candidate & (before < top_p[:, None])).sum(dim=-1, keepdim=True).clamp(min=1)
        # rounding must not cut the tail of a row with top_p of 1
        count = torch.where(top_p[:, None] < 1.0, nucleus, count)
    return _first_tokens(scores, ordered.gather(1, count - 1), count)


def _first_tokens(scores: Tensor, last: Tensor, count: Tensor) -> Tensor:
    """Which tokens are the first `count` (n, 1) of each row. `last` (n, 1) is the score of the last of them."""
    higher = scores > last
    ties = scores == last
    room = count - higher.sum(dim=-1, keepdim=True)
    return higher | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= room))


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens of each row: higher logits first, and of equal logits the lower id first.

    logits: (n, vocab)

    Returns their logits and their ids (int64), (n, count) each.
    """
    if not count:
        return logits[:, :0], torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    last = logits.topk(count, dim=-1).values[:, -1:]
    # `topk` may choose any of the tokens that tie with the last one, so a second one chooses by id
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    places = torch.where(logits > last, 2 * vocab - ids, torch.where(logits == last, vocab - ids, 0))
    ids = places.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _race(scores: Tensor, keys: Tensor) -> Tensor:
    """The token that wins each row's race: scores (n, vocab) float32 with a maximum of 0, keys (n,) -> (n,) int64."""
    n, vocab = scores.shape
    blocks = -(-vocab // BLOCK)
    weights = torch.exp(scores)
    weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - vocab)).view(n, blocks, BLOCK)
    exponentials = _exponentials(keys, blocks + BLOCK)
    block = (weights.sum(dim=-1) / exponentials[:, :blocks]).argmax(dim=-1)
    inside = weights.gather(1, block[:, None, None].expand(n, 1, BLOCK))[:, 0]
    return block * BLOCK + (inside / exponentials[:, blocks:]).argmax(dim=-1)


def _exponentials(keys: Tensor, count: int) -> Tensor:
    """The first `count` random numbers of each key: (n, count) float32, drawn from Exp(1), positive and finite."""
    x = keys[:, None] + torch.arange(1, count + 1, device=keys.device) * _signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX2)
    # the smallest exponentials decide the race, so they need fine steps near 0 and are never 0
    uniform = ((_shift_right(x, 32) ^ _shift_right(x, 63)).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of the uint64 x."""
    return x - (1 << 64) if x >= 1 << 63 else x
