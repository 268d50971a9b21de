"""A product with adapters is that of the base, what is behind it, and the adapters between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from fa_serve import ops
from fa_serve.hf.lora.product import AdaptedLinear, LoraSite, LoraStep, StepHolder, project
from fa_serve.hf.surgery.fuse.parts import FusedProduct
from fa_serve.ops import LoraBatch, LoraWeights
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS

K = 24
N = 32
TOTAL = 5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(total: int = TOTAL) -> tuple[StepHolder, LoraSite, LoraStep, Tensor]:
    """A site whose slot 0 has an adapter, a step in which all tokens but the first have it, and its matrix."""
    a = randn(1, 1, 16, K, seed=1)
    b = randn(1, 16, N, seed=2)
    numbers = torch.full((1, 1), -1, dtype=torch.int32)
    holder = StepHolder()
    site = LoraSite(
        ("layer",),
        K,
        (N,),
        holder,
        (),
        LoraWeights(
            a, b, torch.full((1, 1), 0.5), numbers, numbers, torch.zeros(LORA_COUNTERS, COUNTER_WORDS, dtype=torch.int64), (N,)
        ),
    )
    rows = torch.tensor([*range(1, total), 0], dtype=torch.int32)
    tiles = torch.tensor([[0, 0, total - 1], [-1, total - 1, 1]], dtype=torch.int32)
    slots = torch.tensor([-1] + [0] * (total - 1), dtype=torch.int32)
    batch = LoraBatch(rows, tiles, slots, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 16)
    return holder, site, LoraStep(batch), 0.5 * b[0].t() @ a[0, 0]


def expected(x: Tensor, weight: Tensor, bias: Tensor, delta: Tensor) -> Tensor:
    y = x @ weight.t() + bias
    y[1:] += x[1:] @ delta.t()
    return y


def test_a_step_without_adapters_is_the_base() -> None:
    holder, site, _, _ = make()
    product = FusedProduct(randn(N, K), randn(N, seed=4), site=site)
    x = randn(TOTAL, K, seed=5)
    assert torch.equal(project(product, x), ops.linear(x, product.weight, product.bias))
    with holder.serving(None):
        assert torch.equal(project(product, x), ops.linear(x, product.weight, product.bias))
    assert holder.step is None


@pytest.mark.parametrize("total", [TOTAL, 2, 1])
def test_norms_before_and_gates_and_sums_behind(total) -> None:
    holder, site, step, delta = make(total)
    weight = randn(N, K)
    bias = randn(N, seed=4)
    product = FusedProduct(weight, bias, site=site)
    x = randn(total, K, seed=5)
    norm = ops.Norm(randn(K, seed=6), 1e-5, 1.0)
    normed = ops.rms_norm(x, norm)
    with holder.serving(step):
        torch.testing.assert_close(project(product, x), expected(x, weight, bias, delta))
        torch.testing.assert_close(project(product, x, norm=norm), expected(normed, weight, bias, delta))
        gate, up = expected(normed, weight, bias, delta).chunk(2, dim=1)
        torch.testing.assert_close(project(product, x, norm=norm, activation="silu"), silu(gate) * up)
        residual = randn(total, N, seed=7)
        wanted = residual + 0.3 * expected(x, weight, bias, delta)
        assert project(product, x, residual=residual, alpha=0.3) is residual
        torch.testing.assert_close(residual, wanted)
    assert holder.step is None


def test_a_linear_layer_outside_of_a_fused_one() -> None:
    holder, site, step, delta = make()
    linear = torch.nn.Linear(K, N, dtype=torch.float64)
    x = randn(1, TOTAL, K, seed=5)
    adapted = AdaptedLinear(linear.forward, site, linear.bias)
    assert torch.equal(adapted(x), linear(x))
    with holder.serving(step):
        torch.testing.assert_close(adapted(x)[0], expected(x[0], linear.weight, linear.bias, delta))


def test_other_rows_than_those_of_the_step_are_refused() -> None:
    """A layer that multiplies some of the tokens, or more, would add the adapters of others."""
    holder, site, step, _ = make()
    linear = torch.nn.Linear(K, N, dtype=torch.float64)
    adapted = AdaptedLinear(linear.forward, site, linear.bias)
    with holder.serving(step), pytest.raises(RuntimeError, match="layer multiplied 4 rows in a step of 5 tokens"):
        adapted(randn(1, 4, K))
