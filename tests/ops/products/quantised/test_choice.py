"""Which way a product with a quantised weight takes."""

from __future__ import annotations

import pytest
import torch

from fa_serve.ops.products.quantised.choice import (
    DEQUANTIZED_PAIRS,
    KERNEL_TOKENS,
    SCALED_WGMMA_TOKENS,
    choose,
    choose_experts,
    explain,
    kernel_of,
    takes_scaled_wgmma,
)
from fa_serve.ops.products.quantised.weight import Values


@pytest.mark.parametrize(
    ("packed", "by_row", "tokens", "dtype", "arch", "way"),
    [
        pytest.param(True, False, 2, torch.bfloat16, 90, "kernel", id="int4"),
        pytest.param(True, False, 32, torch.float16, 80, "kernel", id="int4-sm80"),
        pytest.param(True, False, 129, torch.float16, 80, "dequantized", id="int4-many"),
        pytest.param(True, False, 2, torch.bfloat16, 0, "kernel", id="int4-amd"),
        pytest.param(False, True, 2, torch.bfloat16, 90, "scaled_mm", id="float8"),
        pytest.param(False, True, 9000, torch.bfloat16, 100, "scaled_mm", id="float8-many"),
        pytest.param(False, True, 2, torch.bfloat16, 120, "kernel", id="float8-sm120"),
        pytest.param(False, True, 2, torch.float16, 90, "kernel", id="float8-half"),
        pytest.param(False, True, 2, torch.float32, 90, "kernel", id="float8-float32"),
        pytest.param(False, False, 2, torch.bfloat16, 90, "kernel", id="float8-blocks"),
        pytest.param(False, False, 9000, torch.bfloat16, 90, "dequantized", id="float8-blocks-many"),
        pytest.param(False, True, 2, torch.bfloat16, 86, "dequantized", id="float8-sm86"),
        pytest.param(False, True, 2, torch.bfloat16, 0, "dequantized", id="float8-amd"),
    ],
)
def test_the_way(packed: bool, by_row: bool, tokens: int, dtype: torch.dtype, arch: int, way: str) -> None:
    assert choose(packed, by_row, tokens, dtype, arch) == way


@pytest.mark.parametrize(
    ("packed", "by_row", "device", "arch", "text"),
    [
        (True, False, "cpu", 0, "PyTorch with dequantised weights"),
        (True, False, "cuda", 80, "triton for up to 128 tokens, PyTorch with dequantised weights for more"),
        (False, True, "cuda", 90, "triton for up to 128 tokens (kernels for Hopper), torch._scaled_mm for more"),
        (False, True, "cuda", 100, "triton for one token, torch._scaled_mm for more"),
        (
            True,
            False,
            "cuda",
            90,
            "triton for up to 512 tokens (kernels for Hopper), PyTorch with dequantised weights for more",
        ),
        (False, True, "cuda", 80, "PyTorch with dequantised weights"),
    ],
)
def test_people_are_told(packed: bool, by_row: bool, device: str, arch: int, text: str) -> None:
    assert explain(packed, by_row, torch.bfloat16, device, arch) == text


def test_few_tokens_in_float8_have_a_kernel_on_hopper() -> None:
    assert [m for m in range(300) if takes_scaled_wgmma((4096, 4096), m, 90)] == [*range(2, SCALED_WGMMA_TOKENS + 1)]
    assert not takes_scaled_wgmma((4096, 4096), 16, 100)
    assert takes_scaled_wgmma((1 << 17, (1 << 14) - 16), 16, 90)
    assert not takes_scaled_wgmma((1 << 17, 1 << 14), 16, 90), "offsets have 32 bits"


def test_many_tokens_unpack_the_matrix_once() -> None:
    assert choose(True, False, KERNEL_TOKENS, torch.bfloat16, 90) == "kernel"
    assert choose(True, False, KERNEL_TOKENS + 1, torch.bfloat16, 90) == "dequantized"


def test_people_are_told_that_float16_does_not_hold_all_scales() -> None:
    assert "Hopper" in explain(True, False, torch.float16, "cuda", 90)
    assert "Hopper" in explain(False, True, torch.float16, "cuda", 90)
    assert "Hopper" not in explain(False, False, torch.float16, "cuda", 90)


INT4 = {"values": "int4", "shape": (28672, 4096), "group_size": 128, "scales": torch.bfloat16}
FLOAT8 = {"values": "float8", "shape": (6144, 4096), "group_size": 4096, "scales": torch.float32}
FLOAT4 = INT4 | {"values": "float4", "group_size": 32}
BY_TOKENS = {0: "portable", 1: "gemv", 2: "wgmma", 128: "wgmma", 129: "grouped", 512: "grouped", 513: "portable"}
IN_FLOAT16 = BY_TOKENS | {129: "portable", 512: "portable"}
NONE = dict.fromkeys((1, 2, 128, 129), "portable")


