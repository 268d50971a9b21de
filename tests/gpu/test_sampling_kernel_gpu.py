"""Draws on the GPU come as often as their distribution says under every limit, and no other token is drawn."""

from __future__ import annotations

import pytest
import torch
from rounded_once import dtype_id
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.sampling.fallback import lowest_kept
from fa_serve.ops.torch_ops import TorchOps

ROWS = 20000
VOCAB = 3001
TEMPERATURE = 0.7


def drawing(n: int, **limits: float) -> dict[str, Tensor]:
    """The arguments of n rows that draw under the same limits."""
    types = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(6))
    return {
        "keys": keys.cuda(),
        "temperature": torch.full((n,), TEMPERATURE, device="cuda"),
        **{name: torch.full((n,), value, dtype=types[name], device="cuda") for name, value in limits.items()},
    }


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_draws_follow_the_distribution(limits: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(1, VOCAB, device="cuda")).to(dtype)
    tokens = ops.sample_rows(logits.expand(ROWS, VOCAB).contiguous(), **drawing(ROWS, **limits))
    scores = (logits.float() - logits.float().max()) / TEMPERATURE
    row = drawing(1, **limits)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if limits.keys() & {"top_k", "top_p"}:
        keep &= scores >= lowest_kept(scores, row.get("top_k"), row.get("top_p"))[:, None]
    if "min_p" in limits:
        keep &= scores >= row["min_p"].log()
    weights = torch.where(keep, scores.exp(), 0.0)[0].double()
    expected = weights / weights.sum() * ROWS
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert int(counts[~keep[0]].sum()) == 0
    often = expected > 5
    degrees = int(often.sum())
    chi2 = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert chi2 <= degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_greedy_and_unlimited_draws_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 151936, device="cuda").to(dtype)
    tokens = ops.sample_rows(logits)
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.max(-1).values)
    given = drawing(64)
    expected = TorchOps().sample_rows(logits, given["keys"], given["temperature"], *[None] * 6)
    # sums in another order may let another token win, which is rare
    assert int((ops.sample_rows(logits, **given) != expected).sum()) <= 1
