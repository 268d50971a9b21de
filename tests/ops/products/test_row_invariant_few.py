"""The source of the kernel for few rows, emulated on a CPU, against float64. What the compiler makes of it is in
test_row_invariant_few_compiled.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hopper_emulator import emulated
from hopper_threads import EmulationError
from product_cases import dense
from rounded_once import randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant_few import plan_invariant_rows
from fa_serve.ops.products.tiles import InvariantRowsTile
from fa_serve.testing import assert_matches_reference

BF16 = torch.bfloat16
ALPHA = 0.5
EPS = 1e-3
OFFSET = 1.0


@dataclass(frozen=True)
class Call:
    """What is multiplied. gap: numbers between two rows of x"""

    tokens: int
    k: int = 640
    n: int = 40
    norm: bool = False
    activation: str | None = None
    bias: bool = False
    residual: bool = False
    gap: int = 0

    @property
    def product(self) -> Product:
        gated = self.activation is not None
        return dense("float", self.n * (1 + gated), self.k, tokens=self.tokens, gated=gated, invariant=True, num_sms=2)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """x, and the weight, bias, weight of the norm and residual."""
        rows = self.product.n
        return (
            randn(self.tokens, self.k + self.gap, dtype=BF16)[:, : self.k],
            randn(rows, self.k, dtype=BF16, seed=1) / 16,
            randn(rows, dtype=BF16, seed=2) if self.bias else None,
            randn(self.k, dtype=BF16, seed=3) if self.norm else None,
            randn(self.tokens, self.n, dtype=BF16, seed=4) if self.residual else None,
        )

    def expected(self, dtype: torch.dtype) -> Tensor:
        """With the roundings of separate launches."""
        x, weight, bias, norm_weight, residual = (None if given is None else given.to(dtype) for given in self.tensors())
        if norm_weight is not None:
            x = ops.rms_norm(x, ops.Norm(norm_weight, EPS, OFFSET)).to(BF16).to(dtype)
        y = torch.nn.functional.linear(x, weight, bias)
        if self.activation is not None:
            return ops.act_and_mul(y.to(BF16).to(dtype), self.activation)
        return y if residual is None else residual + ALPHA * y

    def check(self, tile: InvariantRowsTile, **emulation: object) -> None:
        x, *others = self.tensors()
        details = Details(EPS, OFFSET, self.activation, ALPHA, (*x.stride(), self.k, 1))
        with emulated(**emulation):
            y = plan_invariant_rows(self.product, tile, details)(x, *others)
        assert y.dtype == BF16
        assert_matches_reference(y, self.expected(torch.float64), self.expected(BF16))


CALLS = {
    "1": Call(1),
    "3-norm": Call(3, norm=True),
    "8-norm-gap": Call(8, norm=True, gap=8),
    "2-bias-gap": Call(2, bias=True, gap=24),
    "1-norm-gate": Call(1, norm=True, activation="silu"),
    "8-gate-bias": Call(8, activation="gelu_tanh", bias=True),
    "2-norm-gate-bias": Call(2, norm=True, activation="gelu", bias=True),
    "1-residual": Call(1, residual=True),
    "3-residual-bias": Call(3, residual=True, bias=True),
    "8-norm-residual": Call(8, norm=True, residual=True),
    "3-odd": Call(3, k=520, n=21, norm=True, bias=True),
    "2-odd-gate": Call(2, k=1000, n=37, activation="silu"),
    "1-wide": Call(1, k=2104, norm=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_right(call: Call) -> None:
    call.check(InvariantRowsTile(16, 64, 4))


@pytest.mark.parametrize(("block_n", "stages"), [(8, 2), (8, 64), (32, 3), (64, 2)])
def test_tiles_and_rings(block_n: int, stages: int) -> None:
    """A ring is as long as the columns at most, and goes round otherwise."""
    Call(2, k=640, n=72, norm=True).check(InvariantRowsTile(block_n, 128, stages), resident_blocks=2)


def test_the_residual_is_updated_in_place() -> None:
    x, weight, *_, residual = Call(2, residual=True).tensors()
    with emulated():
        out = plan_invariant_rows(Call(2).product, InvariantRowsTile(16, 64, 4), Details())(x, weight, None, None, residual)
    assert out is residual


FAULTS = {
    "a stage is copied before it is multiplied": ("_copy_weights(at + STAGES, args", "_copy_weights(at + 1 + STAGES, args"),
    "weights of another block": ("column = at % var.blocks * var.tile.block_k", "column = 0 * at"),
    "the weights of the first tile": ("at // var.blocks * var.programs) * var", "0 * at) * var"),
    "gates are multiplied with themselves": ("[var.n + row, column]", "[row, column]"),
    "tokens of the block before": ("stage, gl.minimum(block + 1, BLOCKS - 1), args", "stage, block, args"),
    "a turn stores its first block only": ("args.tokens.index(first + part).store((x", "args.tokens.index(first).store((x"),
    "the mean of the padded tile": ("gl.sum(x * x, 1) / var.k", "gl.sum(x * x, 1) / var.norm_tile"),
    "the factor of the first token for all": ("gl.minimum(first + gl.arange(0, ROWS", "gl.minimum(0 * gl.arange(0, ROWS"),
    "the offset is left out": ("weights[part].to(gl.float32) + args.offset", "weights[part].to(gl.float32)"),
    "the sum is not gated": ("acc = activate(gate, var.kind) * up", "acc = gate * up"),
    "products that still run are stored": (
        "warpgroup_mma_wait(0, deps=[acc, up, x])",
        "warpgroup_mma_wait(1, deps=[acc, up, x])",
    ),
    "tokens behind the last one are stored": (
        "mask=(rows < args.rows) & gl.expand_dims(inside",
        "mask=(rows < 4) & gl.expand_dims(inside",
    ),
    "a program computes its first tile only": ("while program < var.tiles:", "if program < var.tiles:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    with pytest.raises((AssertionError, EmulationError, IndexError)):
        Call(3, norm=True, activation="silu").check(InvariantRowsTile(16, 64, 4), faults=dict([FAULTS[fault]]))
