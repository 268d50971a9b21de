"""Ops that autograd records have the bits of the ops and the gradients of their equations, and compute no product again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fa_serve import ops
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.ops.moe.fallback import torch_activation, weights_of_choice
from fa_serve.spec import UnsupportedError


def trained(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight + 1.0, 1e-3)


def compare(op: Callable[[], Tensor], plain: Callable[[], Tensor], tensors: list[Tensor]) -> None:
    """Bits of the op without gradients, gradients of the equation, and nothing overwritten."""
    copies = [x.detach().clone() for x in tensors]
    with DeterministicMode():
        out = op()
        assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))
        with torch.no_grad():
            alone = op()
    assert torch.equal(out, alone)
    with torch.no_grad():
        for x, copy in zip(tensors, copies, strict=True):
            x.copy_(copy)  # without gradients, sums are in place
    dy = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    with DeterministicMode():
        found = torch.autograd.grad(op(), tensors, dy)
    expected = torch.autograd.grad(plain(), tensors, dy)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("form", ["alone", "bias", "gated", "residual"])
def test_linear(form: str, with_norm: bool) -> None:
    x = trained(5, 12)
    weight = trained(8, 12)
    norm_weight = trained(12)
    bias = trained(8)
    residual = trained(5, 8, seed=1)
    norm = ops.Norm(norm_weight, 1e-3, 1.0) if with_norm else None
    options: dict[str, Any] = {"norm": norm}
    tensors = [x, weight] + ([norm_weight] if with_norm else [])
    if form == "residual":
        options |= {"residual": residual, "alpha": 0.5}
        tensors.append(residual)
    if form == "gated":
        options |= {"activation": "silu"}
    given_bias = None if form == "alone" else bias
    tensors += [] if given_bias is None else [bias]

    def plain() -> Tensor:
        y = torch.nn.functional.linear(normed(x, norm_weight) if with_norm else x, weight, given_bias)
        if form == "gated":
            gate, up = y.chunk(2, dim=1)
            return torch_activation(gate, "silu") * up
        return residual + 0.5 * y if form == "residual" else y

    compare(lambda: ops.linear(x, weight, given_bias, **options), plain, tensors)


def test_norms_sums_gates_and_routes() -> None:
    x = trained(5, 12)
    y = trained(5, 12, seed=1)
    weight = trained(12, seed=2)
    norm = ops.Norm(weight, 1e-3, 1.0)
    compare(lambda: ops.rms_norm(x, norm, residual=y), lambda: normed(x, weight) + y, [x, weight, y])
    compare(lambda: ops.rms_norm(x, norm), lambda: normed(x, weight), [x, weight])
    compare(lambda: ops.add(x, y, alpha=0.25), lambda: x + 0.25 * y, [x, y])
    heads = trained(3, 2, 8)
    gate = trained(3, 2, 8, seed=1)
    compare(lambda: ops.gate_heads(heads, gate, "sigmoid"), lambda: heads * gate.sigmoid(), [heads, gate])
    compare(lambda: ops.gate_heads(heads, gate, "silu"), lambda: heads * torch.nn.functional.silu(gate), [heads, gate])
    logits = trained(5, 6)
    for router in (ops.Router(2, renormalise=True), ops.Router(3, sigmoid=True, scale=2.0)):
        index = ops.route(logits.detach(), None, router, torch.float64)[1]
        compare(
            lambda router=router: ops.route(logits, None, router, torch.float64)[0],
            lambda router=router, index=index: weights_of_choice(logits, index, router),
            [logits],
        )


def test_what_needs_no_gradient_is_neither_kept_nor_computed() -> None:
    weight = trained(8, 12)
    norm = ops.Norm(torch.ones(12, dtype=torch.float64), 1e-3)

    def step(x: Tensor, weight: Tensor, norm: ops.Norm | None) -> tuple[int, int]:
        """How many inputs are kept, and how many products the backward pass has."""
        kept: list[Tensor] = []

        def keep(found: Tensor) -> Tensor:
            kept.append(found)
            return found

        with DeterministicMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found):
            y = ops.linear(x, weight, norm=norm)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        return sum(found is x or found.shape == x.shape for found in kept), counter.get_total_flops() // (2 * 5 * 12 * 8)

    assert step(trained(5, 12), weight, None) == (1, 2)
    assert step(trained(5, 12), weight.detach(), None) == (0, 1)
    assert step(trained(5, 12), weight.detach(), norm) == (1, 1)
    assert step(trained(5, 12).detach(), weight, norm) == (1, 1)


def test_outside_of_the_mode_nothing_is_recorded() -> None:
    x = trained(5, 12)
    y = trained(5, 12, seed=1)
    with torch.no_grad():
        assert ops.add(x, y) is x
        with DeterministicMode():
            assert ops.add(x, y) is x
    with DeterministicMode():
        assert ops.add(x.detach(), y.detach()).grad_fn is None
        assert ops.add(x, y).grad_fn is not None


def test_a_graph_may_be_kept_and_is_not_differentiated_again() -> None:
    x = trained(5, 12)
    weight = trained(8, 12)
    with DeterministicMode():
        total = ops.linear(x, weight).square().sum()
    total.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    total.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again: call backward"):
        torch.autograd.grad(total, x, create_graph=True)
