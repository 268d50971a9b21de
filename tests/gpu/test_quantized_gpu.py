"""Products with quantised weights on a GPU, against float64, and quantised models in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import quantised_experts
import torch
from products_by_kernel import dequantised_by_kernel, kernel_for, only_kernels, rounded_by_kernel
from quantised_copies import copy_of, dequantised, load
from quantized import float4_weight, float8_weight, int4_weight, on_gpu
from rounded_once import assert_rounded_once, dtype_id, randn
from tiny_models import greedy
from torch import Tensor

from fa_serve import ops
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.ops.moe import grouped
from fa_serve.ops.products.problem import compiles_gluon
from fa_serve.ops.products.quantised.weight import quantize_float8
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

EXACT = TorchOps()
CALLS = 3  # later calls launch in another way
WEIGHTS = {
    "int4-G128": lambda n, k: int4_weight(n, k, group_size=128, dtype=torch.bfloat16),
    "int4-G32-zeros-act-order": lambda n, k: int4_weight(n, k, group_size=32, zeros=True, act_order=True, dtype=torch.float16),
    "int4-G32-zeros": lambda n, k: int4_weight(n, k, group_size=32, zeros=True, dtype=torch.float16),
    "mxfp4": lambda n, k: float4_weight(n, k),
    "float8-row": lambda n, k: float8_weight(n, k, group_size=k),
    "float8-static": lambda n, k: float8_weight(n, k, group_size=k, input_scale=0.01),
    "float8-G128": lambda n, k: float8_weight(n, k, group_size=128),
}


def gpu_randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantised_has_the_bits_of_pytorch(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name](200, 1000)
    for calls in range(1, CALLS + 1):
        assert torch.equal(dequantised_by_kernel(on_gpu(weight), dtype, calls).cpu(), weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("n", "k", "gated"), [(4096, 4096, False), (2 * 1536, 1056, True), (101, 999, False)])
def test_one_token(name: str, n: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    weight = on_gpu(WEIGHTS[name](n, k))
    activation = "silu" if gated else None
    norm = ops.Norm(gpu_randn(k, dtype=dtype, seed=3), 1e-5)
    for seed in range(CALLS):
        x = gpu_randn(1, k, dtype=dtype, seed=seed)
        residual = None if gated else gpu_randn(1, n, dtype=dtype, seed=9)
        wide = ops.Norm(norm.weight.double(), 1e-5)
        exact_residual = None if residual is None else residual.double()
        exact = EXACT.linear(x.double(), weight, None, wide, activation, exact_residual, 0.5, None)
        given = None if residual is None else residual.clone()
        actual = ops.linear(x, weight, norm=norm, activation=activation, residual=given, alpha=0.5)
        if kernel_for(x, weight) != "gemv":
            assert_rounded_once(actual, exact)
        else:  # rounds the normalised token, as PyTorch does
            assert_matches_reference(actual, exact, EXACT.linear(x, weight, None, norm, activation, residual, 0.5, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 4096, 4096), (65, 1024, 992), (300, 101, 999), (700, 512, 1024)])
def test_several_tokens(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """At most twice the error of PyTorch's product with the matrix, and of rounded activations where they are rounded."""
    weight = on_gpu(WEIGHTS[name](n, k))
    matrix = weight.dequantize(torch.float64)
    for seed in range(CALLS):
        x = gpu_randn(m, k, dtype=dtype, seed=seed)
        residual = gpu_randn(m, n, dtype=dtype, seed=9)
        exact = residual.double() + 0.5 * (x.double() @ matrix.t())
        eager = residual + 0.5 * (x @ matrix.to(dtype).t())
        if dtype == torch.bfloat16 and weight.scales.shape[1] == 1 and not weight.is_packed and n % 16 == 0:
            if weight.input_scale is None:
                rounded = quantize_float8(x).dequantize(torch.float64)
            else:
                rounded = (x.float() / weight.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.01
            eager = (residual.double() + 0.5 * (rounded @ matrix.t())).to(dtype)
        # a sum of k products one after the other in float32 gathers about sqrt(k) roundings; PyTorch adds up several sums
        roundings = k**0.5 if dtype == torch.float32 else 1
        band = roundings * torch.finfo(dtype).eps * exact.abs().max()
        actual = ops.linear(x, weight, residual=residual.clone(), alpha=0.5)
        assert (actual.double() - exact).abs().max() <= 2 * ((eager.double() - exact).abs().max() + band)


def test_rows_are_rounded_as_pytorch_rounds_and_nan_stays() -> None:
    x = gpu_randn(33, 4100, dtype=torch.bfloat16)
    x[3] = 0
    rounded, scales, _ = rounded_by_kernel(x)
    expected = quantize_float8(x)
    torch.testing.assert_close(scales, expected.scales, rtol=1e-6, atol=0)
    # a division that is rounded in another way moves a number by one step at most, and few numbers
    differs = (rounded.float() * scales - expected.data.float() * expected.scales).abs() > 1e-6
    assert float(differs.float().mean()) < 1e-3
    x[5, 7] = float("nan")
    rounded, _, _ = rounded_by_kernel(x, None, torch.ones(1, device="cuda"))
    assert rounded.float().isnan().nonzero().tolist() == [[5, 7]]


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("scale", [None, 0.02], ids=["dynamic", "static"])
def test_a_gate_rounds_what_it_would_have_written(scale: float | None, activation: str) -> None:
    gate_up = gpu_randn(130, 2 * 14336, dtype=torch.bfloat16)
    given = None if scale is None else torch.tensor([scale], device="cuda")
    rounded, scales, _ = rounded_by_kernel(gate_up, None, given, activation)
    expected, expected_scales, _ = rounded_by_kernel(ops.act_and_mul(gate_up, activation), None, given)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rounded.float(), expected.float())


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "fp8", "fp8-block"])
@pytest.mark.parametrize("eager", [False, True], ids=["fused-graphs", "eager"])
@pytest.mark.usefixtures("full_float32")
def test_the_engine_gives_the_tokens_of_the_dequantised_model(copies: Path, name: str, eager: bool) -> None:
    path = copy_of(None, name, copies)
    reference = dequantised(load(path, dtype="float32")).to("cuda")
    prompts = [list(range(40, 75)), [*range(40, 70), 9, 8, 7], [5, 6, 7]]
    expected = [greedy(reference, prompt, 10) for prompt in prompts]
    settings = {"device": "cuda", "dtype": "float32", "num_pages": 128, "seed": 0, "max_num_batched_tokens": 32}
    engine = Engine(EngineConfig(model=path, eager=eager, **settings))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for _ in range(CALLS):
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_deterministic_mode_keeps_every_bit(copies: Path, name: str) -> None:
    engine = Engine(EngineConfig(model=copy_of(None, name, copies), device="cuda", deterministic=True, num_pages=128, seed=0))
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
    prompts = [list(range(40, 75)), [5, 6, 7], list(range(300, 321))]
    alone = [engine.generate([prompt], params)[0].logprobs for prompt in prompts]
    assert [c.logprobs for c in engine.generate(prompts, params)] == alone


