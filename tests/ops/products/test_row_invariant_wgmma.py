"""The source of the Hopper kernel of row-invariant products of many rows, emulated on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from hopper_emulator import emulated
from hopper_threads import EmulationError
from rounded_once import randn
from torch import Tensor

from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant_wgmma import plan_invariant_wgmma
from fa_serve.ops.products.tiles import InvariantWgmmaTile
from fa_serve.testing import assert_matches_reference

BF16 = torch.bfloat16


def check(
    m: int, n: int, k: int, tile: InvariantWgmmaTile, *, bias: bool = False, residual: bool = False, num_sms: int = 3
) -> None:
    x = randn(m, k + 8, dtype=BF16)[:, :k]
    weight = randn(n, k, dtype=BF16, seed=1) / 8
    added = randn(n, dtype=BF16, seed=2) if bias else None
    kept = randn(m, n, dtype=BF16, seed=3) if residual else None
    product = Product(values="float", n=n, k=k, tokens=m, dtype=BF16, arch=90, invariant=True, num_sms=num_sms)
    details = Details(strides=(*x.stride(), *weight.stride()), alpha=0.5)
    y = plan_invariant_wgmma(product, tile, details)(x, weight, added, None, None if kept is None else kept.clone())

    def expected(dtype: torch.dtype) -> Tensor:
        found = torch.nn.functional.linear(*(None if each is None else each.to(dtype) for each in (x, weight, added)))
        return found if kept is None else kept.to(dtype) + 0.5 * found

    assert_matches_reference(y, expected(torch.float64), expected(BF16))


@pytest.mark.parametrize("extras", [(), ("bias",), ("residual",), ("bias", "residual")], ids="-".join)
def test_rows_and_columns_that_fill_no_tile(extras: tuple[str, ...]) -> None:
    with emulated():
        check(200, 200, 200, InvariantWgmmaTile(128, 3, 2), **dict.fromkeys(extras, True))


@pytest.mark.parametrize(("m", "n", "k", "stages", "lag"), [(1, 256, 64, 2, 2), (129, 300, 192, 2, 0), (2200, 136, 128, 4, 1)])
def test_rings_and_groups_of_tiles(m: int, n: int, k: int, stages: int, lag: int) -> None:
    """The ring goes on from tile to tile, and every tile is computed once, also in the last group of rows."""
    with emulated(resident_blocks=2):
        check(m, n, k, InvariantWgmmaTile(256, stages, lag), num_sms=2)


FAULTS = {
    "weights of another block": ("[tile_n * var.tile.block_n, 64 * block]", "[tile_n * var.tile.block_n, 0 * block]"),
    "both consumers store the same rows": ("tile_m * 128 + 64 * group, args", "tile_m * 128, args"),
    "the last group of rows is as high as the others": ("gl.minimum(args.tiles_m - first, _GROUP_M)", "_GROUP_M"),
    "rows behind the end are stored": ("gl.expand_dims(rows < args.rows, 1) & (columns", "(rows[:, None] >= 0) & (columns"),
    "the residual is not scaled": ("+ args.alpha * values", "+ values"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    with pytest.raises((AssertionError, EmulationError, IndexError)), emulated(faults=dict([FAULTS[fault]])):
        check(200, 200, 200, InvariantWgmmaTile(128, 3, 2), residual=True)
