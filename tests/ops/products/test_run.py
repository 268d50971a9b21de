"""What a product launches on a GPU, before and after the kernel that multiplies: counted where launches happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meta_weights import meta, meta_weight
from products_by_kernel import a_gpu, counted_launches
from torch import Tensor

from fa_serve import ops
from fa_serve.launching.plans import PLANS
from fa_serve.ops.deterministic import deterministic_mode
from fa_serve.ops.products import problem, tiles
from fa_serve.ops.products.quantised.rounding import MAX_GATED
from fa_serve.ops.triton_ops import TritonOps

BF16 = torch.bfloat16
GPU = TritonOps()


def linear(x: Any, weight: Any, bias=None, norm=None, activation=None, residual=None, alpha=1.0, next_weight=None) -> Any:
    return GPU.linear(x, weight, bias, norm, activation, residual, alpha, next_weight)


INT4 = meta_weight("int4", 4096, 1024, 128, zeros=True)
ROWS = meta_weight("float8", 4096, 1024)
BLOCKS = meta_weight("float8", 4096, 1024, 128)
CASES = {
    "matrix-1": (meta(4096, 1024), 1, ["_linear_row"]),
    "matrix-3": (meta(4096, 1024), 3, ["_rms_norm", "matmul"]),
    "int4-1": (INT4, 1, ["_quantized_gemv"]),
    "int4-3": (INT4, 3, ["_rms_norm", "_quantized_wgmma"]),
    "int4-129": (INT4, 129, ["_rms_norm", "_grouped_wgmma"]),
    "int4-600": (INT4, 600, ["_rms_norm", "_dequantize", "matmul"]),
    "int4-groups-1": (meta_weight("int4", 4096, 1024, 96), 1, ["_quantized_row"]),
    "float8-1": (ROWS, 1, ["_quantized_gemv"]),
    "float8-128": (ROWS, 128, ["_quantize_rows", "_scaled_wgmma"]),
    "float8-129": (ROWS, 129, ["_quantize_rows", "scaled_mm"]),
    "float8-static-600": (meta_weight("float8", 4096, 1024, input_scale=True), 600, ["_quantize_rows", "scaled_mm"]),
    "float8-rows-64": (meta_weight("float8", 4104, 1024), 64, ["_rms_norm", "_quantized_wgmma"]),
    "float8-groups-1": (meta_weight("float8", 4096, 1024, 64), 1, ["_quantized_row"]),
    "float8-blocks-128": (BLOCKS, 128, ["_rms_norm", "_quantized_wgmma"]),
    "float8-odd-3": (meta_weight("float8", 4096, 1032), 3, ["_rms_norm", "_quantized_linear"]),
}


@pytest.mark.parametrize("end", ["bias", "residual", "gate"])
@pytest.mark.parametrize("case", CASES)
def test_a_norm_comes_before_and_a_gate_or_a_sum_after_the_product(case: str, end: str) -> None:
    weight, tokens, names = CASES[case]
    n, k = weight.shape
    residual = meta(tokens, n) if end == "residual" else None
    activation = "silu" if end == "gate" else None
    with a_gpu(90), counted_launches() as launched:
        y = linear(meta(tokens, k), weight, meta(n), ops.Norm(meta(k), 1e-6), activation, residual, 0.5)
    assert y.shape == (tokens, n // 2 if activation else n)
    assert residual is None or y is residual
    fused = tokens == 1
    names = list(names)
    if end == "residual" and names[-1] in ("scaled_mm", "_grouped_wgmma"):
        names += ["_add"]
    if end == "gate" and not fused:
        names += ["_act_and_mul"]
    assert launched == names


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("weight", "tokens", "name", "splits"),
    [
        pytest.param(meta_weight("int4", 4096, 14336, 128), 16, "_quantized_wgmma", True, id="int4-16"),
        pytest.param(meta_weight("int4", 28672, 4096, 128), 16, "_quantized_wgmma", False, id="int4-16-large"),
        pytest.param(meta_weight("float8", 4096, 14336), 16, "_scaled_wgmma", True, id="float8-16"),
        pytest.param(meta_weight("int4", 4096, 14336, 128), 200, "_grouped_wgmma", True, id="int4-200"),
        pytest.param(meta_weight("int4", 28672, 4096, 128), 200, "_grouped_wgmma", False, id="int4-200-large"),
        pytest.param(meta_weight("int4", 4096, 14336, 96), 16, "_quantized_linear", True, id="portable"),
    ],
)
def test_sums_that_are_split_are_added_with_the_residual(weight, tokens: int, name: str, splits: bool, residual: bool) -> None:
    n, k = weight.shape
    with a_gpu(90), counted_launches() as launched:
        linear(meta(tokens, k), weight, residual=meta(tokens, n) if residual else None)
    after = ["_sum_splits"] if splits else ["_add"] if residual and name == "_grouped_wgmma" else []
    assert [each for each in launched if each != "_quantize_rows"] == [name, *after]


@pytest.mark.parametrize("case", ["Blackwell", "unaligned"])
def test_pytorch_multiplies_few_tokens_where_no_kernel_can(case: str) -> None:
    weight = meta_weight("float8", 4096, 1024, offset=8 if case == "unaligned" else 0)
    with a_gpu(100 if case == "Blackwell" else 90), counted_launches() as launched:
        linear(meta(5, 1024), weight)
    assert launched == ["_quantize_rows", "scaled_mm"]


@pytest.mark.parametrize(
    ("next_weight", "tokens", "names"),
    [
        pytest.param(meta_weight("float8", 4096, 512), 2, ["_quantize_rows", "_scaled_wgmma"], id="float8"),
        pytest.param(meta_weight("float8", 4096, 512), 1, ["_quantized_gemv"], id="float8-1"),
        pytest.param(meta_weight("float8", 4096, 512, input_scale=True), 129, ["_quantize_rows", "scaled_mm"], id="static"),
        pytest.param(meta_weight("int4", 4096, 512, 128), 65, ["_act_and_mul", "_quantized_wgmma"], id="int4"),
        pytest.param(meta(4096, 512), 65, ["_act_and_mul", "matmul"], id="bfloat16"),
    ],
)
@pytest.mark.parametrize("weight", [meta(1024, 256), meta_weight("float8", 1024, 256)], ids=["from-bfloat16", "from-float8"])
def test_the_gate_rounds_for_the_next_product(weight, next_weight, tokens: int, names: list[str]) -> None:
    """In the place of a launch that rounds."""
    residual = meta(tokens, 4096)
    with a_gpu(90), counted_launches() as launched:
        between = linear(meta(tokens, 256), weight, activation="silu", next_weight=next_weight)
        before = len(launched)
        y = linear(between, next_weight, residual=residual)
    assert isinstance(between, ops.RoundedRows) == (names[0] == "_quantize_rows")
    if isinstance(between, ops.RoundedRows):
        assert (between.data.shape, between.scales.shape, between.dtype) == ((tokens, 512), (tokens, 1), BF16)
    gate = names[:1] if tokens > 1 else []
    assert launched[before - len(gate) : before] == gate
    assert [name for name in launched[before:] if name not in ("_sum_splits", "_add")] == names[len(gate) :]
    assert y is residual


def test_rows_that_are_too_wide_are_gated_and_rounded_apart() -> None:
    width = MAX_GATED + 16
    next_weight = meta_weight("float8", 4096, width)
    with a_gpu(90), counted_launches() as launched:
        between = linear(meta(65, 256), meta(2 * width, 256), activation="silu", next_weight=next_weight)
    assert isinstance(between, Tensor)
    assert launched == ["matmul", "_act_and_mul"]


def test_invariant_products_multiply_the_matrix() -> None:
    with a_gpu(90), counted_launches() as launched:
        assert GPU.invariant_linear(meta(3, 1024), INT4, meta(4096)).shape == (3, 4096)
        GPU.invariant_linear(meta(3, 1024), meta(1024, 4096).t(), None)
    assert launched == ["_dequantize", "_invariant_linear", "_invariant_linear"]


NORM = ops.Norm(meta(1024), 1e-6)
SEPARATE = ["_rms_norm", "_invariant_linear", "_act_and_mul"]


@pytest.mark.parametrize(("tokens", "names"), [(1, ["invariant_rows"]), (8, ["invariant_rows"]), (9, SEPARATE)])
def test_few_tokens_take_one_launch_in_deterministic_mode(tokens: int, names: list[str]) -> None:
    with a_gpu(90), counted_launches() as launched, deterministic_mode(True):
        y = linear(meta(tokens, 1024), meta(4096, 1024), meta(4096), NORM, "silu")
    assert y.shape == (tokens, 2048)
    assert launched == names


def test_separate_launches_are_taken_where_the_kernel_for_few_rows_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FUSES_FEW_ROWS", False)
    with a_gpu(90), counted_launches() as launched, deterministic_mode(True):
        linear(meta(1, 1024), meta(4096, 1024), meta(4096), NORM, "silu")
    assert launched == SEPARATE


def test_few_tokens_in_the_usual_mode_have_plans_of_their_shapes_where_they_are_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "FEW_ROWS_IN_USUAL_MODE", True)
    with a_gpu(90), counted_launches() as launched:
        for tokens in (2, 8, 9):
            residual = meta(tokens, 4096)
            assert linear(meta(tokens, 1024), meta(4096, 1024), residual=residual) is residual
        linear(meta(8, 2048)[:, :1024], meta(4096, 1024))
        assert len(PLANS) == 4
    assert launched == ["invariant_rows", "invariant_rows", "matmul", "invariant_rows"]


@pytest.mark.parametrize("tokens", [8, 9])
@pytest.mark.parametrize("norm", [None, NORM], ids=["", "norm"])
def test_strides_are_those_of_what_a_kernel_reads(tokens: int, norm: ops.Norm | None) -> None:
    """A norm in a launch before the product writes rows without gaps."""
    with a_gpu(90), counted_launches() as launched, deterministic_mode(True):
        linear(meta(tokens, 2048)[:, :1024], meta(4096, 1024), None, norm)
    if tokens == 8:
        assert launched.strides["invariant_rows"] == (2048,)
    else:
        assert launched.constants["_invariant_linear"][2:4] == (2048 if norm is None else 1024, 1)


def test_float8_before_ada_is_dequantised_by_pytorch() -> None:
    with a_gpu(80), counted_launches() as launched:
        linear(meta(1, 1024), ROWS, norm=ops.Norm(meta(1024), 1e-6))
    assert launched == ["_rms_norm", "matmul"]


@pytest.mark.parametrize("reason", ["release", "address"])
def test_portable_kernels_where_those_for_hopper_cannot_run(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another release of Triton, and with weights whose address is not a multiple of 16 bytes."""
    weight = meta_weight("int4", 28672, 1024, 128, offset=4 if reason == "address" else 0)
    if reason == "release":
        monkeypatch.setattr(problem, "compiles_gluon", lambda: False)
    with a_gpu(90), counted_launches() as launched:
        for tokens in (1, 3, 40, 129):
            linear(meta(tokens, 1024), weight)
    assert launched == ["_quantized_row", "_quantized_linear", "_quantized_linear", "_dequantize", "matmul"]