@pytest.mark.parametrize(
    ("weight", "dtype", "arch", "kernels"),
    [
        pytest.param(INT4, torch.bfloat16, 90, BY_TOKENS, id="int4"),
        pytest.param(INT4 | {"group_size": 32}, torch.bfloat16, 90, BY_TOKENS, id="int4-G32"),
        pytest.param(INT4 | {"group_size": 4096}, torch.bfloat16, 90, BY_TOKENS, id="int4-row"),
        pytest.param(INT4 | {"group_size": 96}, torch.bfloat16, 90, NONE, id="int4-G96"),
        pytest.param(INT4, torch.float16, 90, {1: "gemv", 64: "portable"}, id="float16-and-bfloat16-scales"),
        pytest.param(INT4 | {"scales": torch.float16}, torch.float16, 90, IN_FLOAT16, id="float16"),
        pytest.param(INT4 | {"shape": (64, 4100)}, torch.bfloat16, 90, {1: "gemv", 64: "portable"}, id="unaligned-tokens"),
        pytest.param(INT4 | {"shape": (64, 65536)}, torch.bfloat16, 90, {1: "portable", 64: "wgmma"}, id="wide"),
        pytest.param(INT4 | {"shape": (1 << 18, 1 << 15)}, torch.bfloat16, 90, NONE, id="addresses-beyond-32-bits"),
        pytest.param(
            FLOAT8 | {"shape": (1 << 18, 1 << 13), "group_size": 1 << 13}, torch.bfloat16, 90, NONE, id="float8-beyond-32-bits"
        ),
        pytest.param(
            INT4 | {"shape": (1024, 4096)}, torch.bfloat16, 90, BY_TOKENS | {129: "portable", 512: "portable"}, id="few-rows"
        ),
        pytest.param(
            FLOAT8 | {"shape": (6152, 4096)},
            torch.bfloat16,
            90,
            {64: "wgmma", 128: "wgmma", 129: "portable"},
            id="float8-rows-that-scaled_mm-does-not-take",
        ),
        pytest.param(INT4, torch.float32, 90, NONE, id="float32"),
        pytest.param(INT4, torch.bfloat16, 100, NONE, id="sm100"),
        pytest.param(INT4, torch.bfloat16, 0, NONE, id="another-release-of-triton"),
        pytest.param(FLOAT4, torch.bfloat16, 90, NONE, id="float4"),
        pytest.param(FLOAT8, torch.bfloat16, 90, {1: "gemv", 2: "portable", 64: "portable", 129: "portable"}, id="float8-row"),
        pytest.param(FLOAT8, torch.float16, 90, IN_FLOAT16, id="float8-row-float16"),
        pytest.param(FLOAT8 | {"group_size": 128}, torch.bfloat16, 90, BY_TOKENS, id="float8-blocks"),
        pytest.param(FLOAT8 | {"group_size": 128}, torch.float16, 90, NONE | {1: "gemv"}, id="float8-blocks-float16"),
        pytest.param(FLOAT8 | {"shape": (64, 4104), "group_size": 4104}, torch.bfloat16, 90, NONE, id="float8-odd-row"),
    ],
)
def test_the_kernel_of_packed_weights(weight: dict, dtype: torch.dtype, arch: int, kernels: dict[int, str]) -> None:
    assert {tokens: kernel_of(num_tokens=tokens, dtype=dtype, arch=arch, **weight) for tokens in kernels} == kernels


@pytest.mark.parametrize(
    ("values", "shape", "group_size", "pairs", "dtype", "arch", "way"),
    [
        pytest.param("float4", (5760, 2880), 32, 0.5, torch.bfloat16, 90, "wgmma", id="mxfp4-few"),
        pytest.param("float8", (5760, 2880), 32, 8, torch.bfloat16, 90, "wgmma", id="float8-G32"),
        pytest.param("float8", (1536, 2048), 2048, DEQUANTIZED_PAIRS["wgmma"], torch.bfloat16, 90, "wgmma", id="float8-row"),
        pytest.param("float8", (1536, 2048), 2048, 513, torch.bfloat16, 90, "dequantized", id="float8-row-many"),
        pytest.param("int4", (1536, 2048), 128, 64, torch.bfloat16, 90, "wgmma", id="int4"),
        pytest.param("int4", (1536, 2048), 128, 0, torch.bfloat16, 90, "portable", id="deterministic"),
        pytest.param("int4", (1536, 2048), 96, 64, torch.bfloat16, 90, "portable", id="int4-G96"),
        pytest.param(
            "int4", (1536, 2048), 96, DEQUANTIZED_PAIRS["portable"] + 1, torch.bfloat16, 90, "dequantized", id="int4-G96-many"
        ),
        pytest.param("float8", (64, 72), 72, 64, torch.bfloat16, 90, "portable", id="float8-odd"),
        pytest.param("float8", (1 << 20, 1 << 11), 128, 64, torch.bfloat16, 90, "portable", id="offsets-of-64-bits"),
        pytest.param("float4", (5760, 2880), 32, 64, torch.float16, 90, "portable", id="float16"),
        pytest.param("float4", (5760, 2880), 32, DEQUANTIZED_PAIRS["portable"], torch.bfloat16, 80, "portable", id="sm80"),
        pytest.param(
            "float4", (5760, 2880), 32, DEQUANTIZED_PAIRS["portable"] + 1, torch.bfloat16, 80, "dequantized", id="sm80-many"
        ),
        pytest.param("float4", (5760, 2880), 32, 9000, torch.float32, 90, "portable", id="float32-many"),
        pytest.param("float4", (5760, 2880), 32, 9000, torch.bfloat16, 0, "dequantized", id="other-release-or-amd-many"),
    ],
)
def test_the_way_of_experts(
    values: Values, shape: tuple[int, int], group_size: int, pairs: float, dtype: torch.dtype, arch: int, way: str
) -> None:
    assert choose_experts(values, shape, group_size, pairs, dtype, arch) == way