CLAMPED = ops.Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", ["mxfp4", "float8-row", "float8-G128", "int4-G128", "int4-G32-zeros"])
def test_experts(name: str, dtype: torch.dtype) -> None:
    """gpt-oss' gate and biases, tokens that take every tile, and rows that do not know each other where that is asked."""
    num_experts = 16
    hidden = 576
    width = 256
    gate_up, down = (on_gpu(WEIGHTS[name](num_experts * n, k)) for n, k in ((2 * width, hidden), (hidden, width)))
    biases = [gpu_randn(num_experts, n, dtype=dtype, seed=n) for n in (2 * width, hidden)]
    weights = ops.ExpertWeights(gate_up, biases[0], down, biases[1], CLAMPED)
    wide = weights._replace(gate_up_bias=biases[0].double(), down_bias=biases[1].double())
    for tokens in (1, 2, 63, 300, 1000):
        x = gpu_randn(tokens, hidden, dtype=dtype, seed=tokens)
        scores, index = gpu_randn(tokens, num_experts, dtype=torch.float32, seed=1).softmax(-1).topk(4)
        scores = scores.to(dtype)
        exact = EXACT.experts(x.double(), index, scores.double(), wide, False)
        eager = EXACT.experts(x, index, scores, weights, False)
        for invariant in (False, True):
            found = [ops.experts(x, index, scores, weights, invariant=invariant) for _ in range(CALLS)]
            assert_matches_reference(found[0], exact, eager, roundings=2)  # of the gated product, then of the sum over experts
            assert all(torch.equal(each, found[0]) for each in found)
        alone = ops.experts(x[-1:], index[-1:], scores[-1:], weights, invariant=True)
        assert torch.equal(alone, found[0][-1:])


