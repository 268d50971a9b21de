"""The kernels of experts in Triton's interpreter, against float64: uneven routing, every layout of weights, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from quantized import float4_weight, float8_weight, int4_weight
from rounded_once import randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.experts import (
    kernel as experts_kernel,
)
from fa_serve.ops.experts import (
    matrix as experts_matrix_kernel,
)
from fa_serve.ops.experts import (
    matrix_types as experts_matrix_types,
)
from fa_serve.ops.experts import (
    primitives as experts_primitives,
)
from fa_serve.ops.experts import (
    quantised as experts_wgmma_kernel,
)
from fa_serve.ops.experts import (
    rows as experts_rows_kernel,
)
from fa_serve.ops.experts.fallback import gated
from fa_serve.ops.experts.kernel import GroupedTile, launch_experts
from fa_serve.ops.experts.quantised import GroupedWgmmaTile
from fa_serve.ops.experts.rows import RowTile
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
    *[pytest.param(Case(17, k, num_experts=9), id=f"k{k}") for k in range(1, 9)],
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
    monkeypatch.setattr(experts_kernel, "grouped_tile", lambda *_: GroupedTile(16, 32, 16, 4, 2))
    monkeypatch.setattr(experts_kernel, "quantized_tile", lambda *_: GroupedTile(16, 64, 32, 4, 2))
    monkeypatch.setattr(experts_rows_kernel, "gated_tile", small_row_tile)
    monkeypatch.setattr(experts_rows_kernel, "mixed_tile", lambda weight, top_k: small_row_tile(weight))
    monkeypatch.setattr(experts_kernel, "_SORT_BLOCKS", (16, 32))
    monkeypatch.setattr(experts_kernel, "_SUM_BLOCK", 32)
    experts_kernel.PLANS.clear()


def small_row_tile(weight: ops.Weight) -> RowTile:
    """Rows of 40 columns take ten steps in two groups, and rows of 24 six steps in one."""
    if isinstance(weight, QuantizedWeight):
        return RowTile(16, 64 if weight.values == "float8" else 256, 1, 1, 4)
    return RowTile(4, 4, 2, 2, 4)


def wide(experts: ops.ExpertWeights) -> ops.ExpertWeights:
    tensors = [x if x is None or isinstance(x, QuantizedWeight) else x.double() for x in experts[:-1]]
    return ops.ExpertWeights(*tensors, experts.gate)


@pytest.mark.parametrize("case", CASES)
def test_experts(case: Case) -> None:
    check(case, torch.float32)


HALF = [case for case in CASES if case.id in ("k2", "T1", "T63", "uneven", "odd", "odd-T1", "gpt-oss", "gpt-oss-T1")]


@pytest.mark.parametrize("case", HALF)
def test_experts_in_float16(case: Case) -> None:
    """Each kernel, with both orders of the weights."""
    call, out = check(case, torch.float16)
    assert torch.equal(launch_experts(*call, False), out), "equal calls have equal bits"


def check(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor, ops.ExpertWeights], Tensor]:
    call = x, index, weights, experts = case.make(dtype)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    out = launch_experts(x, index, weights, experts, False)
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
        assert_matches_reference(launch_experts(x, index, weights, experts, False), exact, eager)


@pytest.mark.parametrize("name", ["mxfp4", "float8-row", "int4-zeros"])
def test_some_experts_at_a_time_are_dequantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts, of 4 and of 2 experts, with biases and pairs that belong to another process."""
    monkeypatch.setattr(experts_kernel, "choose_experts", lambda *_: "dequantized")
    monkeypatch.setattr(experts_kernel, "_MATRIX_BYTES", 1)
    case = Case(9, 2, num_experts=6, hidden=288, width=32, gate=CLAMPED, bias=True, routing="elsewhere")
    x, index, weights, experts = quantised(name, case, torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    assert_matches_reference(launch_experts(x, index, weights, experts, False), exact, eager)


@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_are_listed_for_the_kernel_for_hopper(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in multiplies the pairs of the listed tiles, each of which has at most block_m pairs of one expert."""
    rows_of = []

    def plan(
        weight: QuantizedWeight, num_experts: int, top_k: int, gate: ops.Gate | None, *_: object
    ) -> Callable[[tuple[Tensor, ...]], None]:
        rows = weight.shape[0] // num_experts

        def product(tensors: tuple[Tensor, ...]) -> None:
            x, data, scales, _, bias, order, tiles, out = tensors
            assert data is weight.data
            assert scales is weight.scales
            for expert, first, end in tiles.tolist():
                places = list(range(first, min(first + block_m, end)))
                rows_of.append(len(places))
                if places:
                    matrix = weight.rows(expert * rows, (expert + 1) * rows).dequantize(x.dtype)
                    pairs = order[places].long()
                    y = x[pairs // top_k if gate else places] @ matrix.t() + bias[expert]
                    out[places if gate else pairs] = gated(y, gate) if gate else y

        return product

    monkeypatch.setattr(experts_kernel, "choose_experts", lambda *_: "wgmma")
    monkeypatch.setattr(experts_wgmma_kernel, "grouped_wgmma_tile", lambda _: GroupedWgmmaTile(block_m, 128))
    monkeypatch.setattr(experts_wgmma_kernel, "plan_grouped_wgmma", plan)
    case = Case(40, 2, num_experts=3, hidden=64, width=32, gate=CLAMPED, bias=True, routing="elsewhere")
    x, index, weights, experts = quantised("mxfp4", case, torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    assert_matches_reference(launch_experts(x, index, weights, experts, False), exact, eager)
    met = int(((index >= 0) & (index < 3)).sum())
    assert sum(rows_of) == 2 * met
    assert max(rows_of) == block_m or block_m == 64


def test_tiles_are_listed_for_the_kernel_for_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in multiplies the pairs of the listed tiles. The second product has the portable kernel."""
    rows_of = []

    def plan(
        weight: Tensor, pairs: int, top_k: int, gate: ops.Gate | None, tiles: int, stride_be: int
    ) -> Callable[[tuple[Tensor, ...]], None]:
        def product(tensors: tuple[Tensor, ...]) -> None:
            matrices, x, _, bias, order, listed, out = tensors
            assert matrices is weight
            assert (len(listed), stride_be) == (tiles, bias.stride(0))
            for expert, first, end in listed.tolist():
                places = list(range(first, min(first + 16, end)))
                rows_of.append(len(places))
                if places:
                    y = x[order[places].long() // top_k] @ matrices[expert].t() + bias[expert]
                    out[places] = gated(y, gate)

        return product

    monkeypatch.setattr(experts_kernel, "choose_matrices", lambda shape, *_: "matrix" if shape[1] == 2 * 24 else "portable")
    monkeypatch.setattr(experts_matrix_types, "BLOCK_M", 16)
    monkeypatch.setattr(experts_matrix_kernel, "plan_experts_matrix", plan)
    case = Case(40, 2, num_experts=3, gate=CLAMPED, transposed=True, bias=True, routing="elsewhere")
    x, index, weights, experts = case.make(torch.float32)
    exact = TorchOps().experts(x.double(), index, weights.double(), wide(experts), False)
    eager = TorchOps().experts(x, index, weights, experts, False)
    assert_matches_reference(launch_experts(x, index, weights, experts, False), exact, eager)
    assert sum(rows_of) == int(((index >= 0) & (index < 3)).sum())
    assert max(rows_of) == 16


def test_rows_of_quantised_experts_do_not_know_each_other_where_that_is_asked() -> None:
    x, index, weights, experts = quantised("mxfp4", Case(5, 2, num_experts=3, hidden=64, width=32), torch.float32)
    whole = launch_experts(x, index, weights, experts, True)
    alone = slice(4, 5)
    torch.testing.assert_close(launch_experts(x[alone], index[alone], weights[alone], experts, True), whole[alone])


def test_no_tokens() -> None:
    x, index, weights, experts = Case(3, 2).make(torch.float32)
    assert launch_experts(x[:0], index[:0], weights[:0], experts, False).shape == (0, 40)


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    for tokens in (1, 20):
        x, index, weights, experts = Case(tokens, 2, gate=CLAMPED).make(torch.float32)
        expected = launch_experts(x, index, weights, experts, False)
        x[-1] = float("nan")
        out = launch_experts(x, index, weights, experts, False)
        assert torch.isnan(out[-1]).all()
        assert torch.equal(out[:-1], expected[:-1])


def test_rows_do_not_know_each_other_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a row is at the same place of a tile of the same size, and it is never computed in the way for few tokens."""
    chosen = []

    def tile(pairs_per_expert: float, *_: object) -> GroupedTile:
        chosen.append(pairs_per_expert)
        return GroupedTile(16, 32, 16, 4, 2)

    monkeypatch.setattr(experts_kernel, "grouped_tile", tile)
    x, index, weights, experts = Case(33, 3, num_experts=9, bias=True).make(torch.float32)
    whole = launch_experts(x, index, weights, experts, True)
    for row in (0, 7, 32):
        alone = slice(row, row + 1)
        torch.testing.assert_close(launch_experts(x[alone], index[alone], weights[alone], experts, True), whole[alone])
    assert chosen == [0] * 4, "every number of rows has the same tile"


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (40, 3), (64, 8)])
def test_pairs_are_sorted_by_expert_and_then_by_place(tokens: int, top_k: int) -> None:
    index = torch.randint(-1, 8, (tokens, top_k), generator=torch.Generator().manual_seed(1))
    order = torch.empty(tokens * top_k, dtype=torch.int32)
    starts = torch.empty(8, dtype=torch.int32)
    experts_kernel._sort_pairs[(7,)](index, order, starts, tokens * top_k, 32, False)
    flat = index.flatten()
    expected = [pair for expert in range(7) for pair in (flat == expert).nonzero().flatten().tolist()]
    assert order[: len(expected)].tolist() == expected
    assert starts.tolist() == [int(((flat >= 0) & (flat < expert)).sum()) for expert in range(8)]
