"""The source of the Hopper kernel of quantised experts, emulated on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from products_by_kernel import multiply_by, product_of_experts
from quantized import float4_weight, float8_weight, int4_weight
from rounded_once import randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.moe import unpack_wgmma
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.moe.tiles import GroupedWgmmaTile
from fa_serve.ops.moe.unpack_wgmma import plan_tiles
from fa_serve.ops.products.quantised.pairs import product_tensors
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.testing import assert_matches_reference

CLAMPED = ops.Gate("silu", interleaved=True, slope=1.702, limit=1.5, offset=1.0)
GATES = {"halves": ops.Gate("silu"), "gpt-oss": CLAMPED, "none": None}
BF16 = torch.bfloat16
WEIGHTS = {
    "mxfp4": lambda n, k: float4_weight(n, k),
    "int4-G128": lambda n, k: int4_weight(n, k, group_size=128, dtype=BF16),
    "int4-G32-zeros": lambda n, k: int4_weight(n, k, group_size=32, zeros=True, dtype=BF16),
    "int4-G64-float32": lambda n, k: int4_weight(n, k, group_size=64),
    "int4-row": lambda n, k: int4_weight(n, k, group_size=4096, dtype=BF16),
    "int4-G256": lambda n, k: int4_weight(n, k, group_size=256, zeros=True, dtype=BF16),
    "float8-G128": lambda n, k: float8_weight(n, k, group_size=128),
    "float8-G32": lambda n, k: float8_weight(n, k, group_size=32),
    "float8-row": lambda n, k: float8_weight(n, k, group_size=k),
}
PAIRS = (5, 0, 17, 1)
"""Pairs of each expert: with tiles of 16, one expert has two."""
TOP_K = 2


def tiles_of(block_m: int, room: int) -> Tensor:
    """What `order._list_tiles` writes for PAIRS, with room for more tiles than there are."""
    tiles = []
    first = 0
    for expert, count in enumerate(PAIRS):
        tiles += [(expert, first + i, first + count) for i in range(0, count, block_m)]
        first += count
    return torch.tensor([*tiles, *[(len(PAIRS), 0, 0)] * (room - len(tiles))], dtype=torch.int32)


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, order: Tensor, gate: ops.Gate | None) -> Tensor:
    """The product in x's dtype. It has a row for each place in `order` with a gate, and else for each pair."""
    rows = weight.shape[0] // len(PAIRS)
    matrices = weight.dequantize(x.dtype).view(len(PAIRS), rows, -1)
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


@pytest.mark.parametrize("how", GATES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name: str, how: str) -> None:
    """Rows, pairs and columns that do not fill a tile or a block, with biases of any stride."""
    gate = GATES[how]
    n = 40
    k = 304 if name != "mxfp4" else 288
    rows = 2 * n if gate else n
    weight = WEIGHTS[name](len(PAIRS) * rows, k)
    order = torch.randperm(sum(PAIRS) + 1, generator=torch.Generator().manual_seed(0))[: sum(PAIRS)].int() % sum(PAIRS)
    order = torch.argsort(torch.argsort(order)).int()
    x = randn(sum(PAIRS), k, dtype=BF16)
    bias = randn(len(PAIRS), rows + 3, dtype=BF16, seed=1)[:, :rows]
    exact = product(x.double(), weight, bias.double(), order, gate)
    eager = product(x, weight, bias, order, gate)
    y = torch.full((sum(PAIRS), n), float("nan"), dtype=BF16)
    tiles = tiles_of(16, 6)
    with emulated(unpack_wgmma):
        asked = product_of_experts(x, weight, len(PAIRS), TOP_K, gate, 1)
        launch = plan_tiles(asked, GroupedWgmmaTile(16, 64), gate, len(tiles), bias.stride(0))
        launch((x, *product_tensors(weight), bias, order, tiles, y))
    assert_matches_reference(y, exact, eager)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("act_order", [False, True], ids=["", "act-order"])
def test_a_dense_weight_is_one_expert(act_order: bool, added: bool, splits: int) -> None:
    """Two tiles of tokens, the second of which is not full, and three blocks of columns, with a bias."""
    n = 72
    k = 560
    weight = int4_weight(n, k, group_size=128, act_order=act_order, dtype=BF16)
    x = randn(20, k, dtype=BF16)
    bias = randn(n, dtype=BF16, seed=1)
    residual = randn(20, n, dtype=BF16, seed=2) if added else None
    exact = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    eager = torch.nn.functional.linear(x, weight.dequantize(BF16), bias)
    if residual is not None:
        exact = residual.double() + 0.5 * exact
        eager = residual + 0.5 * eager
    tile = GroupedWgmmaTile(16, 64, splits)
    with emulated(unpack_wgmma):
        y = multiply_by("one_expert", x, weight, bias, residual=residual, alpha=0.5 if added else 1.0, tile=tile)
    assert_matches_reference(y, exact, eager)
    assert residual is None or y is residual