@pytest.fixture(params=["expert_wgmma", "grouped", "dequantise_experts"])
def _one_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """This row of the table computes all products of experts."""
    if request.param == "expert_wgmma" and not compiles_gluon():
        pytest.skip("needs the Gluon of Triton 3.6 to 3.9")
    if request.param == "expert_wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    with only_kernels(request.param):
        yield


@pytest.mark.usefixtures("_one_kernel")
@pytest.mark.parametrize("name", ["mxfp4", "float8-row", "float8-G128", "int4-G128", "int4-G32-zeros"])
def test_every_kernel_of_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with columns and rows that do not fill a tile: 1 to 128 pairs in a tile, uneven routing, experts of other
    processes, an input whose address is odd, and a graph that is replayed with another routing."""
    monkeypatch.setattr(grouped, "MATRIX_BYTES", 8 * 2 * 272 * 416 * 2)  # 4 experts at a time, and then 2
    num_experts = 10
    hidden = 416
    width = 272 if name == "float8-G128" else 288
    dtype = torch.bfloat16
    gate_up, down = (on_gpu(WEIGHTS[name](num_experts * n, k)) for n, k in ((2 * width, hidden), (hidden, width)))
    biases = [gpu_randn(num_experts, n, dtype=dtype, seed=n) for n in (2 * width, hidden)]
    for gate in (CLAMPED, ops.Gate("silu")):
        weights = ops.ExpertWeights(gate_up, biases[0], down, biases[1], gate)
        wide = weights._replace(gate_up_bias=biases[0].double(), down_bias=biases[1].double())
        for tokens in (3, 40, 100, 190, 700, 2000):
            flat = gpu_randn(tokens * hidden + 1, dtype=dtype, seed=tokens)
            x = flat[1:].view(tokens, hidden) if tokens == 40 else flat[:-1].view(tokens, hidden)
            scores, index = (gpu_randn(tokens, num_experts, dtype=torch.float32, seed=1) * 2).softmax(-1).topk(3)
            index[0] = torch.tensor([-1, 3, num_experts])
            scores = scores.to(dtype)
            exact = EXACT.experts(x.double(), index, scores.double(), wide, False)
            eager = EXACT.experts(x, index, scores, weights, False)
            found = [ops.experts(x, index, scores, weights) for _ in range(CALLS)]
            assert_matches_reference(found[0], exact, eager, roundings=2)  # of the gated product, then of the sum over experts
            assert all(torch.equal(each, found[0]) for each in found)
    graph = torch.cuda.CUDAGraph()
    given = torch.zeros_like(index)
    with torch.cuda.graph(graph):
        out = ops.experts(x, given, scores, weights)
    given.copy_(index)
    graph.replay()
    assert torch.equal(out, found[0])


@pytest.mark.parametrize("name", quantised_experts.WRITERS)
def test_quantised_experts_in_the_engine(name: str, tmp_path: Path) -> None:
    """In float32, where other sums of the same numbers choose the same tokens; graphs are captured and replayed."""
    path = quantised_experts.WRITERS[name](tmp_path / name)
    reference = quantised_experts.dequantised(load(path, dtype="float32")).cuda()
    reference.generation_config.eos_token_id = None
    prompts = [list(range(40, 75)), [5, 6, 7], list(range(200, 221))]
    expected = [greedy(reference, prompt, 10) for prompt in prompts]
    settings = {"dtype": "float32", "num_pages": 64, "page_size": 16, "max_num_seqs": 4, "seed": 0}
    ran = Engine(EngineConfig(model=path, device="cuda", **settings))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    assert [c.token_ids for c in ran.generate(prompts, params)] == expected
