"""What a product with a quantised weight launches on a GPU, and what it then computes, with kernels that are stood in for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized import float8_weight, int4_weight
from torch import Tensor

from fa_serve import ops, spec
from fa_serve.ops import triton_ops
from fa_serve.ops.experts import quantised as experts_wgmma_kernel
from fa_serve.ops.products.quantised import (
    choice as quantized_choice,
)
from fa_serve.ops.products.quantised import (
    gemv as quantized_gemv_kernel,
)
from fa_serve.ops.products.quantised import (
    product as quantized_product,
)
from fa_serve.ops.products.quantised import (
    scaled_wgmma as scaled_wgmma_kernel,
)
from fa_serve.ops.products.quantised import (
    wgmma as quantized_wgmma_kernel,
)
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.ops.triton_ops import TritonOps


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that note their name and compute in PyTorch, on what seems to be an H200."""
    calls: list[str] = []

    def stand_in(name: str, function):
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    def quantize_rows(x: Tensor, norm: ops.Norm | None, input_scale: Tensor | None, activation: str | None = None):
        x = x if activation is None else ops.act_and_mul(x, activation)
        x = x if norm is None else ops.rms_norm(x, norm)
        scales = x.float().abs().amax(1, keepdim=True) / 448 if input_scale is None else input_scale.expand(len(x), 1)
        return (x.float() / scales).to(torch.float8_e4m3fn), scales

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias, out_dtype, use_fast_accum) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert scale_a.shape == (a.shape[0], 1)
        assert scale_b.shape == (1, b.shape[1])
        assert not use_fast_accum
        y = (a.float() * scale_a) @ (b.float() * scale_b)
        return (y if bias is None else y + bias).to(out_dtype)

    def row(x, w, b, n, a, r, s) -> Tensor:
        return ops.linear(x, w, b, norm=n, activation=a, residual=r, alpha=s)

    def several(x, w, b, r, alpha) -> Tensor:
        return ops.linear(x, w, b, residual=r, alpha=alpha)

    monkeypatch.setattr(spec, "arch_of", lambda device: 90)
    for name, function in {
        "launch_quantize_rows": quantize_rows,
        "launch_dequantize": lambda weight, dtype: weight.dequantize(dtype),
        "launch_quantized_linear": several,
        "launch_quantized_row": row,
        "launch_rms_norm": lambda x, norm, residual, out: ops.rms_norm(x, norm),
        "launch_act_and_mul": ops.act_and_mul,
    }.items():
        monkeypatch.setattr(quantized_product, name, stand_in(name, function))
    monkeypatch.setattr(quantized_product, "launch_add", TorchOps().add)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in("_scaled_mm", scaled_mm))
    monkeypatch.setattr(quantized_gemv_kernel, "launch_quantized_gemv", stand_in("launch_quantized_gemv", row))
    monkeypatch.setattr(quantized_wgmma_kernel, "launch_quantized_wgmma", stand_in("launch_quantized_wgmma", several))
    scaled = stand_in("launch_scaled_wgmma", lambda x, w, b, r, a: several((x.data.float() * x.scales).to(x.dtype), w, b, r, a))
    monkeypatch.setattr(scaled_wgmma_kernel, "launch_scaled_wgmma", scaled)
    monkeypatch.setattr(quantized_choice, "_GROUPED_ROWS", 64)
    whole = stand_in("launch_as_one_expert", lambda x, w, b, r, a: ops.linear(x, w, b, residual=r, alpha=a))
    monkeypatch.setattr(experts_wgmma_kernel, "launch_as_one_expert", whole)
    monkeypatch.setattr(triton_ops, "launch_invariant_linear", stand_in("launch_invariant_linear", ops.invariant_linear))
    return calls


