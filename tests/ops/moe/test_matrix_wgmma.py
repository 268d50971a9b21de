"""The source of the Hopper kernel of experts with matrices, emulated on a CPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_emulator import emulated
from hopper_threads import EmulationError
from products_by_kernel import product_of_experts
from rounded_once import randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.moe.matrix_wgmma import plan_matrix_tiles
from fa_serve.ops.moe.tiles import MATRIX_BLOCK_M, MatrixTile
from fa_serve.testing import assert_matches_reference

CLAMPED = ops.Gate("silu", interleaved=True, slope=1.702, limit=1.5, offset=1.0)
GATES = {"halves": ops.Gate("silu"), "gelu": ops.Gate("gelu_tanh", limit=0.5), "gpt-oss": CLAMPED, "none": None}
BF16 = torch.bfloat16
PAIRS = (70, 0, 200, 1, 128, 64, 60)
"""Pairs of each expert. Tiles of 128 have both halves, one of them, or a part of the second."""
TOP_K = 2
TILE = MatrixTile(128, 3, 2)


def list_of_tiles(room: int) -> Tensor:
    """What `order._list_tiles` writes for PAIRS, with room for more tiles than there are."""
    tiles = []
    first = 0
    for expert, count in enumerate(PAIRS):
        tiles += [(expert, first + i, first + count) for i in range(0, count, MATRIX_BLOCK_M)]
        first += count
    return torch.tensor([*tiles, *[(len(PAIRS), 0, 0)] * (room - len(tiles))], dtype=torch.int32)


def product(x: Tensor, matrices: Tensor, bias: Tensor | None, order: Tensor, gate: ops.Gate | None) -> Tensor:
    """The product in x's dtype. It has a row for each place in `order` with a gate, and else for each pair."""
    rows = matrices.shape[1]
    y = x.new_empty(sum(PAIRS), rows // 2 if gate else rows)
    places = list(range(sum(PAIRS)))
    for expert, count in enumerate(PAIRS):
        here = places[:count]
        places = places[count:]
        given = x[order[here] // TOP_K] if gate else x[here]
        found = given @ matrices[expert].t() + (0 if bias is None else bias[expert])
        wide = found.to(torch.promote_types(x.dtype, torch.float32))
        y[here if gate else order[here].long()] = gated(wide, gate).to(x.dtype) if gate else found
    return y


class Problem:
    """A product of all pairs, with columns that do not fill the last tile and weights of any order."""

    def __init__(
        self,
        gate: ops.Gate | None,
        *,
        transposed: bool = False,
        bias: bool = False,
        n: int = 72,
        k: int = 256,
        invariant: bool = False,
    ) -> None:
        self.invariant = invariant
        rows = 2 * n if gate else 2 * n + 16
        self.gate = gate
        self.weight = randn(len(PAIRS), rows, k, dtype=BF16) / 8
        if transposed:
            self.weight = self.weight.transpose(1, 2).contiguous().transpose(1, 2)
        self.order = torch.randperm(sum(PAIRS), generator=torch.Generator().manual_seed(0)).int()
        self.x = randn(sum(PAIRS) // TOP_K + 1 if gate else sum(PAIRS), k, dtype=BF16, seed=1)
        self.bias = randn(len(PAIRS), rows + 3, dtype=BF16, seed=2)[:, :rows] if bias else None

    def run(self, tile: MatrixTile = TILE, room: int = 10, num_sms: int = 3) -> Tensor:
        """By the kernel, within the emulator. What it does not store is NaN. num_sms: blocks that are resident, as it has"""
        y = torch.full((sum(PAIRS), self.weight.shape[1] // (2 if self.gate else 1)), float("nan"), dtype=BF16)
        stride_be = 0 if self.bias is None else self.bias.stride(0)
        # without a gate, the input has a row for each pair
        top_k = TOP_K if self.gate else 1
        product = product_of_experts(self.x, self.weight, len(PAIRS), top_k, self.gate, sum(PAIRS) // top_k)
        transposed = self.weight.stride(2) != 1
        product = replace(product, num_sms=num_sms, invariant=self.invariant)
        launch = plan_matrix_tiles(product, tile, self.gate, room, stride_be, transposed)
        launch((self.weight, self.x, self.x, self.bias, self.order, list_of_tiles(room), y))
        return y

    def check(self, y: Tensor) -> None:
        bias = None if self.bias is None else self.bias.double()
        exact = product(self.x.double(), self.weight.double(), bias, self.order, self.gate)
        assert_matches_reference(y, exact, product(self.x, self.weight, self.bias, self.order, self.gate))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("how", GATES)
def test_products(how: str, invariant: bool, transposed: bool, bias: bool) -> None:
    problem = Problem(GATES[how], transposed=transposed, bias=bias, invariant=invariant)
    with emulated():
        y = problem.run()
    problem.check(y)


@pytest.mark.parametrize(("blocks", "stages", "lag"), [(1, 2, 2), (3, 2, 0), (4, 4, 4), (5, 3, 3), (6, 4, 1)])
@pytest.mark.parametrize("how", ["halves", "none"])
def test_rings_and_columns_of_any_number(how: str, blocks: int, stages: int, lag: int) -> None:
    """The ring goes on from tile to tile, whatever the number of blocks is."""
    problem = Problem(GATES[how], n=136, k=64 * blocks)
    with emulated(resident_blocks=2, seed=blocks):
        y = problem.run(MatrixTile(256, stages, lag), room=7, num_sms=2)
    problem.check(y)


def test_a_nan_of_one_token_stays_in_its_rows() -> None:
    """Rows behind the end of an expert are inputs of the next one."""
    for gate in (GATES["halves"], None):
        problem = Problem(gate)
        with emulated():
            expected = problem.run()
            problem.x[70] = float("nan")
            y = problem.run()
        place = problem.order // TOP_K == 70 if gate else torch.arange(sum(PAIRS)) == problem.order[70]
        assert y[place].isnan().all()
        assert torch.equal(y[~place], expected[~place])


FAULTS = {
    "a stage is released before it is read": ("(at + STAGES - 1) % STAGES), count=1, pred=block > 0", "at % STAGES), count=1"),
    "the last stage of a tile is kept": ("(count + BLOCKS - 1) % STAGES), count=1)", "0), count=1, pred=False)"),
    "the wrong phase": ("((count // STAGES) & 1) ^ 1", "(count // STAGES) & 1"),
    "copies of threads are not waited for": ("async_copy.mbarrier_arrive(full, increment_count=False)", "pass"),
    "they are counted twice": ("increment_count=False", "increment_count=True"),
    "the first consumer does not say that it has begun": ("mbarrier.arrive(args.lead.index(0), count=1)", "pass"),
    "half of the weights are those of the gate": ("tile_n * HALF + var.n", "tile_n * HALF"),
    "the second half has the pairs of the first": (".slice(64 * group", ".slice(0 * group"),
    "rows behind the end are stored": ("keep = gl.expand_dims(places < tile.end, 1)", "keep = gl.expand_dims(places >= 0, 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    problem = Problem(GATES["halves"])
    old, new = FAULTS[fault]
    with pytest.raises((AssertionError, EmulationError)), emulated(faults={old: new}):
        problem.check(problem.run())
