"""The reasons why kernels do not compute a product: what they compute, and what was asked."""

from __future__ import annotations

import pytest
import torch
from product_cases import dense, of_experts, with_pairs

from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import kernel_named

HALF = torch.float16
ROWS = {"values": "float8", "n": 6144, "group": 0}


@pytest.mark.parametrize(
    ("name", "product", "reason"),
    [
        ("row", dense("float", tokens=2), "multiplies one token, got 2"),
        ("row", dense("float", tokens=1, triton=False), "needs Triton, which does not run on the device"),
        ("row", dense("float", tokens=1, invariant=True), "its results for a row depend on the number of rows"),
        ("row", of_experts("float"), "multiplies dense weights only, not the weights of experts"),
        ("gemv", dense(tokens=1, arch=80), "runs on Hopper (compute capability 9.0) only, got compute capability 8.0"),
        ("gemv", dense(tokens=1, arch=0), "runs on Hopper (compute capability 9.0) only, got another device"),
        ("gemv", dense(tokens=1, gluon=False), "needs a supported release of Triton, and TRITON_INTERPRET off"),
        (
            "gemv",
            dense(tokens=1, aligned=False),
            "copies 16 bytes at a time, and the weight's address is not a multiple of 16",
        ),
        ("gemv", dense(tokens=1, dtype=torch.float32), "multiplies input in float16 and bfloat16, got float32"),
        ("gemv", dense(tokens=1, n=1 << 18, k=1 << 15), "supports fewer than 8589934592 weights (n * k), got 262144 x 32768"),
        (
            "gemv",
            dense(tokens=1, k=65536),
            "supports up to 32768 columns, because the token is kept in shared memory, got 65536",
        ),
        ("gemv", dense(tokens=1, group=96), "takes groups of 32, 64, 128, any multiple of 256, or whole rows, got 96"),
        ("gemv", dense("float8", tokens=1, group=64), "takes groups of any multiple of 128, or whole rows, got 64"),
        ("gemv", dense("float8", tokens=1, k=4160), "takes a multiple of 128 columns of float8, got 4160"),
        ("gemv", dense("float4", tokens=1), "multiplies int4 and float8 weights, got float4"),
        ("unpack_row", dense("float8", tokens=1, arch=80), "Triton has no float8 for compute capability 8.0"),
        ("scaled_mm", dense("float8"), "takes one scale per row, got groups of 128"),
        ("scaled_mm", dense(**ROWS, dtype=HALF), "multiplies input in bfloat16, got float16"),
        ("scaled_mm", dense(**ROWS, arch=120), "PyTorch has it for compute capabilities 8.9, 9.0, 10.0 and 10.3 only"),
        ("scaled_mm", dense(**ROWS | {"n": 4104}), "takes multiples of 16 rows and columns, got 4104 x 4096"),
        ("float8_wgmma", dense(**ROWS, tokens=129), "multiplies 2 to 128 tokens, got 129"),
        ("unpack_wgmma", dense(dtype=HALF), "rounds scales to the input's dtype, and these scales may not fit into float16"),
        ("unpack_wgmma", dense(k=4100), "takes a multiple of 8 columns, got 4100"),
        ("unpack_wgmma", dense(group=96), "takes groups of 32, 64, any multiple of 128, or whole rows, got 96"),
        ("one_expert", dense(n=4095, tokens=200), "multiplies at least 4096 rows of weights, got 4095"),
        ("one_expert", dense(**ROWS | {"n": 6152}, tokens=200), "takes float8 weights only with scales for groups of columns"),
        (
            "one_expert",
            dense(n=1 << 16, k=1 << 15, tokens=200),
            "supports fewer than 2147483648 values (32-bit offsets), got 65536 x 32768",
        ),
        ("unpack", dense(tokens=129), "multiplies up to 128 tokens, got 129"),
        (
            "invariant_rows",
            dense("float"),
            "is used in deterministic mode only (products/tiles.py:FEW_ROWS_IN_USUAL_MODE)",
        ),
        ("invariant_rows", dense("float", n=4096, invariant=True, tokens=9), "multiplies 1 to 8 tokens, got 9"),
        ("invariant_rows", dense("float", n=4104, invariant=True), "multiplies up to 16777216 weights, got 16809984"),
        ("invariant_rows", dense("float", n=4096, invariant=True, k=1020), "takes a multiple of 8 columns, got 1020"),
        (
            "invariant_rows",
            dense("float", n=1024, k=14336, invariant=True, tokens=8),
            "keeps up to 65536 bytes of tokens in shared memory, got 229376",
        ),
        ("invariant_rows", dense("float", n=4096, invariant=True, k=512), "takes more than 512 columns, got 512"),
        (
            "invariant_rows",
            dense("float", n=4096, invariant=True, matrix_dtype=HALF),
            "multiplies only matrices that have the input's dtype",
        ),
        (
            "invariant_rows",
            dense("float", n=4096, invariant=True, contiguous=False),
            "takes contiguous weights, and tokens whose numbers are contiguous",
        ),
        ("invariant", dense(), "is used only if results must not depend on the number of rows, because it is slower"),
        ("grouped", dense(), "multiplies the weights of experts only"),
        ("expert_rows", of_experts("float", by_rows=False), "needs contiguous rows in the weights of both products"),
        (
            "expert_rows",
            of_experts(tokens=8),
            "needs a single token, or at least 8 experts per pair, got 32 pairs and 32 experts",
        ),
        ("expert_matrices", with_pairs(63), "takes at least 64 pairs per expert, got 63 on average"),
        (
            "expert_matrices",
            with_pairs(64, matrix_dtype=HALF),
            "multiplies only weights that have the input's dtype, got torch.float16",
        ),
        ("expert_matrices", with_pairs(64, contiguous=False), "takes contiguous matrices, by rows or by columns"),
        ("expert_matrices", with_pairs(64, k=2080), "takes a multiple of 16 rows and of 64 columns, got 5760 x 2080"),
        ("expert_wgmma", with_pairs(513, "float4"), "takes up to 512 pairs per expert, got 513 on average"),
        ("dequantise_experts", with_pairs(192, "float4"), "takes more than 192 pairs per expert, got 192 on average"),
        ("dequantise_experts", with_pairs(0, "float4"), "its results for a row depend on the number of rows"),
    ],
)
def test_reasons(name: str, product: Product, reason: str) -> None:
    assert kernel_named(name).fits(product) == reason
