"""The Hopper kernels of products with quantised weights on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from products_by_kernel import kernel_for, rounded_by_kernel
from quantized import float8_weight, int4_weight, on_gpu
from rounded_once import dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.products.quantised.weight import FLOAT8, QuantizedWeight
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

EXACT = TorchOps()
CALLS = 2  # later calls launch in another way
N = 4100  # no multiple of a tile, nor of what torch._scaled_mm takes
COLUMNS = {"int4": 1056, "float8-row": 1152, "float8-G128": 1168}
"""By the beginning of a weight's name; one token takes the kernel for Hopper with a multiple of 128 only."""
TOKENS = (1, 2, 16, 17, 64, 128, 129, 300)
WEIGHTS = {
    "int4-G128": lambda n, k, dtype: int4_weight(n, k, group_size=128, dtype=dtype),
    "int4-G64-zeros": lambda n, k, dtype: int4_weight(n, k, group_size=64, zeros=True, dtype=dtype),
    "int4-G32-zeros-act-order": lambda n, k, dtype: int4_weight(n, k, group_size=32, zeros=True, act_order=True, dtype=dtype),
    "int4-G512": lambda n, k, dtype: int4_weight(n, k, group_size=512, dtype=dtype),
    "int4-row": lambda n, k, dtype: int4_weight(n, k, group_size=k, dtype=dtype),
    "float8-row": lambda n, k, dtype: float8_weight(n, k, group_size=k),
    "float8-G128": lambda n, k, dtype: float8_weight(n, k, group_size=128),
}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="these kernels run on Hopper only"
)


def columns_of(name: str) -> int:
    """How many columns a weight of this name has."""
    return next(columns for beginning, columns in COLUMNS.items() if name.startswith(beginning))


def expected_kernel(name: str, dtype: torch.dtype, tokens: int) -> str:
    """The row of the table. Columns of float8-G128 are no multiple of 128, and float16 may not hold its scales."""
    if tokens == 1:
        return "unpack_row" if name == "float8-G128" else "gemv"
    if tokens <= 128:
        return "unpack" if name == "float8-G128" and dtype == torch.float16 else "unpack_wgmma"
    return "dequantise" if name == "float8-row" or dtype == torch.float16 else "one_expert"


def gpu_randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).cuda()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name: str, dtype: torch.dtype) -> None:
    """At most twice the error of PyTorch's product with the matrix; in float16 with a bias and a residual."""
    k = columns_of(name)
    weight = on_gpu(WEIGHTS[name](N, k, dtype))
    bias = gpu_randn(N, dtype=dtype, seed=1) if dtype == torch.float16 else None
    wide = None if bias is None else bias.double()
    for m in TOKENS:
        residual = None if bias is None else gpu_randn(m, N, dtype=dtype, seed=9)
        for seed in range(CALLS):
            x = gpu_randn(m, k, dtype=dtype, seed=seed)
            assert kernel_for(x, weight) == expected_kernel(name, dtype, m)
            given = [None if residual is None else residual.clone() for _ in range(2)]
            exact_residual = None if residual is None else residual.double()
            exact = EXACT.linear(x.double(), weight, wide, None, None, exact_residual, 0.5, None)
            eager = torch.nn.functional.linear(x, weight.dequantize(dtype), bias)
            eager = eager if given[0] is None else given[0] + 0.5 * eager
            assert_matches_reference(ops.linear(x, weight, bias, residual=given[1], alpha=0.5), exact, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", ["int4-G128", "int4-G32-zeros-act-order", "float8-row"])
def test_one_token_with_a_norm_and_a_gate(name: str, dtype: torch.dtype) -> None:
    k = columns_of(name)
    weight = on_gpu(WEIGHTS[name](2 * N, k, dtype))
    bias = gpu_randn(2 * N, dtype=dtype, seed=1)
    norm = ops.Norm(gpu_randn(k, dtype=dtype, seed=3), 1e-5, 1.0)
    wide = ops.Norm(norm.weight.double(), 1e-5, 1.0)
    x = 100 * gpu_randn(1, k, dtype=dtype, seed=5)
    activation = ops.ACTIVATIONS[0 if dtype == torch.float16 else 1]
    exact = EXACT.linear(x.double(), weight, bias.double(), wide, activation, None, 1.0, None)
    eager = EXACT.linear(x, weight, bias, norm, activation, None, 1.0, None)
    assert kernel_for(x, weight) == "gemv"
    for _ in range(CALLS):
        assert_matches_reference(ops.linear(x, weight, bias, norm=norm, activation=activation), exact, eager)


@pytest.mark.parametrize(("n", "k"), [(N, 1024), (101, 999)])
def test_addresses_that_are_not_multiples_of_16_bytes(n: int, k: int) -> None:
    weight = on_gpu(WEIGHTS["int4-G128"](n, k, torch.bfloat16))
    for m in (1, 5, 40):
        storage = gpu_randn(m * k + 1, dtype=torch.bfloat16)
        x = storage[1:].view(m, k)
        exact = x.double() @ weight.dequantize(torch.float64).t()
        assert_matches_reference(ops.linear(x, weight), exact, x @ weight.dequantize(torch.bfloat16).t())


@pytest.mark.parametrize("values", ["int4", "float8-row", "float8-G128"])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (28672, 4096), (6144, 4096)])
def test_large_weights(n: int, k: int, values: str) -> None:
    """The tiles and splits of sums that models take, with the same bits at every call and in CUDA graphs."""
    draw = torch.Generator("cuda").manual_seed(0)
    group = k if values == "float8-row" else 128
    scales = (torch.rand(n, k // group, generator=draw, device="cuda") + 0.5) / 32
    if values == "int4":
        data = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=draw, dtype=torch.int32, device="cuda")
        scales = scales.bfloat16()
    else:
        data = torch.randn(n, k, generator=draw, device="cuda").to(FLOAT8)
    weight = QuantizedWeight(data, scales, group_size=group, width=k)
    matrix = weight.dequantize(torch.bfloat16)
    some = torch.randperm(n, generator=draw, device="cuda")[:512]
    wide = weight.dequantize(torch.float64)[some]
    for m in (1, 2, 8, 17, 64, 100, 128, 256, 512):
        x = gpu_randn(m, k, dtype=torch.bfloat16, seed=m)
        taken = x.double()
        if m > 1 and values == "float8-row":
            rounded, scales_of_rows, _ = rounded_by_kernel(x)
            taken = rounded.double() * scales_of_rows.double()
        found = [ops.linear(x, weight) for _ in range(CALLS)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(ops.linear(x, weight))
        graph.replay()
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert_matches_reference(found[0][:, some], taken @ wide.t(), (taken.bfloat16() @ matrix.t())[:, some])
