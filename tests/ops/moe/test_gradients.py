"""The gradients of experts, against those that autograd finds for PyTorch's form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fa_serve.ops import ExpertWeights, Gate
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.ops.moe import gradients
from fa_serve.ops.moe.fallback import torch_experts
from fa_serve.ops.moe.gradients import experts_with_gradients

GATES = [Gate("silu"), Gate("gelu_tanh", interleaved=True, limit=0.75, offset=1.0), Gate("silu", slope=1.5, limit=1.0)]


def make(dtype: torch.dtype, gate: Gate, bias: bool = True, hidden: int = 16) -> tuple[list[Tensor], ExpertWeights, Tensor]:
    """(x, weights of the router), weights of experts, and their choice, in which expert 2 has no token and 5 is none."""
    draw = torch.Generator().manual_seed(0)

    def trained(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    num_experts = 5
    width = 24
    weights = ExpertWeights(
        trained(num_experts, 2 * width, hidden),
        trained(num_experts, 2 * width) if bias else None,
        trained(num_experts, hidden, width),
        trained(num_experts, hidden) if bias else None,
        gate,
    )
    index = torch.tensor([[0, 1], [1, 3], [4, 0], [5, 1], [3, 4], [1, 0], [0, 3]])
    return [trained(7, hidden), trained(7, 2)], weights, index


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.activation)
def test_experts(gate: Gate, bias: bool) -> None:
    (x, scores), weights, index = make(torch.float64, gate, bias)
    tensors = [x, scores, *[each for each in weights if isinstance(each, Tensor)]]
    expected = torch_experts(x, index, scores, weights, True)
    with DeterministicMode():
        out = experts_with_gradients(x, index, scores, weights)
    assert torch.equal(out, expected)
    dy = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dy), torch.autograd.grad(expected, tensors, dy), strict=True):
        torch.testing.assert_close(found, wanted)


def test_frozen_experts_pass_gradients_on() -> None:
    (x, scores), weights, index = make(torch.float64, GATES[0], bias=False)
    own = weights._replace(gate_up=weights.gate_up.detach(), down=weights.down.detach())
    found = torch.autograd.grad(experts_with_gradients(x, index, scores, own).sum(), [x, scores])
    expected = torch.autograd.grad(torch_experts(x, index, scores, weights, False).sum(), [x, scores])
    torch.testing.assert_close(found, expected)


def test_grouped_products_are_those_of_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has them on a CPU as well, where they are not chosen."""
    (x, scores), weights, index = make(torch.bfloat16, GATES[0], bias=False)
    tensors = [x, scores, weights.gate_up, weights.down]

    def found() -> tuple[Tensor, ...]:
        return torch.autograd.grad(experts_with_gradients(x, index, scores, weights).sum(), tensors)

    apart = found()
    monkeypatch.setattr(gradients, "_has_grouped", lambda rows, other: True)
    for gradient, wanted in zip(found(), apart, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=2e-2)
