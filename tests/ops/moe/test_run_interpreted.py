"""The kernels of experts in Triton's interpreter, against float64: uneven routing, every layout of weights, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from products_by_kernel import only_kernels
from quantized import float4_weight, float8_weight, int4_weight
from rounded_once import randn
from sampled_cases import each_nth
from torch import Tensor

from fa_serve import ops
from fa_serve.launching.plans import PLANS
from fa_serve.ops.moe import grouped, order
from fa_serve.ops.moe import primitives as experts_primitives
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.moe.order import Places
from fa_serve.ops.moe.run import compute_experts
from fa_serve.ops.moe.tiles import ExpertRowTile, GroupedTile, GroupedWgmmaTile, grouped_tile
from fa_serve.ops.products import table
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.tiles import run_width
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

SWIGLU = ops.Gate("silu")
CLAMPED = ops.Gate("silu", interleaved=True, slope=1.702, limit=1.5, offset=1.0)


@dataclass(frozen=True)
class Case:
    """A call of `ops.experts`. transposed: the rows of a weight are not contiguous, its columns are."""

    tokens: int
    top_k: int
    num_experts: int = 6
    hidden: int = 40
    width: int = 24
    gate: ops.Gate = SWIGLU
    transposed: bool = False
    bias: bool = False
    routing: str = "random"

    def make(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, ops.ExpertWeights]:
        draw = torch.Generator().manual_seed(7)
        if self.routing == "one":
            index = torch.full((self.tokens, self.top_k), self.num_experts - 1)
        elif self.routing == "uneven":  # most tokens take expert 1, and some experts have none
            index = torch.randint(0, 100, (self.tokens, self.top_k), generator=draw)
            index = torch.where(index < 80, 1, index % (self.num_experts - 2))
        elif self.routing == "elsewhere":  # some experts belong to another process
            index = torch.randint(-1, self.num_experts + 2, (self.tokens, self.top_k), generator=draw)
        else:
            scores = torch.rand(self.tokens, self.num_experts, generator=draw)
            index = scores.topk(self.top_k, dim=1).indices
        weights = torch.rand(self.tokens, self.top_k, generator=draw).to(dtype)
        shapes = ((self.num_experts, 2 * self.width, self.hidden), (self.num_experts, self.hidden, self.width))
        gate_up, down = (randn(*shape, dtype=dtype, seed=i) / 4 for i, shape in enumerate(shapes, 1))
        if self.transposed:
            gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
        biases = [randn(*w.shape[:2], dtype=dtype, seed=3) if self.bias else None for w in (gate_up, down)]
        experts = ops.ExpertWeights(gate_up, biases[0], down, biases[1], self.gate)
        return randn(self.tokens, self.hidden, dtype=dtype), index, weights, experts


CASES = [
    *[pytest.param(Case(17, k, num_experts=9), id=f"k{k}") for k in (2, *each_nth(3, [1, 3, 4, 5, 6, 7, 8]))],
    *[pytest.param(Case(t, 2), id=f"T{t}") for t in (1, 2, 63, 64)],
    pytest.param(Case(64, 4, routing="uneven"), id="uneven"),
    pytest.param(Case(40, 2, routing="one"), id="one-expert"),
    pytest.param(Case(9, 3, routing="elsewhere", bias=True), id="elsewhere"),
    pytest.param(Case(1, 8, routing="elsewhere", bias=True), id="elsewhere-T1"),
    pytest.param(Case(33, 2, hidden=37, width=19, bias=True), id="odd"),
    pytest.param(Case(1, 2, hidden=37, width=19, bias=True), id="odd-T1"),
    pytest.param(Case(21, 2, gate=CLAMPED, transposed=True, bias=True), id="gpt-oss"),
    pytest.param(Case(1, 4, gate=CLAMPED, transposed=True, bias=True), id="gpt-oss-T1"),
    pytest.param(Case(21, 2, gate=CLAMPED._replace(interleaved=False), transposed=True), id="transposed"),
    pytest.param(Case(2, 2, num_experts=16, gate=CLAMPED), id="interleaved-few"),
    pytest.param(Case(5, 2, gate=ops.Gate("gelu_tanh", limit=0.5)), id="gelu-tanh"),
    pytest.param(Case(5, 2, num_experts=1, routing="one", gate=ops.Gate("gelu")), id="single-expert"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the smallest size that a product takes, so that small inputs have several."""
    tiles = {
        "expert_rows": small_row_tile,
        "grouped": small_grouped_tile,
        "dequantise_experts": lambda product: GroupedTile(16, 32, 16, 4, 2),
    }
    rows = [replace(kernel, tile=tiles.get(kernel.name, kernel.tile)) for kernel in table.KERNELS]
    monkeypatch.setattr(table, "KERNELS", tuple(rows))
    monkeypatch.setattr(order, "SORT_BLOCKS", (16, 32))
    monkeypatch.setattr(order, "SUM_BLOCK", 32)
    PLANS.clear()


