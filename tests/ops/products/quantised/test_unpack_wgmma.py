"""The source of the Hopper kernel for 2 to 128 tokens, emulated on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from product_cases import dense
from products_by_kernel import multiply_by
from quantized import float8_weight, int4_weight
from rounded_once import dtype_id, randn

from fa_serve.ops.products.quantised import unpack_wgmma
from fa_serve.ops.products.quantised.tiles import WgmmaTile, wgmma_tile
from fa_serve.ops.products.quantised.unpack_wgmma import stage_bytes, tile_options
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

EXACT = TorchOps()
INT4 = {
    "int4-G128": {"group_size": 128},
    "int4-G32-zeros-act-order": {"group_size": 32, "zeros": True, "act_order": True},
    "int4-G512-zeros": {"group_size": 512, "zeros": True},
    "int4-row": {"group_size": 4096},
    "int4-G128-scales-in-float16": {"group_size": 128, "dtype": torch.float16},
}
FLOAT8 = {"float8-G32": 32, "float8-G128": 128, "float8-row": 1296}


@pytest.mark.parametrize(
    ("m", "tile"),
    [(9, WgmmaTile(16, 64, 4, 1)), (33, WgmmaTile(64, 64, 2, 1)), (5, WgmmaTile(16, 64, 3, 1, True))],
    ids=["4-stages", "2-stages", "overlapped"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", [*INT4, *FLOAT8])
def test_products(name: str, dtype: torch.dtype, m: int, tile: WgmmaTile) -> None:
    """Rows, tokens and columns that do not fill a tile, with a bias and a residual."""
    n = 101
    if name in INT4:
        k = 1304
        weight = int4_weight(n, k, **({"dtype": dtype} | INT4[name]))
    else:
        k = 1296
        weight = float8_weight(n, k, group_size=FLOAT8[name])
    x = randn(m, k, dtype=dtype)
    bias = randn(n, dtype=dtype, seed=1)
    residual = randn(m, n, dtype=dtype, seed=2)
    exact = EXACT.linear(x.double(), weight, bias.double(), None, None, residual.double(), 0.5, None)
    eager = residual + 0.5 * torch.nn.functional.linear(x, weight.dequantize(dtype), bias)
    with emulated(unpack_wgmma):
        y = multiply_by("unpack_wgmma", x, weight, bias, residual=residual, alpha=0.5, tile=tile)
    assert_matches_reference(y, exact, eager)


def test_ranges_of_columns_are_summed() -> None:
    """5 blocks of columns leave the last of 4 ranges empty, and 8 blocks fill all, the last one in part."""
    for k in (1200, 1816):
        weight = int4_weight(128, k, group_size=128, dtype=torch.bfloat16)
        x = randn(64, k, dtype=torch.bfloat16)
        with emulated(unpack_wgmma):
            y = multiply_by("unpack_wgmma", x, weight, tile=WgmmaTile(64, 128, 2, 4))
        matrix = weight.dequantize(torch.float64)
        assert_matches_reference(y, x.double() @ matrix.t(), x @ matrix.bfloat16().t())


def test_registers_are_limited_where_shared_memory_has_room_for_more_programs() -> None:
    int4 = dense("int4")
    assert tile_options(WgmmaTile(16, 64, 3, 1), int4)["maxnreg"] == 128
    assert tile_options(WgmmaTile(64, 128, 2, 1), int4)["maxnreg"] == 128
    assert tile_options(WgmmaTile(16, 64, 4, 1, True), int4)["maxnreg"] == 168
    assert "maxnreg" not in tile_options(WgmmaTile(64, 128, 4, 1, True), int4)


@pytest.mark.parametrize("values", ["int4", "float8"])
@pytest.mark.parametrize("tokens", [2, 17, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (64, 1024)])
def test_stages_fit_in_shared_memory(n: int, k: int, tokens: int, values: str) -> None:
    product = dense(values, n, k, tokens=tokens)
    tile = wgmma_tile(product)
    assert tile.stages * stage_bytes(tile, product) <= 227 << 10


@pytest.mark.parametrize(
    "tile", [WgmmaTile(16, 64, 3, 1, True), WgmmaTile(16, 64, 5, 1, True), WgmmaTile(16, 64, 3, 1)], ids=str
)
@pytest.mark.parametrize("values", ["int4", "float8"])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_programs_begin_with_different_blocks(blocks: int, values: str, tile: WgmmaTile) -> None:
    """Three programs, with fewer blocks than stages, and with odd numbers of blocks. What follows the tokens is not read."""
    n = 192
    if values == "int4":
        k = 256 * blocks
        weight = int4_weight(n, k, group_size=128, zeros=True, dtype=torch.bfloat16)
    else:
        k = 128 * blocks
        weight = float8_weight(n, k, group_size=k)
    tokens = torch.full((8, k), torch.nan, dtype=torch.bfloat16)
    x = tokens[:3].copy_(randn(3, k, dtype=torch.bfloat16))
    with emulated(unpack_wgmma):
        y = multiply_by("unpack_wgmma", x, weight, tile=tile)
    matrix = weight.dequantize(torch.float64)
    assert_matches_reference(y, x.double() @ matrix.t(), x @ matrix.bfloat16().t())
