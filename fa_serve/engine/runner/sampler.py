"""Turns logits into tokens, for a whole batch on the device and without waiting for the device.

    params = SampleParams(**send(sampling_arrays(requests, positions, vocab), device))
    tokens = sample(logits, params)          # int64 (n,); INVALID_TOKEN where the logits are not finite

Each row is drawn independently. Its random numbers are a hash of the request's seed and the token's position, so a seed gives
the same numbers alone, in any batch, and after preemption.

This module changes logits by penalties, biases and masks, and makes the keys of the random numbers. `ops.sample_rows` draws the
tokens. It leaves out end tokens and stop strings (scheduler.py, detokenizer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve import ops
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.token_biases import NO_BIASES
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, NO_TOKEN
from fa_serve.ops.sampling.exponential_race import GOLDEN, MIX1, MIX2

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class SampleParams:
    """What sampling needs for each row of the logits, on their device. A field is None if no row uses it.

    keys:          (n,) int64, from `random_keys`; None when every row is greedy
    temperature:   (n,) float32; 0 is greedy
    largest_top_k: the largest of `top_k`, known on the host; if it is None, the whole vocabulary is sorted
    top_k:         (n,) int64, at least 1; top_p, min_p: (n,) float32
    presence, frequency, repetition: (n,) float32 penalties; all three or none are given, and they need a `TokenCounts`
    draft_index:   (m,) int64, row * vocab + token for each draft that comes before the row's token; None without drafts
    next_drafts:   (n,) int64, the draft that the row's token is compared with; -1 for the last row of a sequence
    first_rows:    (n,) int64, the first row of the row's sequence
    bias_index:    (m,) int64, row * vocab + token, each at most once; bias: (m,) float32, which is added there
    allowed_index: (m,) int64, row * vocab + token, the only tokens of the rows `allowed_rows` that are kept
    mask:          (m, ceil(vocab / 32)) int32, one bit for each token of the rows `mask_rows` (m,): 1 if it is kept
    """

    keys: Tensor | None = None
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    repetition: Tensor | None = None
    draft_index: Tensor | None = None
    next_drafts: Tensor | None = None
    first_rows: Tensor | None = None
    bias_index: Tensor | None = None
    bias: Tensor | None = None
    allowed_index: Tensor | None = None
    allowed_rows: Tensor | None = None
    mask: Tensor | None = None
    mask_rows: Tensor | None = None
    largest_top_k: int | None = None


class TokenCounts:
    """For each slot, which tokens its sequence holds and how often each was generated. Penalties need both."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self.generated = torch.zeros(num_slots, vocab, dtype=torch.int16, device=device)
        self.present = torch.zeros(num_slots, vocab, dtype=torch.bool, device=device)

    def start(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A sequence has been given a slot. `token_ids` are all its tokens, the first `num_prompt_tokens` its prompt."""
        tokens = torch.tensor(token_ids, dtype=torch.int64).to(self.present.device, non_blocking=True)
        self.present[slot] = False
        self.present[slot].index_fill_(0, tokens, True)
        generated = tokens[num_prompt_tokens:]
        self.generated[slot] = 0
        self.generated[slot].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int16))

    def record(self, slots: Tensor, tokens: Tensor, params: SampleParams) -> None:
        """Each slot gains the token of its row, or, with drafts, the tokens up to the first that differs from its draft.

        A negative token is not counted: the row has no token, and its sequence ends or samples the token later.
        """
        if params.next_drafts is None or params.first_rows is None:
            gained = tokens >= 0
            tokens = tokens.clamp(min=0)
            self.generated[slots, tokens] += gained.to(self.generated.dtype)
        else:
            wrong = (tokens != params.next_drafts).long()
            num_wrong = wrong.cumsum(0) - wrong  # before this row
            kept = num_wrong == num_wrong[params.first_rows]
            # a row that is not kept adds 0 to the count of its sequence's first token, which is always kept
            tokens = torch.where(kept, tokens, tokens[params.first_rows])
            gained = tokens >= 0
            tokens = tokens.clamp(min=0)
            self.generated.index_put_((slots, tokens), (kept & gained).to(self.generated.dtype), accumulate=True)
        self.present[slots, tokens] |= gained

    def penalise(self, scores: Tensor, slots: Tensor, params: SampleParams) -> Tensor:
        """Apply the penalties. scores: (n, vocab) float32, of the sequences in `slots`; the result has the same shape."""
        assert params.repetition is not None and params.presence is not None and params.frequency is not None  # noqa: PT018
        factor = torch.where(scores > 0, 1.0 / params.repetition[:, None], params.repetition[:, None])
        present = self.present[slots]
        times = self.generated[slots]
        if params.draft_index is not None:
            present.view(-1).index_fill_(0, params.draft_index, True)
            times.view(-1).index_add_(0, params.draft_index, torch.ones_like(params.draft_index, dtype=times.dtype))
        scores = torch.where(present, scores * factor, scores)
        return scores - params.frequency[:, None] * times - params.presence[:, None] * (times > 0)


def sample(
    logits: Tensor,
    params: SampleParams,
    counts: TokenCounts | None = None,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> Tensor:
    """Draw one token for each row: (n,) int64, INVALID_TOKEN or NO_TOKEN for a row without a token.

    logits:      (n, vocab), any float dtype
    slots:       (n,) int64, the sequences' rows in `counts` and `last_tokens`
    last_tokens: (num_slots,) int64; the tokens are written to it at `slots`. A row without a token may write any token

    A row whose largest logit is not finite (NaN, if any logit is NaN) gives INVALID_TOKEN, even if a mask hides that logit. A
    finite row in which the parameters leave no token gives NO_TOKEN.
    """
    scores = adjusted_logits(logits, params, counts, slots)
    tokens = ops.sample_rows(
        scores,
        params.keys,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        slots,
        last_tokens,
        params.largest_top_k,
    )
    if scores is logits:
        return tokens
    # the largest value is NaN if any value is
    finite = torch.isfinite(logits.amax(dim=-1))
    return torch.where(finite, tokens.masked_fill(tokens == INVALID_TOKEN, NO_TOKEN), INVALID_TOKEN)


def sampling_arrays(
    requests: Sequence[Request],
    positions: Sequence[int] | NDArray[np.int64],
    vocab: int,
    *,
    num_rows: NDArray[np.int64] | None = None,
    penalties: bool = True,
) -> dict[str, NDArray[Any]]:
    """The fields of `SampleParams` that these requests need, on the host.

    positions: index of the token to sample in its sequence, for each row of logits
    num_rows:  how many rows each request has, one after the other; None means one
    penalties: whether penalties are applied
    """
    params = [request.params for request in requests]
    positions = np.asarray(positions, dtype=np.int64)
    arrays: dict[str, NDArray[Any]] = {}

    def for_rows(values: list[Any], dtype: Any) -> NDArray[Any]:
        array = np.array(values, dtype=dtype)
        return array if num_rows is None else np.repeat(array, num_rows)

    def floats(name: str, values: list[float]) -> None:
        arrays[name] = for_rows(values, np.float32)

    if not all(p.greedy for p in params):
        arrays["keys"] = random_keys(for_rows([request.seed for request in requests], np.int64), positions)
        floats("temperature", [0.0 if p.greedy else p.temperature for p in params])
        if any(p.top_k for p in params):
            arrays["top_k"] = for_rows([min(p.top_k or vocab, vocab) for p in params], np.int64)
        if any(p.top_p < 1.0 for p in params):
            floats("top_p", [p.top_p for p in params])
        if any(p.min_p for p in params):
            floats("min_p", [p.min_p for p in params])
    if penalties and any(p.penalised for p in params):
        floats("presence", [p.presence_penalty for p in params])
        floats("frequency", [p.frequency_penalty for p in params])
        floats("repetition", [p.repetition_penalty for p in params])
    if any(request.biases is not NO_BIASES for request in requests):
        owners = for_rows(list(range(len(requests))), np.int64)
        arrays |= _bias_arrays([requests[owner] for owner in owners.tolist()], positions.tolist(), vocab)
    return arrays


def _bias_arrays(requests: Sequence[Request], positions: Sequence[int], vocab: int) -> dict[str, NDArray[Any]]:
    """The fields that come from biases. requests, positions: one for each row of logits"""
    arrays: dict[str, NDArray[Any]] = {}
    index: list[NDArray[np.int64]] = []
    bias: list[NDArray[np.float32]] = []
    allowed: list[NDArray[np.int64]] = []
    rows: list[int] = []
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        biases = request.biases
        if biases is NO_BIASES:
            continue
        tokens, values = biases.at(position - len(request.prompt))
        if len(tokens):
            index.append(tokens + row * vocab)
            bias.append(values)
        if biases.allowed is not None:
            allowed.append(biases.allowed + row * vocab)
            rows.append(row)
    if index:
        arrays["bias_index"] = np.concatenate(index)
        arrays["bias"] = np.concatenate(bias)
    if rows:
        arrays["allowed_index"] = np.concatenate(allowed)
        arrays["allowed_rows"] = np.array(rows, dtype=np.int64)
    return arrays


def draft_arrays(drafts: Sequence[Sequence[int]], vocab: int) -> dict[str, NDArray[Any]]:
    """The fields of `SampleParams` that penalties need if there are drafts. drafts: those of each sequence that samples"""
    index: list[int] = []
    following: list[int] = []
    first_rows: list[int] = []
    for own in drafts:
        first = len(first_rows)
        index += [(first + row) * vocab + token for row in range(1, len(own) + 1) for token in own[:row]]
        following += [*own, -1]
        first_rows += [first] * (len(own) + 1)
    arrays = {"draft_index": index, "next_drafts": following, "first_rows": first_rows}
    return {name: np.array(values, dtype=np.int64) for name, values in arrays.items()}


def random_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """One 64-bit key for each (seed, position), on the host."""
    with np.errstate(over="ignore"):
        mixed = _mix_host(seeds.astype(np.uint64) + np.uint64(GOLDEN))
        return _mix_host(mixed ^ (positions.astype(np.uint64) * np.uint64(GOLDEN))).view(np.int64)


def _mix_host(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return x ^ (x >> np.uint64(31))


def adjusted_logits(logits: Tensor, params: SampleParams, counts: TokenCounts | None, slots: Tensor | None) -> Tensor:
    """The logits with penalties and biases applied; tokens that are not allowed are -inf. Arguments as in `sample`."""
    scores = logits
    if params.repetition is not None:
        assert counts is not None and slots is not None  # noqa: PT018
        scores = counts.penalise(logits.float(), slots, params)
    if params.bias_index is not None and params.bias is not None:
        scores = scores.float().flatten().index_add(0, params.bias_index, params.bias).view(logits.shape)
    if params.allowed_index is not None and params.allowed_rows is not None:
        kept = scores.flatten()[params.allowed_index]
        scores = scores.index_fill(0, params.allowed_rows, NEG_INF)
        scores = scores.flatten().index_copy(0, params.allowed_index, kept).view(logits.shape)
    if params.mask is not None and params.mask_rows is not None:
        bits = params.mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
        banned = (bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
        scores = scores.index_copy(0, params.mask_rows, scores[params.mask_rows].masked_fill(banned, NEG_INF))
    return scores
