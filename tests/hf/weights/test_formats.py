"""The layouts of checkpoints, bit for bit against the dequantisers of the tools that write them.

AutoAWQ and AutoGPTQ are not installed: dequantisers.py has theirs. compressed-tensors' own is called where it is installed.
"""

from __future__ import annotations

import pytest
import torch
from dequantisers import of_autoawq, of_autogptq
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fa_serve.hf.weights.formats import Awq, Float8, Gptq, Mxfp4, PackQuantized, Rounded, Scheme
from fa_serve.ops.products.quantised.weight import FLOAT8
from fa_serve.spec import ParameterError

N = 48
K = 320
SIZES = [32, 64, -1]


def random_tensors(scheme: Scheme, dtype: torch.dtype = torch.float16, n: int = N, k: int = K) -> dict[str, Tensor]:
    """Random bits in every tensor of a scheme."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name, wanted in scheme.tensors(n, k, dtype).items():
        if wanted.dtype == torch.int32:
            found[name] = torch.randint(-(2**31), 2**31, wanted.shape, generator=draw).int()
        elif wanted.dtype == FLOAT8:
            found[name] = (torch.randn(wanted.shape, generator=draw) * 100).to(FLOAT8)
        else:
            found[name] = (torch.rand(wanted.shape, generator=draw) / 64 + 2**-8).to(wanted.dtype)
    return found


@pytest.mark.parametrize("group_size", SIZES)
def test_awq(group_size: int) -> None:
    scheme = Awq(group_size)
    tensors = random_tensors(scheme)
    expected = of_autoawq(tensors, K if group_size == -1 else group_size)
    assert torch.equal(scheme.read(tensors, N, K).dequantize(torch.float16), expected.t())


@pytest.mark.parametrize("subtracted", [True, False], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("group_size", SIZES)
def test_gptq(group_size: int, act_order: bool, subtracted: bool) -> None:
    scheme = Gptq(group_size, subtracted)
    tensors = random_tensors(scheme)
    tensors["g_idx"] = torch.arange(K, dtype=torch.int32) // (K if group_size == -1 else group_size)
    if act_order:
        tensors["g_idx"] = tensors["g_idx"][torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    weight = scheme.read(tensors, N, K)
    assert torch.equal(weight.dequantize(torch.float16), of_autogptq(tensors, subtracted=subtracted).t())
    assert (weight.columns is not None) == (act_order and group_size != -1)


def test_symmetric_gptq_needs_no_zero_points() -> None:
    scheme = Gptq(64, True)
    tensors = random_tensors(scheme) | {"g_idx": torch.arange(K, dtype=torch.int32) // 64}
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    weight = scheme.read(tensors, N, K)
    assert weight.zeros is None
    assert torch.equal(weight.dequantize(torch.float16), of_autogptq(tensors, subtracted=True).t())


def test_groups_of_different_sizes_are_refused() -> None:
    scheme = Gptq(64, True)
    tensors = random_tensors(scheme) | {"g_idx": torch.zeros(K, dtype=torch.int32)}
    with pytest.raises(ParameterError, match="g_idx must put 64 columns into each group") as error:
        scheme.read(tensors, N, K)
    assert error.value.field == "g_idx"


def decompressed(kind: str, tensors: dict[str, Tensor], **weights: object) -> Tensor:
    """What compressed-tensors makes of the tensors of a layer."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    return BaseCompressor.get_value_from_registry(kind).decompress(dict(tensors), scheme)["weight"]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pack_quantized(group_size: int, symmetric: bool, dtype: torch.dtype) -> None:
    scheme = PackQuantized(group_size, symmetric, ordered=False)
    tensors = random_tensors(scheme, dtype) | {"weight_shape": torch.tensor([N, K])}
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    expected = decompressed("pack-quantized", tensors, num_bits=4, type="int", symmetric=symmetric, **strategy)
    assert torch.equal(scheme.read(tensors, N, K).dequantize(dtype), expected)


