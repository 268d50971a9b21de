"""Draws on the GPU come as often as their distribution says, under every limit, and from nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_serve.engine.sampler import SampleParams, _sample, _threshold, random_keys, sample

ROWS = 20000
VOCAB = 3001
TEMPERATURE = 0.7


def drawing(n: int, **limits: float) -> SampleParams:
    types = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return SampleParams(
        keys=torch.from_numpy(random_keys(np.arange(n), np.arange(n) * 7)).cuda(),
        temperature=torch.full((n,), TEMPERATURE, device="cuda"),
        **{name: torch.full((n,), value, dtype=types[name], device="cuda") for name, value in limits.items()},
    )


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 100, "top_p": 0.5, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_draws_follow_the_distribution(limits: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(1, VOCAB, device="cuda")).to(dtype)
    tokens = sample(logits.expand(ROWS, VOCAB).contiguous(), drawing(ROWS, **limits))
    scores = (logits.float() - logits.float().max()) / TEMPERATURE
    params = drawing(1, **limits)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if limits.keys() & {"top_k", "top_p"}:
        keep &= scores >= _threshold(scores, params)[:, None]
    if params.min_p is not None:
        keep &= scores >= params.min_p.log()
    weights = torch.where(keep, scores.exp(), 0.0)[0].double()
    expected = weights / weights.sum() * ROWS
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert int(counts[~keep[0]].sum()) == 0
    often = expected > 5
    degrees = int(often.sum())
    chi2 = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert chi2 <= degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_greedy_and_unlimited_draws_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 151936, device="cuda").to(dtype)
    tokens = sample(logits, SampleParams())
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.max(-1).values)
    params = drawing(64)
    # two sums in another order may let another token win, hardly ever
    assert int((sample(logits, params) != _sample(logits, params)).sum()) <= 1