@pytest.mark.parametrize("weight", [meta(64, 128), INT4, ROWS], ids=["matrix", "int4", "float8"])
def test_no_tokens_take_no_launch(weight) -> None:
    n, k = weight.shape
    with a_gpu(90), counted_launches() as launched:
        y = linear(meta(0, k), weight, norm=ops.Norm(meta(k), 1e-6), activation="silu", next_weight=ROWS)
        residual = meta(0, n)
        assert linear(meta(0, k), weight, residual=residual) is residual
        assert GPU.invariant_linear(meta(0, k), weight, None).shape == (0, n)
    assert (y.shape, y.dtype) == ((0, n // 2), BF16)
    assert launched == []


def test_calls_that_look_alike_are_planned_once() -> None:
    """The address of a weight is a part of the key as far as it decides, and so is the weight that a gate rounds for."""
    with a_gpu(90), counted_launches():
        x = meta(3, 1024)
        for weight in (INT4, meta_weight("int4", 4096, 1024, 128, zeros=True)):
            linear(x, weight)
        assert len(PLANS) == 1
        linear(x, meta_weight("int4", 4096, 1024, 128))
        linear(x, meta_weight("int4", 4096, 1024, 128, zeros=True, offset=4))
        linear(x, INT4, activation="silu")
        linear(x, INT4, activation="silu", next_weight=meta(64, 2048))
        assert len(PLANS) == 4
        linear(x, INT4, activation="silu", next_weight=meta_weight("float8", 64, 2048))
        linear(x, INT4, activation="silu", next_weight=meta_weight("float8", 64, 2048, 128))
        assert len(PLANS) == 6


def test_rows_of_another_stride_are_normalised_where_they_are() -> None:
    wide = meta(6, 2048)
    with a_gpu(90), counted_launches() as launched:
        for x in (wide[:, :1024], meta(6, 1024)):
            assert linear(x, meta(64, 1024), norm=ops.Norm(meta(1024), 1e-6)).shape == (6, 64)
        assert len(PLANS) == 2
    assert launched == ["_rms_norm", "matmul"] * 2
