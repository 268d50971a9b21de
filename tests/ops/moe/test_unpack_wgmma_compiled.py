"""The Hopper kernel of quantised experts, compiled for sm90 without a GPU: few instructions for a weight, and few spills."""

from __future__ import annotations

import pytest
import torch
from cross_compile import compiling_for
from products_by_kernel import multiply_by, product_of_experts
from quantized import float4_weight, float8_weight, int4_weight
from sampled_cases import each_nth

from fa_serve import ops
from fa_serve.ops.moe.tiles import GroupedWgmmaTile
from fa_serve.ops.moe.unpack_wgmma import plan_tiles
from fa_serve.ops.products.quantised.pairs import product_tensors
from fa_serve.ops.products.quantised.weight import QuantizedWeight

GPT_OSS = ops.Gate("silu", interleaved=True, slope=1.702, limit=1.5, offset=1.0)
BF16 = torch.bfloat16
WEIGHTS = {
    "mxfp4": lambda n, k: float4_weight(n, k),
    "int4-G128": lambda n, k: int4_weight(n, k, group_size=128, dtype=BF16),
    "int4-G32-zeros": lambda n, k: int4_weight(n, k, group_size=32, zeros=True, dtype=BF16),
    "float8-G128": lambda n, k: float8_weight(n, k, group_size=128),
}


@pytest.mark.parametrize(
    ("name", "block_m", "most"),
    each_nth(
        2,
        [  # a sample has each format, and both sizes of tiles
            ("int4-G128", 16, 3.6),
            ("int4-G128", 128, 3.6),
            ("int4-G32-zeros", 128, 4.8),
            ("int4-G32-zeros", 16, 4.8),
            ("mxfp4", 32, 5.0),
            ("mxfp4", 128, 5.0),
            ("float8-G128", 128, 4.3),
            ("float8-G128", 64, 4.3),
        ],
    ),
)
def test_machine_code_of_hopper(name: str, block_m: int, most: float) -> None:
    """Few instructions for a weight, of which a thread has 128 in the loop, and neither spills nor products that wait."""
    k = 2880
    weight = WEIGHTS[name](4 * 256, k)
    bias = torch.zeros(4, 256, dtype=BF16)
    order = torch.zeros(64, dtype=torch.int32)
    tiles = torch.zeros(8, 3, dtype=torch.int32)
    x = torch.zeros(64, k, dtype=BF16)
    with compiling_for("sm90") as kernels:
        product = product_of_experts(x, weight, 4, 2, GPT_OSS, 32)
        launch = plan_tiles(product, GroupedWgmmaTile(block_m, 128), GPT_OSS, 8, 256)
        launch((x, *product_tensors(weight), bias, order, tiles, torch.zeros(64, 128, dtype=BF16)))
    (kernel,) = kernels
    assert kernel.spill_bytes <= 8
    assert kernel.registers <= (128 if block_m == 16 else 255)
    assert kernel.shared_bytes <= (113 << 10 if block_m < 128 else 227 << 10)
    assert kernel.wgmma_faults == []
    assert kernel.instructions["HGMMA"] == 16
    assert kernel.hot_loop.total() <= 128 * most


@pytest.mark.parametrize("n", each_nth(2, [28672, 6144, 4096]))
def test_machine_code_of_a_dense_weight(n: int) -> None:
    """256 tokens take more registers than there are: 34 of the 128 sums of a thread are spilled. Two programs that share the
    columns of 4096 rows fit on a multiprocessor."""
    weight = QuantizedWeight(torch.zeros(n, 512, dtype=torch.int32), torch.zeros(n, 32, dtype=BF16), 128, 4096)
    with compiling_for("sm90") as kernels:
        multiply_by("one_expert", torch.zeros(256, 4096, dtype=BF16), weight, num_sms=132)
    kernel = kernels[0]
    assert [kernel.name for kernel in kernels] == ["_grouped_wgmma"] + ["_sum_splits"] * (n == 4096)
    assert kernel.spill_bytes <= (136 if n == 28672 else 0)
    assert n == 28672 or kernel.shared_bytes <= 113 << 10
    assert kernel.wgmma_faults == []
    assert kernel.hot_loop.total() <= 128 * 4.0
