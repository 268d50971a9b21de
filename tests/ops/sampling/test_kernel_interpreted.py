"""The sampling kernel in Triton's interpreter: greedy rows, which tokens a draw may choose, and the independence of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounded_once import DTYPES, dtype_id
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.sampling.fallback import kept_tokens
from fa_serve.ops.sampling.kernel import launch_sample_rows

ROWS = 3
VOCAB = 300
TEMPERATURE = 0.7
PARAMETERS = ("keys", "temperature", "top_k", "top_p", "min_p", "slots", "last_tokens", "largest_top_k")


def kernel(logits: Tensor, **given: Any) -> Tensor:
    return launch_sample_rows(logits, *[given.get(name) for name in PARAMETERS])


def drawing(n: int, **limits: float) -> dict[str, Tensor]:
    """The arguments of n rows that draw under the same limits."""
    generator = torch.Generator().manual_seed(5)
    return {
        "keys": torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator),
        "temperature": torch.full((n,), TEMPERATURE),
        **{name: torch.full((n,), value) for name, value in limits.items()},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [5, 256, 9000])
def test_greedy_rows_and_rows_that_are_not_finite(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab).to(dtype)
    logits[1, vocab - 1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 2:4] = 50.0  # the first of two that tie is chosen
    last_tokens = torch.full((7,), 9)
    tokens = kernel(logits, slots=torch.tensor([6, 0, 3, 2, 5]), last_tokens=last_tokens)
    best = int(logits[0].argmax())
    assert tokens.tolist() == [best, -1, -1, -1, 2]
    assert last_tokens.tolist() == [0, 9, 0, 0, 9, 2, best]


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
    """No token outside the limits is drawn. The GPU suite tests how often each token is, because draws are cheap there."""
    torch.manual_seed(1)
    logits = (2 * torch.randn(1, VOCAB)).bfloat16()  # with ties
    tokens = kernel(logits.expand(ROWS, VOCAB).contiguous(), **drawing(ROWS, **limits))
    scores = (logits.float() - logits.float().max()) / TEMPERATURE
    row = drawing(1, **limits)
    keep = torch.ones(1, VOCAB, dtype=torch.bool)
    if limits.keys() & {"top_k", "top_p"}:
        keep &= kept_tokens(scores, row.get("top_k"), row.get("top_p"))
    if "min_p" in limits:
        keep &= scores >= row["min_p"].log()
    assert bool(keep[0, tokens].all())


def tied(vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """One row of logits with few values, so that most tokens tie with others, in other blocks and tiles as well."""
    logits = torch.randint(-3, 3, (1, vocab), generator=torch.Generator().manual_seed(seed)).to(dtype)
    logits[0, 1::7] *= -0.0
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("top_k", [1, 2, 60, 1500, 4000, 8999])
def test_of_tokens_that_tie_with_the_kth_those_with_the_lowest_ids_are_drawn(top_k: int, dtype: torch.dtype) -> None:
    """Torch keeps exactly top_k tokens and draws with the same random numbers, so other tokens or sums would show."""
    logits = tied(9000, dtype, top_k).expand(6, -1).contiguous()
    for own in ({}, {"min_p": 0.02}, {"min_p": 1.0}):
        given = drawing(6, top_k=top_k, **own)
        assert kernel(logits, **given).tolist() == ops.sample_rows(logits, **given).tolist()


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 5, "top_p": 1e-4}], ids=str)
def test_limits_that_keep_one_token_choose_what_greedy_chooses(limits: dict[str, float]) -> None:
    logits = torch.cat([tied(700, torch.bfloat16, seed) for seed in range(3)])
    logits[2] = 0.0
    assert kernel(logits, **drawing(3, **limits)).tolist() == kernel(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("limits", [{"top_p": 0.1}, {"top_p": 0.6}, {"top_k": 200, "top_p": 0.5}], ids=str)
def test_a_nucleus_ends_among_tokens_that_tie(limits: dict[str, float]) -> None:
    """Of 600 equal tokens, a share of top_p is kept, from the lowest id on."""
    tokens = kernel(torch.zeros(16, 600), **drawing(16, **limits))
    end = limits["top_p"] * limits.get("top_k", 600)
    assert int(tokens.max()) < end
    assert int(tokens.max()) > end / 2


def test_without_limits_the_draws_are_those_of_torch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    given = drawing(4)
    assert torch.equal(kernel(logits, **given), ops.sample_rows(logits, **given))


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB)
    given = drawing(6, top_k=100, top_p=0.5)
    given["temperature"][::3] = 0.0
    given["top_p"][1::3] = 1.0
    together = kernel(logits, **given)
    assert together[::3].tolist() == logits[::3].argmax(-1).tolist()
    for row in range(6):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        assert kernel(logits[row : row + 1], **alone).tolist() == together[row : row + 1].tolist()
