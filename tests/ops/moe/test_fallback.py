"""Experts in plain PyTorch, against a loop over tokens in float64, and rows that do not know each other."""

from __future__ import annotations

import pytest
import torch
from rounded_once import dtype_id, randn
from torch import Tensor

from fa_serve import ops

GATES = {
    "silu": ops.Gate("silu"),
    "gelu": ops.Gate("gelu_tanh", limit=0.5),
    "gpt-oss": ops.Gate("silu", interleaved=True, slope=1.702, limit=1.0, offset=1.0),
}


def made(tokens: int, top_k: int, gate: ops.Gate, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, ops.ExpertWeights]:
    weights = (randn(5, 2 * 24, 40, dtype=dtype, seed=1) / 4, randn(5, 40, 24, dtype=dtype, seed=2) / 4)
    biases = (randn(5, 2 * 24, dtype=dtype, seed=3), randn(5, 40, dtype=dtype, seed=4))
    experts = ops.ExpertWeights(weights[0], biases[0], weights[1], biases[1], gate)
    index = torch.randint(-1, 6, (tokens, top_k), generator=torch.Generator().manual_seed(5))
    scores = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(6))
    return randn(tokens, 40, dtype=dtype), index, scores, experts


def exact(x: Tensor, index: Tensor, scores: Tensor, experts: ops.ExpertWeights) -> Tensor:
    gate_up_weight, gate_up_bias, down_weight, down_bias, gate = experts
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for place, expert in enumerate(index[token].tolist()):
            if not 0 <= expert < 5:
                continue
            y = gate_up_weight[expert].double() @ x[token].double() + gate_up_bias[expert].double()
            value, up = (y[::2], y[1::2]) if gate.interleaved else (y[:24], y[24:])
            value = value.clamp(max=gate.limit)
            if gate.activation == "silu":
                value = value / (1 + (-gate.slope * value).exp())
            else:
                value = torch.nn.functional.gelu(value, approximate="tanh")
            h = value * (up.clamp(-gate.limit, gate.limit) + gate.offset)
            out[token] += scores[token, place] * (down_weight[expert].double() @ h + down_bias[expert].double())
    return out


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 4), (17, 3), (0, 2)])
@pytest.mark.parametrize("invariant", [False, True], ids=["usual", "invariant"])
def test_experts(tokens: int, top_k: int, gate: ops.Gate, invariant: bool) -> None:
    x, index, scores, experts = made(tokens, top_k, gate, torch.float64)
    out = ops.experts(x, index, scores.double(), experts, invariant=invariant)
    torch.testing.assert_close(out, exact(x, index, scores.double(), experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_rows_do_not_know_each_other_where_that_is_asked(dtype: torch.dtype) -> None:
    x, index, scores, experts = made(65, 3, GATES["gpt-oss"], dtype)
    whole = ops.experts(x, index, scores, experts, invariant=True)
    assert whole.dtype == dtype
    for rows in (slice(0, 1), slice(3, 7), slice(64, 65), slice(1, 64)):
        assert torch.equal(ops.experts(x[rows], index[rows], scores[rows], experts, invariant=True), whole[rows])
    usual = ops.experts(x, index, scores, experts)
    torch.testing.assert_close(usual, whole, rtol=0.02, atol=0.02)
    if dtype == torch.float32:
        alone = torch.cat([ops.experts(x[i : i + 1], index[i : i + 1], scores[i : i + 1], experts) for i in range(65)])
        assert torch.equal(alone, whole), "a row alone is computed in the same way with and without"


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


@pytest.mark.parametrize("uses_sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True], ids=["scores", "renormalised"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_route(uses_sigmoid: bool, renormalise: bool, groups: tuple[int, int], bias: bool) -> None:
    """Against the definition of `ops.Router`, for each row by itself."""
    logits = randn(7, 8, dtype=torch.float64)
    added = randn(8, dtype=torch.float64, seed=1) if bias else torch.zeros(8, dtype=torch.float64)
    router = ops.Router(3, uses_sigmoid, renormalise, 1.5, *groups)
    weights, index = ops.route(logits, added if bias else None, router, torch.float64)
    for row in range(7):
        exps = logits[row].exp()
        scores = exps / (1 + exps) if uses_sigmoid else exps / exps.sum()
        choice = (scores + added).tolist()
        size = 8 // groups[0]
        parts = [sorted(choice[i : i + size])[-2:] for i in range(0, 8, size)]
        kept = best([sum(part) for part in parts], groups[1])
        chosen = best([value if i // size in kept else -1e9 for i, value in enumerate(choice)], 3)
        assert index[row].tolist() == chosen
        expected = scores[chosen]
        torch.testing.assert_close(weights[row], 1.5 * (expected / expected.sum() if renormalise else expected))
