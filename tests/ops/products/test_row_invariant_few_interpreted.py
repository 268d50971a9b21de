"""The kernel for few rows in Triton's interpreter: right, and equal to separate launches of norm, product and gate.

The interpreter does not multiply bfloat16. What the compiler makes of the kernel is in test_row_invariant_few_compiled.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from product_cases import dense
from rounded_once import assert_rounded_once, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.elementwise.activation import launch_act_and_mul
from fa_serve.ops.elementwise.norm import launch_rms_norm
from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant import plan_invariant
from fa_serve.ops.products.row_invariant_few import plan_invariant_rows
from fa_serve.ops.products.tiles import InvariantRowsTile, InvariantTile

HALF = torch.float16
ALPHA = 0.5
EPS = 1e-3
OFFSET = 1.0


@dataclass(frozen=True)
class Call:
    """What is multiplied. gap: numbers between two rows of x"""

    tokens: int
    k: int = 640
    n: int = 24
    norm: bool = False
    activation: str | None = None
    bias: bool = False
    residual: bool = False
    gap: int = 0

    @property
    def product(self) -> Product:
        kinds = {"dtype": HALF, "matrix_dtype": HALF}
        gated = self.activation is not None
        return dense("float", self.n * (1 + gated), self.k, tokens=self.tokens, gated=gated, invariant=True, arch=0, **kinds)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """x, and the weight, bias, weight of the norm and residual."""
        rows = self.product.n
        return (
            randn(self.tokens, self.k + self.gap, dtype=HALF)[:, : self.k],
            randn(rows, self.k, dtype=HALF, seed=1) / 16,
            randn(rows, dtype=HALF, seed=2) if self.bias else None,
            randn(self.k, dtype=HALF, seed=3) if self.norm else None,
            randn(self.tokens, self.n, dtype=HALF, seed=4) if self.residual else None,
        )

    def in_one_launch(self) -> Tensor:
        x, *others = self.tensors()
        details = Details(EPS, OFFSET, self.activation, ALPHA, (*x.stride(), self.k, 1))
        return plan_invariant_rows(self.product, InvariantRowsTile(16, 128, 3), details)(x, *others)

    def in_separate_launches(self) -> Tensor:
        x, weight, bias, norm_weight, residual = self.tensors()
        if norm_weight is not None:
            x = launch_rms_norm(x, ops.Norm(norm_weight, EPS, OFFSET), None, None)
        details = Details(alpha=ALPHA, strides=(*x.stride(), self.k, 1))
        y = plan_invariant(self.product, InvariantTile(64, 16, 128, 3), details)(x, weight, bias, None, residual)
        return y if self.activation is None else launch_act_and_mul(y, self.activation)

    def in_float64(self) -> Tensor:
        """With the roundings of separate launches, which are larger than one rounding of the result."""
        x, weight, bias, norm_weight, residual = (None if given is None else given.double() for given in self.tensors())
        if norm_weight is not None:
            x = ops.rms_norm(x, ops.Norm(norm_weight, EPS, OFFSET)).to(HALF).double()
        y = ops.linear(x, weight, bias, residual=residual, alpha=ALPHA)
        return y if self.activation is None else ops.act_and_mul(y.to(HALF).double(), self.activation)


CALLS = {
    "1": Call(1),
    "3-norm": Call(3, norm=True),
    "8-norm-gap": Call(8, norm=True, gap=3),
    "2-bias-gap": Call(2, bias=True, gap=16),
    "1-norm-gate": Call(1, norm=True, activation="silu"),
    "8-gate-bias": Call(8, activation="gelu_tanh", bias=True),
    "2-norm-gate-bias": Call(2, norm=True, activation="gelu", bias=True),
    "1-residual": Call(1, residual=True),
    "3-residual-bias": Call(3, residual=True, bias=True),
    "8-norm-residual": Call(8, norm=True, residual=True),
    "3-odd": Call(3, k=523, n=21, norm=True, bias=True),
    "2-odd-gate": Call(2, k=701, n=37, activation="silu"),
    "1-wide": Call(1, k=2100, norm=True),
    "8-norm-gate": Call(8, norm=True, activation="silu"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_launch_gives_what_separate_launches_give(call: Call) -> None:
    assert torch.equal(call.in_one_launch(), call.in_separate_launches())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_right(call: Call) -> None:
    exact = call.in_float64()
    out = call.in_one_launch()
    assert out.dtype == HALF
    if call.norm or call.activation is not None:
        # a value between two numbers of the dtype may be rounded to either by sums in another order
        assert (out.double() - exact).abs().max() <= 4 * torch.finfo(HALF).eps * exact.abs().max()
    else:
        assert_rounded_once(out, exact)


def test_the_residual_is_updated_in_place() -> None:
    x, weight, *_, residual = Call(2, residual=True).tensors()
    out = plan_invariant_rows(Call(2).product, InvariantRowsTile(16, 128, 3), Details())(x, weight, None, None, residual)
    assert out is residual
