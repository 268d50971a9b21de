"""The source of the Hopper kernel for 2 to 128 tokens, emulated on a CPU, against float64; and its tiles."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from quantized import float8_weight, int4_weight
from rounded_once import dtype_id, randn
from torch import Tensor

from fa_serve.ops.products.quantised import wgmma as quantized_wgmma_kernel
from fa_serve.ops.products.quantised.wgmma import WgmmaTile, launch_quantized_wgmma, stage_bytes, tile_options, wgmma_tile
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
def test_products(name: str, dtype: torch.dtype, m: int, tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(quantized_wgmma_kernel, "wgmma_tile", lambda *sizes: tile)
    with emulated(quantized_wgmma_kernel):
        y = launch_quantized_wgmma(x, weight, bias, residual, 0.5)
    assert_matches_reference(y, exact, eager)


def test_ranges_of_columns_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 blocks of columns leave the last of 4 ranges empty, and 8 blocks fill all, the last one in part."""

    def sum_splits(sums: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, alpha: float) -> Tensor:
        assert sums.shape == (4, 64, 128)
        return sums.sum(0).to(out.dtype)

    monkeypatch.setattr(quantized_wgmma_kernel, "launch_sum_splits", sum_splits)
    monkeypatch.setattr(quantized_wgmma_kernel, "wgmma_tile", lambda *sizes: WgmmaTile(64, 128, 2, 4))
    for k in (1200, 1816):
        weight = int4_weight(128, k, group_size=128, dtype=torch.bfloat16)
        x = randn(64, k, dtype=torch.bfloat16)
        with emulated(quantized_wgmma_kernel):
            y = launch_quantized_wgmma(x, weight, None, None, 1.0)
        matrix = weight.dequantize(torch.float64)
        assert_matches_reference(y, x.double() @ matrix.t(), x @ matrix.bfloat16().t())


@pytest.mark.parametrize(
    ("m", "n", "k", "values", "tile"),
    [
        (2, 28672, 4096, "int4", WgmmaTile(16, 64, 3, 1)),
        (16, 28672, 4096, "float8", WgmmaTile(16, 64, 4, 1, True)),
        (32, 28672, 4096, "int4", WgmmaTile(32, 64, 2, 1)),
        (64, 28672, 4096, "int4", WgmmaTile(64, 128, 2, 1)),
        (64, 28672, 4096, "float8", WgmmaTile(64, 128, 3, 1)),
        (16, 4096, 14336, "int4", WgmmaTile(16, 64, 3, 8)),
        (17, 4096, 14336, "int4", WgmmaTile(32, 64, 2, 8)),
        (16, 6144, 4096, "int4", WgmmaTile(16, 64, 3, 4)),
        (64, 6144, 4096, "float8", WgmmaTile(64, 64, 4, 2, True)),
        (64, 4096, 14336, "int4", WgmmaTile(64, 64, 2, 4)),
        (65, 4096, 14336, "int4", WgmmaTile(128, 64, 3, 2)),
        (128, 6144, 4096, "int4", WgmmaTile(128, 64, 3, 1)),
        (16, 64, 1024, "float8", WgmmaTile(16, 64, 4, 1, True)),
    ],
)
def test_tiles_are_those_that_were_measured(m: int, n: int, k: int, values: str, tile: WgmmaTile) -> None:
    assert wgmma_tile(132, m, n, k, values) == tile
    assert tile.stages * stage_bytes(tile.block_m, tile.block_n, values) <= 227 << 10


def test_registers_are_limited_where_shared_memory_has_room_for_more_programs() -> None:
    assert tile_options(WgmmaTile(16, 64, 3, 1), "int4")["maxnreg"] == 128
    assert tile_options(WgmmaTile(64, 128, 2, 1), "int4")["maxnreg"] == 128
    assert tile_options(WgmmaTile(16, 64, 4, 1, True), "int4")["maxnreg"] == 168
    assert "maxnreg" not in tile_options(WgmmaTile(64, 128, 4, 1, True), "int4")
