"""The Hopper kernel of experts with matrices, compiled for sm90 without a GPU: registers suffice, and no product waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cross_compile import compiling_for
from products_by_kernel import product_of_experts

from fa_serve import ops
from fa_serve.ops.moe.matrix_wgmma import plan_matrix_tiles
from fa_serve.ops.moe.run import compute_experts
from fa_serve.ops.moe.tiles import MatrixTile

GPT_OSS = ops.Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0)
BF16 = torch.bfloat16


def matrices(experts: int, n: int, k: int, transposed: bool) -> torch.Tensor:
    w = torch.zeros(experts, *((k, n) if transposed else (n, k)), dtype=BF16)
    return w.transpose(1, 2) if transposed else w


@pytest.mark.parametrize("tile", [MatrixTile(256, 4, 2), MatrixTile(256, 3), MatrixTile(128, 6, 3)], ids=str)
@pytest.mark.parametrize(
    ("gate", "transposed", "bias"),
    [
        pytest.param(ops.Gate("silu"), False, False, id="Qwen"),
        pytest.param(None, False, False, id="Qwen-down"),
        pytest.param(GPT_OSS, True, True, id="gpt-oss"),
        pytest.param(None, True, True, id="gpt-oss-down"),
        pytest.param(ops.Gate("gelu", limit=1.0), True, True, id="halves-of-columns"),
    ],
)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "deterministic"])
def test_machine_code(gate: ops.Gate | None, transposed: bool, bias: bool, tile: MatrixTile, invariant: bool) -> None:
    k = 2880
    weight = matrices(4, 2 * 1440, k, transposed)
    biases = torch.zeros(4, 2880, dtype=BF16) if bias else None
    x = torch.zeros(512, k, dtype=BF16)
    order = torch.zeros(512, dtype=torch.int32)
    tiles = torch.zeros(8, 3, dtype=torch.int32)
    with compiling_for("sm90") as kernels:
        product = replace(product_of_experts(x, weight, 4, 4, gate, 128), invariant=invariant)
        launch = plan_matrix_tiles(product, tile, gate, 8, 2880 if bias else 0, transposed)
        launch((weight, x, x, biases, order, tiles, torch.zeros(512, 1440 if gate else 2880, dtype=BF16)))
    (kernel,) = kernels
    assert kernel.spill_bytes <= (8 if gate and gate.activation == "gelu" else 0), "erf needs registers, outside of the loop"
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.wgmma_faults == []
    assert kernel.instructions["HGMMA"] == (12 if tile.lag else 8), "64 columns for each of two consumers"
    assert kernel.instructions["LDGSTS"] == (9 if gate else 0), "8 copies and their arrival"
    assert kernel.instructions["UTMALDG"] >= (2 if gate else 3)
    assert kernel.hot_loop.total() <= 64
    assert kernel.sass.count("STG.E.128") == 4 * 2 * tile.block_n // 64 // (2 if gate else 1)
    assert "griddepcontrol.wait" in kernel.binary.asm["ptx"]


@pytest.mark.parametrize(
    ("target", "dtype", "tokens", "kernel"),
    [
        pytest.param("sm90", BF16, 128, "experts_matrix", id="Hopper"),
        pytest.param("sm90", BF16, 126, "_grouped_linear", id="few-pairs"),
        pytest.param("sm90", torch.float16, 200, "_grouped_linear", id="float16"),
        pytest.param("sm80", BF16, 200, "_grouped_linear", id="Ampere"),
        pytest.param("sm100", BF16, 200, "_grouped_linear", id="Blackwell"),
    ],
)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "deterministic"])
def test_which_kernel_multiplies(target: str, dtype: torch.dtype, tokens: int, kernel: str, invariant: bool) -> None:
    """Four experts, of which each token takes two. Each kernel is compiled with the launches beside it."""
    gate_up, down = (torch.zeros(4, n, k, dtype=dtype) for n, k in ((512, 128), (128, 256)))
    experts = ops.ExpertWeights(gate_up, None, down, None, ops.Gate("silu"))
    index = torch.zeros(tokens, 2, dtype=torch.int64)
    with compiling_for(target) as kernels:
        compute_experts(torch.zeros(tokens, 128, dtype=dtype), index, torch.zeros(tokens, 2), experts, invariant)
    listed = ["_list_tiles"] if kernel == "experts_matrix" else []
    assert Counter(k.name for k in kernels) == Counter(["_sort_pairs", *listed, kernel, kernel, "_sum_experts"])
    assert max(k.spill_bytes for k in kernels) == 0
    assert all("griddepcontrol.wait" in k.binary.asm["ptx"] for k in kernels if target != "sm80")
