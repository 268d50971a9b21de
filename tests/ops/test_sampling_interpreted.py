"""The sampling kernel in Triton's interpreter: greedy rows, what a draw may choose, and that no row depends on another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fa_serve.backends.triton.sampling import launch_sample_rows
from fa_serve.engine.sampler import SampleParams, _sample, _threshold, random_keys

ROWS = 3
VOCAB = 300
TEMPERATURE = 0.7


def kernel(logits: Tensor, params: SampleParams, slots: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    launch_sample_rows(logits, params.keys, params.temperature, params.top_k, params.top_p, params.min_p, slots, last, tokens)
    return tokens


def drawing(n: int, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> SampleParams:
    return SampleParams(
        keys=torch.from_numpy(random_keys(np.arange(n) + 5, np.arange(n) * 3)),
        temperature=torch.full((n,), TEMPERATURE),
        top_k=None if top_k is None else torch.full((n,), top_k),
        top_p=None if top_p is None else torch.full((n,), top_p),
        min_p=None if min_p is None else torch.full((n,), min_p),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("vocab", [5, 256, 9000])
def test_greedy_rows_and_rows_that_are_not_finite(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab).to(dtype)
    logits[1, vocab - 1], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 2:4] = 50.0  # the first of those that tie
    slots = torch.tensor([6, 0, 3, 2, 5])
    last = torch.full((7,), 9)
    tokens = kernel(logits, SampleParams(), slots, last)
    assert tokens.tolist() == [int(logits[0].argmax()), -1, -1, -1, 2]
    assert last.tolist() == [0, 9, 0, 0, 9, 2, int(logits[0].argmax())]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.2},
        {"top_k": 7},
        {"top_k": 30, "top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 50, "min_p": 0.1},
        {"top_k": 10**6, "top_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": 1},
    ],
    ids=str,
)
def test_draws_keep_their_limits(limits: dict[str, float]) -> None:
    """Never a token that sorting would have cut; how often each comes is for tests/gpu, where a draw is cheap."""
    torch.manual_seed(1)
    logits = (2 * torch.randn(1, VOCAB)).bfloat16()  # with ties
    tokens = kernel(logits.expand(ROWS, VOCAB).contiguous(), drawing(ROWS, **limits))
    scores = (logits.float() - logits.float().max()) / TEMPERATURE
    params = drawing(1, **limits)
    keep = torch.ones(1, VOCAB, dtype=torch.bool)
    if limits.keys() & {"top_k", "top_p"}:
        keep &= scores >= _threshold(scores, params)[:, None]
    if params.min_p is not None:
        keep &= scores >= params.min_p.log()
    assert bool(keep[0, tokens].all())


def test_without_limits_the_draws_are_those_of_torch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    params = drawing(4)
    assert torch.equal(kernel(logits, params), _sample(logits, params))


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB)
    params = drawing(6, top_k=100, top_p=0.5)
    params.temperature[::3] = 0.0
    params.top_p[1::3] = 1.0
    together = kernel(logits, params)
    assert together[::3].tolist() == logits[::3].argmax(-1).tolist()
    for row in range(6):
        alone = SampleParams(
            **{name: getattr(params, name)[row : row + 1] for name in ("keys", "temperature", "top_k", "top_p")}
        )
        assert kernel(logits[row : row + 1], alone).tolist() == together[row : row + 1].tolist()