@pytest.mark.parametrize(
    ("weight", "tokens", "names"),
    [
        (int4_weight(64, 128, group_size=32, zeros=True), 1, ["launch_quantized_gemv"]),
        (int4_weight(64, 128, group_size=32, zeros=True), 3, ["launch_rms_norm", "launch_quantized_wgmma"]),
        (int4_weight(64, 128, group_size=32, zeros=True), 129, ["launch_rms_norm", "launch_as_one_expert"]),
        (int4_weight(64, 96, group_size=48), 1, ["launch_quantized_row"]),
        (int4_weight(64, 128, group_size=32, zeros=True), 600, ["launch_rms_norm", "launch_dequantize"]),
        (float8_weight(64, 128, group_size=128), 1, ["launch_quantized_gemv"]),
        (float8_weight(64, 128, group_size=64), 1, ["launch_quantized_row"]),
        (float8_weight(64, 128, group_size=128), 128, ["launch_quantize_rows", "launch_scaled_wgmma"]),
        (float8_weight(64, 128, group_size=128), 129, ["launch_quantize_rows", "_scaled_mm"]),
        (float8_weight(72, 128, group_size=128), 64, ["launch_rms_norm", "launch_quantized_wgmma"]),
        (float8_weight(64, 128, group_size=128, input_scale=0.02), 600, ["launch_quantize_rows", "_scaled_mm"]),
        (float8_weight(64, 128, group_size=64), 128, ["launch_rms_norm", "launch_quantized_wgmma"]),
        (float8_weight(64, 136, group_size=136), 3, ["launch_rms_norm", "launch_quantized_linear"]),
    ],
    ids=[
        "int4-1",
        "int4-3",
        "int4-129",
        "int4-groups-1",
        "int4-600",
        "float8-1",
        "float8-groups-1",
        "float8-128",
        "float8-129",
        "float8-rows-64",
        "float8-static-600",
        "float8-groups-128",
        "float8-odd-3",
    ],
)
@pytest.mark.parametrize("end", ["bias", "residual", "gate"])
def test_what_is_launched_and_computed(hopper: list[str], weight, tokens: int, names: list[str], end: str) -> None:
    width = weight.shape[1]
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = ops.Norm(torch.rand(width, generator=torch.Generator().manual_seed(1)).bfloat16(), 1e-6)
    bias = torch.linspace(-1, 1, weight.shape[0]).bfloat16()
    residual = torch.ones(tokens, weight.shape[0]).bfloat16() if end == "residual" else None
    activation = "silu" if end == "gate" else None
    given = None if residual is None else residual.clone()
    expected = ops.linear(x, weight, bias, norm=norm, activation=activation, residual=given, alpha=0.5)
    actual = TritonOps().linear(x, weight, bias, norm, activation, residual, 0.5, None)
    assert residual is None or actual is residual
    assert hopper == names + (["launch_act_and_mul"] if end == "gate" and tokens > 1 else [])
    # activations in float8 have 4 bits
    tolerance = 2**-5 if "launch_quantize_rows" in names else 2**-7
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("case", ["Blackwell", "unaligned"])
def test_pytorch_multiplies_few_tokens_where_no_kernel_can(hopper: list[str], monkeypatch, case: str) -> None:
    weight = float8_weight(64, 128, group_size=128)
    if case == "Blackwell":
        monkeypatch.setattr(spec, "arch_of", lambda device: 100)
    else:  # the kernel copies 16 bytes at a time
        room = torch.zeros(8 + weight.data.numel(), dtype=torch.uint8)
        room[8:] = weight.data.view(torch.uint8).flatten()
        weight = replace(weight, data=room[8:].view(torch.float8_e4m3fn).view(64, 128))
        assert weight.data.data_ptr() % 16 == 8
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = TritonOps().linear(x, weight, None, None, None, None, 1.0, None)
    assert hopper == ["launch_quantize_rows", "_scaled_mm"]
    expected = ops.linear(x, weight)
    assert float((y - expected).abs().max()) <= 2**-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("next_weight", "tokens", "names"),
    [
        pytest.param(float8_weight(64, 32, group_size=32), 2, ["launch_quantize_rows", "launch_scaled_wgmma"], id="float8"),
        pytest.param(
            float8_weight(64, 32, group_size=32, input_scale=0.02), 129, ["launch_quantize_rows", "_scaled_mm"], id="static"
        ),
        pytest.param(int4_weight(64, 32, group_size=32), 65, ["launch_act_and_mul", "launch_quantized_wgmma"], id="int4"),
        pytest.param(torch.ones(64, 32).bfloat16(), 65, ["launch_act_and_mul"], id="bfloat16"),
    ],
)
@pytest.mark.parametrize(
    "weight", [torch.ones(64, 48).bfloat16(), float8_weight(64, 48, group_size=48)], ids=["bfloat16", "float8"]
)
def test_the_gate_rounds_for_the_next_product(
    hopper: list[str], monkeypatch, weight, next_weight, tokens: int, names: list[str]
) -> None:
    """In the place of a launch that rounds."""
    monkeypatch.setattr(quantized_product, "MAX_GATED", 32)
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(0)).bfloat16() / 8
    residual = torch.ones(tokens, 64).bfloat16()
    expected = ops.linear(ops.linear(x, weight, activation="silu"), next_weight, residual=residual.clone())
    triton = TritonOps()
    between = triton.linear(x, weight, None, None, "silu", None, 1.0, next_weight)
    actual = triton.linear(between, next_weight, None, None, None, residual, 1.0, None)
    assert isinstance(between, ops.RoundedRows) == (names[0] == "launch_quantize_rows")
    assert hopper[-len(names) :] == names
    assert actual is residual
    assert float((actual - expected).abs().max()) <= 2**-4 * float(expected.abs().max())


def test_rows_that_are_too_wide_are_gated_and_rounded_apart(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_product, "MAX_GATED", 31)
    x = torch.ones(65, 48).bfloat16()
    next_weight = float8_weight(64, 32, group_size=32)
    between = TritonOps().linear(x, torch.ones(64, 48).bfloat16(), None, None, "silu", None, 1.0, next_weight)
    assert isinstance(between, Tensor)
    assert hopper == ["launch_act_and_mul"]


def test_invariant_products_multiply_the_matrix(hopper: list[str]) -> None:
    weight = int4_weight(64, 128, group_size=32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(TritonOps().invariant_linear(x, weight, None), ops.invariant_linear(x, weight, None))
    assert hopper == ["launch_dequantize", "launch_invariant_linear"]


def test_float8_before_ada_is_dequantised_by_pytorch(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "arch_of", lambda device: 80)
    weight = float8_weight(64, 128, group_size=128)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(TritonOps().linear(x, weight, None, None, None, None, 1.0, None), ops.linear(x, weight))
    assert hopper == []


@pytest.mark.parametrize("reason", ["release", "address"])
def test_portable_kernels_where_those_for_hopper_cannot_run(
    hopper: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another release of Triton, and with weights whose address is not a multiple of 16 bytes."""
    weight = int4_weight(64, 128, group_size=32)
    if reason == "release":
        monkeypatch.setattr(quantized_product, "_COMPILES_GLUON", False)
    else:
        data = torch.empty(weight.data.numel() + 1, dtype=torch.int32)[1:].view_as(weight.data)
        weight = replace(weight, data=data.copy_(weight.data))
    for tokens in (1, 3, 40):
        TritonOps().linear(torch.ones(tokens, 128).bfloat16(), weight, None, None, None, None, 1.0, None)
    assert hopper == ["launch_quantized_row", "launch_quantized_linear", "launch_quantized_linear"]
