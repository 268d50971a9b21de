"""The facts of a product, as they follow from a weight and from the numbers that are asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from product_cases import dense, of_experts
from quantized import float4_weight, float8_weight, int4_weight

from fa_serve import ops
from fa_serve.backends.hopper import RELEASES
from fa_serve.ops.products.problem import Product, compiles_gluon, product_with, products_with_experts

BF16 = torch.bfloat16
ASKED = {"tokens": 3, "dtype": BF16, "arch": 90}


def test_facts_of_a_matrix() -> None:
    product = product_with(torch.empty(48, 64, dtype=BF16), **ASKED, gated=True, num_sms=7)
    assert product == Product(
        values="float", n=48, k=64, matrix_dtype=BF16, gated=True, num_sms=7, gluon=compiles_gluon(), **ASKED
    )
    assert (product.outputs, product.has_row_scales, product.is_packed) == (24, False, False)


@pytest.mark.parametrize(
    ("weight", "values", "group", "scales", "by_row"),
    [
        pytest.param(int4_weight(8, 96, group_size=32, dtype=BF16), "int4", 32, BF16, False, id="int4"),
        pytest.param(float4_weight(8, 96), "float4", 32, torch.uint8, False, id="mxfp4"),
        pytest.param(float8_weight(8, 96, group_size=96), "float8", 96, torch.float32, True, id="float8-row"),
        pytest.param(int4_weight(8, 96, group_size=128), "int4", 128, torch.float32, True, id="one-group"),
    ],
)
def test_facts_of_a_quantised_weight(weight, values: str, group: int, scales: torch.dtype, by_row: bool) -> None:
    product = product_with(weight, **ASKED)
    assert (product.values, product.n, product.k) == (values, 8, 96)
    assert (product.group, product.scales, product.matrix_dtype) == (group, scales, None)
    assert product.has_row_scales == by_row
    assert product.is_packed == weight.is_packed
    assert product_with(weight, num_experts=2, top_k=1, **ASKED).n == 4, "rows of one expert"


def test_matrices_of_experts_are_contiguous_by_rows_or_by_columns() -> None:
    def is_contiguous(matrices: torch.Tensor) -> bool:
        return product_with(matrices, num_experts=4, top_k=2, **ASKED).contiguous

    whole = torch.empty(4, 16, 24)
    assert is_contiguous(whole)
    assert is_contiguous(whole.transpose(1, 2))
    assert not is_contiguous(whole[:, :, :8])
    assert not is_contiguous(whole[:, :8])


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_addresses_are_multiples_of_16_bytes_or_not(offset: int) -> None:
    matrix = torch.empty(16 * 8 + offset)[offset:].view(16, 8)
    assert product_with(matrix, **ASKED).aligned == (offset != 1)
    weight = int4_weight(2, 256, group_size=32)
    words = torch.empty(weight.data.numel() + offset, dtype=torch.int32)[offset:].view_as(weight.data)
    assert product_with(replace(weight, data=words), **ASKED).aligned == (offset != 1)


def test_pairs_are_counted() -> None:
    product = of_experts(tokens=8, top_k=4, num_experts=16)
    assert (product.pairs, product.pairs_per_expert) == (32, 2.0)


@pytest.mark.parametrize("kept", [False, True])
def test_only_the_gated_product_of_a_mixture_keeps_what_is_before_the_gate(kept: bool) -> None:
    gate_up, down = (torch.zeros(4, n, k, dtype=torch.bfloat16) for n, k in ((64, 32), (32, 32)))
    experts = ops.ExpertWeights(gate_up, None, down, None, ops.Gate("silu"))
    products = products_with_experts(experts, kept=kept, tokens=8, dtype=torch.bfloat16, arch=90, top_k=2)
    assert [product.kept for product in products] == [kept, False]


def test_what_an_architecture_has() -> None:
    assert [dense("float8", arch=arch).reads_float8 for arch in (0, 80, 86, 89, 90)] == [False, False, False, True, True]
    assert dense("int4", arch=80).reads_float8, "there is none to read"
    assert [dense(arch=arch).is_programmatic for arch in (0, 89, 90, 120)] == [False, False, True, True]


def test_gluon_is_that_of_the_releases_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiles_gluon() == triton.__version__.startswith(RELEASES)
    for name, value in (("__version__", "4.0.0"), ("__version__", "3.6.0")):
        monkeypatch.setattr(triton, name, value)
        assert compiles_gluon.__wrapped__() == value.startswith("3.")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not compiles_gluon.__wrapped__(), "the interpreter has no Gluon"
