"""What experts launch on a GPU, counted where launches happen, and the facts of both products of a mixture."""

from __future__ import annotations

import pytest
import torch
from meta_weights import meta, meta_weight
from products_by_kernel import a_gpu, counted_launches
from quantized import float4_weight

from fa_serve import ops
from fa_serve.ops.moe.run import products_of
from fa_serve.ops.triton_ops import TritonOps

SILU = ops.Gate("silu")
FEW = ["_gated_rows", "_mixed_rows"]


def matrices(num_experts: int, hidden: int, width: int, *, transposed: bool = False) -> ops.ExpertWeights:
    gate_up = meta(num_experts, 2 * width, hidden)
    down = meta(num_experts, hidden, width)
    if transposed:
        gate_up = meta(num_experts, hidden, 2 * width).transpose(1, 2)
        down = meta(num_experts, width, hidden).transpose(1, 2)
    return ops.ExpertWeights(gate_up, None, down, None, SILU)


def quantised(values: str, num_experts: int, hidden: int, width: int, group: int) -> ops.ExpertWeights:
    gate_up = meta_weight(values, num_experts * 2 * width, hidden, group)
    return ops.ExpertWeights(gate_up, None, meta_weight(values, num_experts * hidden, width, group), None, SILU)


def many(*products: str, listed: bool = False) -> list[str]:
    return ["_sort_pairs", *["_list_tiles"] * listed, *products, "_sum_experts"]


QWEN = matrices(128, 2048, 768)
GPT_OSS = matrices(32, 2880, 2880, transposed=True)
MXFP4 = quantised("float4", 32, 2880, 2880, 32)
ODD = quantised("int4", 32, 2880, 2880, 96)
HALF_ODD = ops.ExpertWeights(MXFP4.gate_up, None, meta_weight("float4", 32 * 2880, 2884, 32), None, SILU)


@pytest.mark.parametrize(
    ("experts", "tokens", "top_k", "arch", "invariant", "names"),
    [
        pytest.param(QWEN, 1, 8, 90, False, FEW, id="qwen-1"),
        pytest.param(QWEN, 2, 8, 90, False, FEW, id="qwen-2"),
        pytest.param(QWEN, 3, 8, 90, False, many(*["_grouped_linear"] * 2), id="qwen-3"),
        pytest.param(QWEN, 1024, 8, 90, False, many(*["experts_matrix"] * 2, listed=True), id="qwen-1024"),
        pytest.param(QWEN, 1024, 8, 80, False, many(*["_grouped_linear"] * 2), id="qwen-sm80"),
        pytest.param(QWEN, 1, 8, 90, True, many(*["_grouped_linear"] * 2), id="qwen-deterministic"),
        pytest.param(GPT_OSS, 1, 4, 90, False, many(*["_grouped_linear"] * 2), id="columns-1"),
        pytest.param(GPT_OSS, 512, 4, 90, False, many(*["experts_matrix"] * 2, listed=True), id="columns-512"),
        pytest.param(MXFP4, 1, 4, 90, False, FEW, id="mxfp4-1"),
        pytest.param(MXFP4, 8, 4, 90, False, many(*["_grouped_wgmma"] * 2, listed=True), id="mxfp4-8"),
        pytest.param(MXFP4, 4097, 4, 90, False, many(*["_dequantize", "_grouped_linear"] * 3), id="mxfp4-4097"),
        pytest.param(MXFP4, 4097, 4, 90, True, many(*["_grouped_linear"] * 2), id="mxfp4-deterministic"),
        pytest.param(ODD, 1600, 4, 90, False, many(*["_dequantize", "_grouped_linear"] * 3), id="int4-G96"),
        pytest.param(ODD, 8, 4, 0, False, many(*["_grouped_linear"] * 2), id="int4-amd"),
        pytest.param(HALF_ODD, 8, 4, 90, False, many("_grouped_wgmma", "_grouped_linear", listed=True), id="one-of-both"),
    ],
)
def test_what_is_launched(
    experts: ops.ExpertWeights, tokens: int, top_k: int, arch: int, invariant: bool, names: list[str]
) -> None:
    hidden = experts.gate_up.shape[-1]
    with a_gpu(arch), counted_launches() as launched:
        index = meta(tokens, top_k, dtype=torch.int64)
        y = TritonOps().experts(meta(tokens, hidden), index, meta(tokens, top_k), experts, invariant)
    assert y.shape == (tokens, hidden)
    assert launched == names


def test_no_tokens_take_no_launch() -> None:
    with a_gpu(90), counted_launches() as launched:
        index = meta(0, 8, dtype=torch.int64)
        assert TritonOps().experts(meta(0, 2048), index, meta(0, 8), QWEN, False).shape == (0, 2048)
    assert launched == []


def test_both_products_know_the_layout_of_both_weights() -> None:
    """Few tokens are computed row by row if both products can be."""
    index = meta(1, 4, dtype=torch.int64)
    mixed = ops.ExpertWeights(QWEN.gate_up, None, matrices(128, 2048, 768, transposed=True).down, None, SILU)
    for experts, by_rows in ((QWEN, True), (mixed, False), (GPT_OSS, False), (MXFP4, True)):
        products = products_of(meta(1, experts.gate_up.shape[-1]), index, experts, False)
        assert [product.by_rows for product in products] == [by_rows] * 2
        assert [product.gated for product in products] == [True, False]


def test_quantised_experts_have_sizes() -> None:
    """Two experts of 64 outputs of 32 values, from 64 inputs."""
    weights = ops.ExpertWeights(float4_weight(2 * 2 * 32, 64), None, float4_weight(2 * 64, 32), None, SILU)
    assert weights.sizes == (2, 64, 32)
    first, second = products_of(meta(3, 64), meta(3, 2, dtype=torch.int64), weights, False)
    assert (first.n, first.k, first.outputs, second.n, second.k) == (64, 64, 32, 64, 32)
    assert first.pairs_per_expert == second.pairs_per_expert == 3.0
