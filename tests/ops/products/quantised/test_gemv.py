"""The source of the Hopper kernel for one token, emulated on a CPU, against float64; and its tiles."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from quantized import float8_weight, int4_weight
from rounded_once import dtype_id, randn

from fa_serve import ops
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.quantised import gemv as quantized_gemv_kernel
from fa_serve.ops.products.quantised.gemv import GemvTile, gemv_tile, launch_quantized_gemv
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

EXACT = TorchOps()
INT4 = {
    "G128": {"group_size": 128},
    "G32-zeros-act-order": {"group_size": 32, "zeros": True, "act_order": True},
    "G512-zeros": {"group_size": 512, "zeros": True},
    "row": {"group_size": 4096},
}


@pytest.mark.parametrize("tile", [GemvTile(16, 4, 2, 1), GemvTile(16, 2, 4, 1), GemvTile(16, 8, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", INT4)
def test_products_of_4_bit_weights(name: str, dtype: torch.dtype, tile: GemvTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns that do not fill a tile, with a bias and a residual; one program for three tiles, and three programs."""
    n = 37
    k = 1300
    weight = int4_weight(n, k, dtype=dtype, **INT4[name])
    x = randn(1, k, dtype=dtype)
    bias = randn(n, dtype=dtype, seed=1)
    residual = randn(1, n, dtype=dtype, seed=2)
    exact = EXACT.linear(x.double(), weight, bias.double(), None, None, residual.double(), 0.5, None)
    eager = EXACT.linear(x, weight, bias, None, None, residual.clone(), 0.5, None)
    monkeypatch.setattr(quantized_gemv_kernel, "gemv_tile", lambda *sizes: tile)
    with emulated(quantized_gemv_kernel):
        y = launch_quantized_gemv(x, weight, bias, None, None, residual, 0.5)
    assert_matches_reference(y, exact, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", ["int4", "float8", "float8-blocks"])
def test_one_token_with_a_norm_and_a_gate(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 21
    k = 1152
    if name == "int4":
        weight = int4_weight(2 * n, k, group_size=64, zeros=True, act_order=True, dtype=dtype)
    else:
        weight = float8_weight(2 * n, k, group_size=k if name == "float8" else 128)
    x = 100 * randn(1, k, dtype=dtype)
    norm = randn(k, dtype=dtype, seed=3)
    activation = ops.ACTIVATIONS[0]
    exact = EXACT.linear(x.double(), weight, None, Norm(norm.double(), 1e-5, 1.0), activation, None, 1.0, None)
    eager = EXACT.linear(x, weight, None, Norm(norm, 1e-5, 1.0), activation, None, 1.0, None)
    monkeypatch.setattr(quantized_gemv_kernel, "multiprocessors", lambda device, otherwise: 132)
    with emulated(quantized_gemv_kernel):
        y = launch_quantized_gemv(x, weight, None, Norm(norm, 1e-5, 1.0), activation, None, 1.0)
    assert_matches_reference(y, exact, eager)


@pytest.mark.parametrize(
    ("n", "k", "values", "tile"),
    [
        (28672, 4096, "int4", GemvTile(16, 4, 3, 5)),
        (6144, 4096, "int4", GemvTile(16, 8, 2, 3)),
        (4096, 4096, "int4", GemvTile(16, 8, 3, 2)),
        (4096, 14336, "int4", GemvTile(16, 8, 3, 2)),
        (28672, 4096, "float8", GemvTile(16, 4, 2, 5)),
        (6144, 4096, "float8", GemvTile(16, 8, 3, 3)),
        (4096, 4096, "float8", GemvTile(16, 8, 4, 2)),
    ],
)
def test_tiles_are_those_that_were_measured(n: int, k: int, values: str, tile: GemvTile) -> None:
    assert gemv_tile(132, n, k, values) == tile
