"""The source of the Hopper kernel for one token, emulated on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import emulated
from products_by_kernel import multiply_by
from quantized import float8_weight, int4_weight
from rounded_once import dtype_id, randn

from fa_serve import ops
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.quantised import gemv
from fa_serve.ops.products.quantised.tiles import GemvTile
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
def test_products_of_4_bit_weights(name: str, dtype: torch.dtype, tile: GemvTile) -> None:
    """Rows and columns that do not fill a tile, with a bias and a residual; one program for three tiles, and three programs."""
    n = 37
    k = 1300
    weight = int4_weight(n, k, dtype=dtype, **INT4[name])
    x = randn(1, k, dtype=dtype)
    bias = randn(n, dtype=dtype, seed=1)
    residual = randn(1, n, dtype=dtype, seed=2)
    exact = EXACT.linear(x.double(), weight, bias.double(), None, None, residual.double(), 0.5, None)
    eager = EXACT.linear(x, weight, bias, None, None, residual.clone(), 0.5, None)
    with emulated(gemv):
        y = multiply_by("gemv", x, weight, bias, residual=residual, alpha=0.5, tile=tile)
    assert_matches_reference(y, exact, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", ["int4", "float8", "float8-blocks"])
def test_one_token_with_a_norm_and_a_gate(name: str, dtype: torch.dtype) -> None:
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
    with emulated(gemv):
        y = multiply_by("gemv", x, weight, None, Norm(norm, 1e-5, 1.0), activation, num_sms=132)
    assert_matches_reference(y, exact, eager)
