"""Draws on the GPU come as often as their distribution says under every limit, and no other token is drawn."""

from __future__ import annotations

import pytest
import torch
from rounded_once import dtype_id
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.sampling.fallback import kept_tokens
from fa_serve.ops.torch_ops import TorchOps

ROWS = 20000
VOCAB = 3001
TEMPERATURE = 0.7
NAMES = ("keys", "temperature", "top_k", "top_p", "min_p")


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
        keep &= kept_tokens(scores, row.get("top_k"), row.get("top_p"))
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


@pytest.mark.parametrize("vocab", [3001, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_of_tokens_that_tie_those_with_the_lowest_ids_are_drawn(vocab: int, dtype: torch.dtype) -> None:
    """Logits of few values, both zeros among them, so that nearly every limit ends among tokens that tie."""
    generator = torch.Generator("cuda").manual_seed(3)
    logits = torch.randint(-4, 4, (64, vocab), generator=generator, device="cuda").to(dtype)
    logits[:, 1::7] *= -0.0
    greedy = ops.sample_rows(logits)
    assert torch.equal(greedy, logits.float().argmax(-1))
    for limits in ({"top_k": 1}, {"top_p": 1e-9}, {"top_k": 50, "top_p": 1e-4}):
        assert torch.equal(ops.sample_rows(logits, **drawing(64, **limits)), greedy), limits
    scores = (logits.float() - logits.float().amax(-1, keepdim=True)) / TEMPERATURE
    for limits in ({"top_k": 2}, {"top_k": 777}, {"top_k": vocab - 5}, {"top_p": 0.3}, {"top_k": 900, "top_p": 0.5}):
        given = drawing(64, **limits)
        tokens = ops.sample_rows(logits, **given)
        keep = kept_tokens(scores, given.get("top_k"), given.get("top_p"))
        assert bool(keep.gather(1, tokens[:, None]).all()), limits
        if "top_p" not in limits:
            expected = TorchOps().sample_rows(logits, *[given.get(name) for name in NAMES], None, None, None)
            # sums in another order may let another token win, which is rare
            assert int((tokens != expected).sum()) <= 1, limits