def test_pack_quantized_in_the_order_of_activations() -> None:
    """Column i is in group g_idx[i], as in GPTQ. compressed-tensors has dropped this tensor since 0.15."""
    scheme = PackQuantized(64, True, ordered=True)
    tensors = random_tensors(scheme, torch.float32) | {"weight_shape": torch.tensor([N, K])}
    tensors["weight_g_idx"] = (torch.arange(K) // 64)[torch.randperm(K, generator=torch.Generator().manual_seed(1))].int()
    plain = PackQuantized(64, True, ordered=False)
    ones = tensors | {"weight_scale": torch.ones_like(tensors["weight_scale"])}
    values = plain.read(ones, N, K).dequantize(torch.float32)
    expected = values * tensors["weight_scale"][:, tensors["weight_g_idx"].long()]
    assert torch.equal(scheme.read(tensors, N, K).dequantize(torch.float32), expected)


def test_another_shape_is_refused() -> None:
    scheme = PackQuantized(64, True, ordered=False)
    tensors = random_tensors(scheme) | {"weight_shape": torch.tensor([N, K - 1])}
    with pytest.raises(ParameterError, match=r"weight_shape must be \[48, 320\], the shape of the layer, got \[48, 319\]"):
        scheme.read(tensors, N, K)


@pytest.mark.parametrize(
    ("block", "weights"),
    [
        ((0, 0), {"strategy": "tensor"}),
        ((1, 0), {"strategy": "channel"}),
        ((128, 128), {"strategy": "block", "block_structure": [128, 128]}),
    ],
    ids=["tensor", "row", "block"],
)
@pytest.mark.parametrize("n", [256, 200])
def test_float8(block: tuple[int, int], weights: dict[str, object], n: int) -> None:
    scheme = Float8("weight_scale", block)
    tensors = random_tensors(scheme, n=n)
    expected = decompressed("float-quantized", tensors, num_bits=8, type="float", **weights)
    assert torch.equal(scheme.read(tensors, n, K).dequantize(torch.float32), expected)


def test_float8_in_blocks_as_deepseek_reads_them() -> None:
    """inference/kernel.py: the number at (i, j) times the scale at (i // 128, j // 128)."""
    scheme = Float8("weight_scale_inv", (128, 128))
    tensors = random_tensors(scheme, n=200)
    i = torch.arange(200)[:, None] // 128
    j = torch.arange(K)[None, :] // 128
    expected = tensors["weight"].float() * tensors["weight_scale_inv"][i, j]
    assert torch.equal(scheme.read(tensors, 200, K).dequantize(torch.float32), expected)


def test_scales_become_float32_because_products_need_them_so() -> None:
    """transformers leaves scales of checkpoints whose keys it renames in bfloat16."""
    form = Float8("weight_scale", (1, 0), "input_scale")
    tensors = {
        "weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "weight_scale": torch.full((4, 1), 0.5, dtype=torch.bfloat16),
        "input_scale": torch.tensor([0.25], dtype=torch.bfloat16),
    }
    weight = form.read(tensors, 4, 8)
    assert (weight.scales.dtype, weight.input_scale.dtype) == (torch.float32, torch.float32)
    assert (weight.dequantize(torch.float32) == 0.5).all()


def test_the_scale_of_activations_is_kept() -> None:
    scheme = Float8("weight_scale", (0, 0), "input_scale")
    weight = scheme.read(random_tensors(scheme) | {"input_scale": torch.tensor(0.25)}, N, K)
    assert weight.input_scale is not None
    assert weight.input_scale.tolist() == [0.25]
    assert Float8("weight_scale", (0, 0)).read(random_tensors(scheme), N, K).input_scale is None


def test_mxfp4_has_the_bits_of_transformers() -> None:
    draw = torch.Generator().manual_seed(0)
    scheme = Mxfp4()
    tensors = {
        name: torch.randint(0, 255, tensor.shape, generator=draw, dtype=torch.uint8)
        for name, tensor in scheme.tensors(N, K, torch.bfloat16).items()
    }
    matrix = convert_moe_packed_tensors(tensors["weight_blocks"][None], tensors["weight_scales"][None])[0].t().contiguous()
    found = scheme.read(tensors, N, K).dequantize(torch.bfloat16)
    assert torch.equal(found.view(torch.int16), matrix.view(torch.int16))
    tensors["weight_scales"][0, 0] = 255
    with pytest.raises(ParameterError, match="weight_scales must be at most 254"):
        scheme.read(tensors, N, K)


@pytest.mark.parametrize(
    ("scheme", "text", "values", "columns_of_group"),
    [
        (Awq(128), "4 bits in groups of 128 with zero points (AWQ)", "int4", 128),
        (Gptq(-1, True), "4 bits in rows (GPTQ)", "int4", 0),
        (PackQuantized(32, False, False), "4 bits in groups of 32 with zero points (compressed-tensors)", "int4", 32),
        (PackQuantized(32, True, False), "4 bits in groups of 32 (compressed-tensors)", "int4", 32),
        (Float8("s", (0, 0)), "float8 with a scale for the matrix", "float8", 0),
        (Float8("s", (128, 128)), "float8 with a scale for each 128 x 128", "float8", 128),
        (Rounded(), "float8 with a scale for each row", "float8", 0),
        (Mxfp4(), "4-bit floats in groups of 32 (mxfp4)", "float4", 32),
    ],
)
def test_schemes_say_what_they_are(scheme: Scheme, text: str, values: str, columns_of_group: int) -> None:
    assert (scheme.description, scheme.values, scheme.columns_of_group) == (text, values, columns_of_group)
