"""The layout of quantised weights: packing, dequantising, rows and merging."""

from __future__ import annotations

import pytest
import torch
from quantized import float4_weight, float8_weight, int4_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fa_serve import ops
from fa_serve.ops.products.quantised.weight import QuantizedWeight, merge_rows, pack_int4, quantize_float8, unpack_int4


@pytest.mark.parametrize("k", [32, 256, 300, 544])
def test_packing_loses_nothing_and_lies_in_runs(k: int) -> None:
    values = torch.randint(0, 16, (5, k), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack_int4(values)
    assert words.shape == (5, 32 * -(-k // 256))
    assert torch.equal(unpack_int4(words, k), values)
    column = 32 + 7  # the second run
    assert torch.equal((words[:, 7] >> 4) & 15, values[:, column].int() if k > column else torch.zeros(5, dtype=torch.int32))


def test_dequantised_is_the_formula() -> None:
    weight = int4_weight(6, 320, group_size=64, zeros=True, act_order=True)
    values = unpack_int4(weight.data, 320)
    expected = torch.empty(6, 320)
    for row in range(6):
        for j in range(320):
            difference = float(values[row, j]) - float(weight.zeros[row, j // 64])
            expected[row, weight.columns[j]] = difference * float(weight.scales[row, j // 64])
    assert torch.equal(weight.dequantize(torch.float32), expected)
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())


def test_a_float8_weight_has_one_scale_a_row_or_scales_in_groups() -> None:
    one = float8_weight(6, 256, group_size=256)
    many = float8_weight(6, 256, group_size=128)
    assert torch.equal(one.dequantize(torch.float32), one.data.float() * one.scales)
    assert torch.equal(many.dequantize(torch.float32)[:, 128:], many.data[:, 128:].float() * many.scales[:, 1:])


def test_mxfp4_is_what_transformers_makes_of_its_blocks() -> None:
    """Bit for bit, for every pattern of 4 bits and every exponent, of which 255 stands for no number."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255, 1).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales)[0].t()
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(255, 512)
    weight = QuantizedWeight(pack_int4(nibbles), scales[0], group_size=32, width=512)
    assert weight.values == "float4"
    assert torch.equal(weight.dequantize(torch.bfloat16).view(torch.int16), expected.contiguous().view(torch.int16))


def test_quantising_keeps_the_largest_number_and_rows_of_zeros() -> None:
    matrix = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    matrix[2] = 0
    weight = quantize_float8(matrix)
    restored = weight.dequantize(torch.float32)
    assert torch.equal(restored[2], torch.zeros(96))
    largest = matrix.abs().amax(1)
    assert torch.allclose(restored.abs().amax(1), largest, rtol=1e-6)
    # half a unit in the last of 4 bits, or of the smallest subnormal number
    assert bool(((restored - matrix).abs() <= (matrix.abs() / 16).maximum(largest[:, None] / 448 * 2.0**-10) * 1.0001).all())


@pytest.mark.parametrize("make", [int4_weight, float8_weight, lambda n, k, group_size, seed: float4_weight(n, k, seed=seed)])
def test_merged_rows_are_the_rows(make) -> None:
    parts = [make(n, 256, group_size=128, seed=n) for n in (5, 3, 9)]
    merged = merge_rows(parts)
    assert merged.shape == (17, 256)
    assert torch.equal(merged.dequantize(torch.float32), torch.cat([part.dequantize(torch.float32) for part in parts]))
    assert torch.equal(merged.rows(5, 8).dequantize(torch.float32), parts[1].dequantize(torch.float32))
    assert merged.rows(5, 8).data.untyped_storage().data_ptr() == merged.data.untyped_storage().data_ptr()


def test_merged_rows_have_zero_points_if_one_part_has_them() -> None:
    parts = [int4_weight(4, 256, group_size=128, zeros=zeros) for zeros in (False, True)]
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(merge_rows(parts).dequantize(torch.float32), expected)


def test_merged_rows_share_the_largest_input_scale() -> None:
    parts = [float8_weight(4, 64, group_size=64, input_scale=x) for x in (0.5, 2.0, 1.0)]
    assert merge_rows(parts).input_scale.tolist() == [2.0]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (int4_weight(4, 256, group_size=64), "group sizes"),
        (int4_weight(4, 256, group_size=128, act_order=True), "column orders"),
        (float8_weight(4, 256, group_size=128), "data"),
    ],
)
def test_weights_that_differ_are_not_merged(other: QuantizedWeight, what: str) -> None:
    with pytest.raises(ValueError, match=f"their {what} differ"):
        merge_rows([int4_weight(4, 256, group_size=128), other])


def test_columns_in_different_orders_are_not_merged() -> None:
    parts = [int4_weight(4, 256, group_size=128, act_order=True, seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="their column orders differ"):
        merge_rows(parts)


@pytest.mark.parametrize("make", [int4_weight, float8_weight])
def test_pytorch_computes_the_product_with_the_matrix(make) -> None:
    weight = make(8, 64, group_size=32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = x @ weight.dequantize(torch.float32).t()
    assert torch.equal(ops.linear(x, weight), expected)
    assert torch.allclose(ops.invariant_linear(x, weight, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        int4_weight(6, 640, group_size=64, zeros=True),
        int4_weight(6, 640, group_size=640),
        int4_weight(6, 600, group_size=64),
        float8_weight(6, 640, group_size=128, input_scale=0.5),
        float8_weight(6, 640, group_size=640),
        float4_weight(6, 640),
    ],
    ids=["int4", "int4-row", "int4-tail", "float8", "float8-row", "mxfp4"],
)
def test_columns_are_the_columns(weight: QuantizedWeight) -> None:
    matrix = weight.dequantize(torch.float32)
    for start, stop in ((0, 128), (128, 384), (384, weight.width)):
        part = weight.columns_between(start, stop)
        assert part.shape == (6, stop - start)
        assert torch.equal(part.dequantize(torch.float32), matrix[:, start:stop])
        assert part.data.untyped_storage().nbytes() == part.data.nbytes, "a copy"
        assert part.input_scale is weight.input_scale


def test_columns_that_share_a_scale_stay_together() -> None:
    with pytest.raises(ValueError, match="columns 32 to 128 must be whole groups of 64 neighbouring columns"):
        int4_weight(6, 256, group_size=64).columns_between(32, 128)
    with pytest.raises(ValueError, match="columns 0 to 96 must be whole groups"):
        int4_weight(6, 256, group_size=64).columns_between(0, 96)
    with pytest.raises(ValueError, match="columns 0 to 128 must be whole groups of 64 neighbouring columns"):
        int4_weight(6, 256, group_size=64, act_order=True).columns_between(0, 128)
