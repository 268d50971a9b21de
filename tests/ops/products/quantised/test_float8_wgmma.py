"""The source of the Hopper kernel of float8 products with few tokens, emulated on a CPU, against float64, and compiled."""

from __future__ import annotations

import pytest
import torch
import triton
from cross_compile import compiling_for
from gluon_emulator import emulated
from product_cases import dense
from products_by_kernel import multiply_by
from quantized import float8_weight
from rounded_once import randn
from sampled_cases import each_nth

from fa_serve.ops.ops_backend import RoundedRows
from fa_serve.ops.products.quantised import float8_wgmma
from fa_serve.ops.products.quantised.tiles import Float8Tile, float8_tile
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.testing import assert_matches_reference

BF16 = torch.bfloat16


def rounded_rows(m: int, k: int) -> RoundedRows:
    """Random rows in float8, each with another scale."""
    data = randn(m, k, dtype=torch.float32, seed=3).to(torch.float8_e4m3fn)
    return RoundedRows(data, torch.linspace(0.25, 2.0, m)[:, None], BF16)


@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize(
    ("m", "k", "tile"),
    [
        (9, 1296, Float8Tile(16, 64, 5, 1)),
        (33, 512, Float8Tile(64, 64, 3, 1)),
        (2, 128, Float8Tile(16, 64, 4, 1)),
        (100, 272, Float8Tile(128, 128, 2, 1)),
    ],
    ids=["5-stages", "3-stages", "one-block", "2-stages"],
)
def test_products(m: int, k: int, tile: Float8Tile, added: bool) -> None:
    """Rows, tokens and columns that do not fill a tile; with a bias and a residual."""
    n = 101
    x = rounded_rows(m, k)
    weight = float8_weight(n, k, group_size=k)
    bias = randn(n, dtype=BF16, seed=1) if added else None
    residual = randn(m, n, dtype=BF16, seed=2) if added else None
    wide = x.data.double() * x.scales.double()
    exact = wide @ weight.dequantize(torch.float64).t()
    eager = torch.nn.functional.linear(wide.to(BF16), weight.dequantize(BF16), bias)
    if bias is not None and residual is not None:
        exact = residual.double() + 0.5 * (exact + bias.double())
        eager = residual + 0.5 * eager
    with emulated(float8_wgmma):
        y = multiply_by("float8_wgmma", x, weight, bias, residual=residual, alpha=0.5, tile=tile)
    assert y.dtype == BF16
    assert residual is None or y is residual
    assert_matches_reference(y, exact, eager)


def test_ranges_of_columns_are_summed() -> None:
    """9 blocks of columns leave the last of 4 ranges empty."""
    x = rounded_rows(20, 1152)
    weight = float8_weight(128, 1152, group_size=1152)
    with emulated(float8_wgmma):
        y = multiply_by("float8_wgmma", x, weight, tile=Float8Tile(32, 64, 3, 4))
    exact = (x.data.double() * x.scales.double()) @ weight.dequantize(torch.float64).t()
    assert_matches_reference(y, exact, exact.to(BF16))


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), each_nth(4, [(128, 28672), (64, 28672), (16, 28672), (128, 4096), (16, 4096), (64, 4096)]))
def test_machine_code(m: int, n: int) -> None:
    """Tensor cores multiply float8, no product waits for another one, and as many programs fit as the tiles are chosen for."""
    k = 4096
    x = RoundedRows(torch.zeros(m, k).to(torch.float8_e4m3fn), torch.ones(m, 1), BF16)
    weight = QuantizedWeight(torch.zeros(n, k, dtype=torch.int8).view(torch.float8_e4m3fn), torch.ones(n, 1), k, k)
    with compiling_for("sm90") as kernels:
        multiply_by("float8_wgmma", x, weight, residual=torch.zeros(m, n, dtype=BF16), num_sms=132)
    kernel = kernels[0]
    assert [kernel.name for kernel in kernels] == ["_scaled_wgmma", "_sum_splits"][: 1 if n > 4096 else 2]
    assert kernel.spill_bytes == 0
    assert kernel.wgmma_faults == []
    assert f"wgmma.mma_async.sync.aligned.m64n{m}k32.f32.e4m3.e4m3" in kernel.binary.asm["ptx"]
    blocks, rest = divmod(kernel.sass.count("QGMMA."), 4)  # a loop of a few blocks is unrolled
    assert blocks >= 1
    assert rest == 0
    assert kernel.sass.count("FADD") >= m // 2 * (blocks - 1), "sums of 128 columns are added in float32"
    if n == 28672:
        assert kernel.hot_loop["QGMMA"] == 4
        assert kernel.hot_loop["FADD"] == m // 2
    residents = (228 << 10) // (kernel.shared_bytes + 1024)
    tiles = triton.cdiv(n, 64) * float8_tile(dense("float8", n, k, tokens=m)).splits
    assert min(residents, 65536 // (128 * kernel.registers)) * 132 >= min(tiles, 264)