def small_row_tile(product: Product) -> ExpertRowTile:
    """Rows of 40 columns take ten steps in two groups, and rows of 24 six steps in one."""
    if product.values != "float":
        return ExpertRowTile(16, 64 if product.values == "float8" else 256, 1, 1, 4)
    return ExpertRowTile(4, 4, 2, 2, 4)


def small_grouped_tile(product: Product) -> GroupedTile:
    if product.values == "float":
        return GroupedTile(16, 32, 16, 4, 2)
    return GroupedTile(16, 64, 32, 4, 2)._replace(block_k=run_width(product))


def wide(experts: ops.ExpertWeights) -> ops.ExpertWeights:
    tensors = [x if x is None or isinstance(x, QuantizedWeight) else x.double() for x in experts[:-1]]
    return ops.ExpertWeights(*tensors, experts.gate)


@pytest.mark.parametrize("case", CASES)
def test_experts(case: Case) -> None:
    check(case, torch.float32)


HALF = [case for case in CASES if case.id in ("k2", "T1", "T63", "uneven", "odd", "odd-T1", "gpt-oss", "gpt-oss-T1")]


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF)
def test_experts_in_float16(case: Case) -> None:
    """Each kernel, with both orders of the weights."""
    call, out = check(case, torch.float16)
    assert torch.equal(compute_experts(*call, False), out), "equal calls have equal bits"


def check(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor, ops.ExpertWeights], Tensor]:
    call = x, index, weights, experts = case.make(dtype)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    out = compute_experts(x, index, weights, experts, False)
    assert out.dtype == dtype
    assert_matches_reference(out, exact, eager)
    return call, out


QUANTISED = {
    "mxfp4": lambda n, k, dtype: float4_weight(n, k, seed=n),
    "float8-G32": lambda n, k, dtype: float8_weight(n, k, group_size=32, seed=n),
    "float8-row": lambda n, k, dtype: float8_weight(n, k, group_size=k, seed=n),
    "int4-zeros": lambda n, k, dtype: int4_weight(n, k, group_size=32, zeros=True, dtype=dtype, seed=n),
}


def quantised(name: str, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, ops.ExpertWeights]:
    """The call of a case with other weights."""
    x, index, weights, experts = case.make(dtype)
    rows = (2 * case.num_experts * case.width, case.num_experts * case.hidden)
    gate_up, down = (QUANTISED[name](n, k, dtype) for n, k in zip(rows, (case.hidden, case.width), strict=True))
    return x, index, weights, experts._replace(gate_up=gate_up, down=down)


@pytest.mark.parametrize(
    ("name", "dtype", "as_bytes"),
    [
        *[pytest.param(name, torch.float32, False, id=name) for name in QUANTISED],
        pytest.param("mxfp4", torch.float16, False, id="mxfp4-float16"),
        pytest.param("float8-G32", torch.float32, True, id="float8-bytes"),
    ],
)
def test_quantised_experts(name: str, dtype: torch.dtype, as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens, and one. Columns are more than a block of 256. GPUs without float8 numbers read them as bytes."""
    monkeypatch.setattr(experts_primitives, "converts_float8", lambda arch: not as_bytes)
    for case in (
        Case(7, 2, num_experts=3, hidden=288, width=32, gate=CLAMPED, bias=True, routing="elsewhere"),
        Case(1, 2, num_experts=3, hidden=288, width=32, gate=CLAMPED, bias=True),
    ):
        x, index, weights, experts = quantised(name, case, dtype)
        exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
        eager = TorchOps().experts(x, index, weights, experts, False)
        assert_matches_reference(compute_experts(x, index, weights, experts, False), exact, eager)


@pytest.mark.parametrize("name", ["mxfp4", "float8-row", "int4-zeros"])
def test_some_experts_at_a_time_are_dequantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts, of 4 and of 2 experts, with biases and pairs that belong to another process."""
    monkeypatch.setattr(grouped, "MATRIX_BYTES", 1)
    case = Case(9, 2, num_experts=6, hidden=288, width=32, gate=CLAMPED, bias=True, routing="elsewhere")
    x, index, weights, experts = quantised(name, case, torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    with only_kernels("dequantise_experts"):
        found = compute_experts(x, index, weights, experts, False)
    assert_matches_reference(found, exact, eager)


@dataclass(frozen=True)
class Listed(table.Kernel):
    """A stand-in for a kernel that is given a list of its tiles: it multiplies and counts the pairs of each."""

    met: list[int] = field(default_factory=list)

    def load(self) -> object:
        return self.plan_tiles

    def plan_tiles(
        self, product: Product, tile: GroupedWgmmaTile, weight: ops.Weight, bias: Tensor | None, gate: ops.Gate | None
    ) -> Callable[..., None]:
        def multiply(x: Tensor, weight: ops.Weight, bias: Tensor, places: Places, out: Tensor) -> None:
            assert places.tiles is not None
            assert len(places.tiles) == order.most_tiles(product, tile.block_m)
            for expert, first, end in places.tiles.tolist():
                here = list(range(first, min(first + tile.block_m, end)))
                self.met.append(len(here))
                if here:
                    pairs = places.order[here].long()
                    y = x[pairs // product.top_k if gate else here] @ matrix_of(weight, expert, product).t() + bias[expert]
                    out[here if gate else pairs] = gated(y, gate) if gate else y

        return multiply


def matrix_of(weight: ops.Weight, expert: int, product: Product) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return weight.rows(expert * product.n, (expert + 1) * product.n).dequantize(product.dtype)
    return weight[expert]


def listed(name: str, block_m: int, refuses: Callable[[Product], str | None] = lambda product: None) -> Listed:
    """The row of the table with this name, as a stand-in with tiles of at most block_m pairs."""
    changes = {"tile": lambda product: GroupedWgmmaTile(block_m, 128), "refuses": refuses}
    return Listed(**{**vars(table.kernel_named(name)), **changes})


@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_are_listed_for_the_kernel_for_quantised_experts(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = listed("expert_wgmma", block_m)
    monkeypatch.setattr(table, "KERNELS", (stand_in,))
    case = Case(40, 2, num_experts=3, hidden=64, width=32, gate=CLAMPED, bias=True, routing="elsewhere")
    x, index, weights, experts = quantised("mxfp4", case, torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    assert_matches_reference(compute_experts(x, index, weights, experts, False), exact, eager)
    assert sum(stand_in.met) == 2 * int(((index >= 0) & (index < 3)).sum())
    assert max(stand_in.met) == block_m or block_m == 64


def test_tiles_are_listed_for_the_kernel_for_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second product has the portable kernel."""
    stand_in = listed("expert_matrices", 16, lambda product: None if product.gated else "for the test")
    monkeypatch.setattr(table, "KERNELS", (stand_in, table.kernel_named("grouped")))
    case = Case(40, 2, num_experts=3, gate=CLAMPED, transposed=True, bias=True, routing="elsewhere")
    x, index, weights, experts = case.make(torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    assert_matches_reference(compute_experts(x, index, weights, experts, False), exact, eager)
    assert sum(stand_in.met) == int(((index >= 0) & (index < 3)).sum())
    assert max(stand_in.met) == 16


def test_rows_of_quantised_experts_do_not_know_each_other_where_that_is_asked() -> None:
    x, index, weights, experts = quantised("mxfp4", Case(5, 2, num_experts=3, hidden=64, width=32), torch.float32)
    whole = compute_experts(x, index, weights, experts, True)
    alone = slice(4, 5)
    torch.testing.assert_close(compute_experts(x[alone], index[alone], weights[alone], experts, True), whole[alone])


def test_no_tokens() -> None:
    x, index, weights, experts = Case(3, 2).make(torch.float32)
    assert compute_experts(x[:0], index[:0], weights[:0], experts, False).shape == (0, 40)


@pytest.mark.slow
def test_values_that_are_not_finite_stay_in_their_row() -> None:
    for tokens in (1, 20):
        x, index, weights, experts = Case(tokens, 2, gate=CLAMPED).make(torch.float32)
        expected = compute_experts(x, index, weights, experts, False)
        x[-1] = float("nan")
        out = compute_experts(x, index, weights, experts, False)
        assert torch.isnan(out[-1]).all()
        assert torch.equal(out[:-1], expected[:-1])


def test_rows_do_not_know_each_other_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a row is at the same place of a tile of the same size, and it is never computed by the kernels for few tokens."""
    asked = []

    def tile(product: Product) -> GroupedTile:
        asked.append(grouped_tile(product))
        return small_grouped_tile(product)

    rows = [replace(kernel, tile=tile) if kernel.name == "grouped" else kernel for kernel in table.KERNELS]
    monkeypatch.setattr(table, "KERNELS", tuple(rows))
    x, index, weights, experts = Case(33, 3, num_experts=9, bias=True).make(torch.float32)
    whole = compute_experts(x, index, weights, experts, True)
    for row in (0, 7, 32):
        alone = slice(row, row + 1)
        torch.testing.assert_close(compute_experts(x[alone], index[alone], weights[alone], experts, True), whole[alone])
    assert asked == asked[:1] * 4, "every number of rows has the same tile, and both products of a call"


@pytest.mark.parametrize("gate", [SWIGLU, CLAMPED], ids=["swiglu", "clamped"])
def test_what_is_gated_is_kept_where_that_is_asked(gate: ops.Gate) -> None:
    """It is that of each pair in the order of the rows of the weights, and the result has the same bits."""
    x, index, weights, experts = Case(9, 2, gate=gate, bias=True, routing="uneven").make(torch.float32)
    kept = torch.full((9, 2, 48), torch.nan)
    expected = torch.full((9, 2, 48), torch.nan, dtype=torch.float64)
    out = compute_experts(x, index, weights, experts, True, kept)
    assert torch.equal(out, compute_experts(x, index, weights, experts, True))
    TorchOps().experts(x.double(), index, weights.double(), wide(experts), True, expected)
    torch.testing.assert_close(kept.double(), expected, rtol=1e-5, atol=1e-5)
