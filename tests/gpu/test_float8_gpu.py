"""Float8 products of the Hopper kernel and of the portable one, against attention of the numbers that their inputs
stand for, and the paper's error."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from float8_cases import BOUND, dequantized, paged_call
from tiny_models import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig

import fa_serve
from fa_serve.api import MAX_COPY_BYTES
from fa_serve.backends.reference import attention_reference
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_qkv

if torch.cuda.get_device_capability() < (8, 9) or torch.version.hip is not None:
    pytest.skip("needs a GPU that multiplies float8", allow_module_level=True)

CASES = [(dim, precision) for dim in (64, 128) for precision in ("qk8", "fp8")] + [(256, "qk8")]


@pytest.fixture(params=["auto", "triton"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """ "auto" takes the Hopper kernel on a Hopper GPU."""
    return request.param


def check(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: Precision, **options: object
) -> None:
    """One sequence (1, seqlen, heads, dim)."""
    q, k, v, out = (x.cpu() for x in (q, k, v, out))
    exact, _ = attention_reference(*dequantized(q, k, v, precision), **options)
    assert torch.isfinite(out).all()
    assert (out.double() - exact).norm() <= BOUND[precision] * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_dense(dim: int, precision: Precision, dtype: torch.dtype, backend: str) -> None:
    """Odd lengths, groups of heads, values whose size changes, windows, softcap, sinks, heads that are a part of more."""
    q, k, v = make_qkv(2, 333, 1111, 4, 2, dim + 8, dtype=dtype, device="cuda")
    q, k, v = (x[..., :dim] for x in (q, k, v))
    v[:, :500] *= 20
    sinks = torch.tensor([0.5, 3.0, -1.0, 0.0], device="cuda")
    for given in (
        {"window_size": (-1, -1)},
        {"window_size": (-1, 0), "sinks": sinks},
        {"window_size": (200, 0), "softcap": 20.0},
        {"window_size": (-1, 30)},
    ):
        out = fa_serve.attention(q, k, v, precision=precision, backend=backend, **given)
        host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        for b in range(2):
            check(out[b : b + 1], q[b : b + 1], k[b : b + 1], v[b : b + 1], precision, softmax_scale=dim**-0.5, **host)


@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_packed(dim: int, precision: Precision, backend: str) -> None:
    """Sequences without keys, without queries and shorter than a group of keys, and 300, which the search reads in parts."""
    for lengths_q, lengths_k in (
        ([70, 0, 1, 150, 90, 700], [70, 30, 9, 310, 0, 1000]),
        ([20 + i % 50 for i in range(300)], [100 + 7 * i % 90 for i in range(300)]),
    ):
        q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, dim, dtype=torch.bfloat16, device="cuda"))
        cu_q, cu_k = (cu_seqlens(lengths).cuda() for lengths in (lengths_q, lengths_k))
        lengths = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
        out = fa_serve.attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, precision=precision, backend=backend, **lengths
        )
        for b in [*range(6), len(lengths_q) - 1]:
            rows = slice(cu_q[b], cu_q[b + 1])
            keys = slice(cu_k[b], cu_k[b + 1])
            if lengths_q[b] and lengths_k[b]:
                one = (out[None, rows], q[None, rows], k[None, keys], v[None, keys])
                check(*one, precision, softmax_scale=dim**-0.5, window_size=(-1, 0))
            assert lengths_k[b] or not out[rows].any()


@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_equal_calls_have_equal_bits(dim: int, precision: Precision, backend: str) -> None:
    q, k, v = make_qkv(2, 4000, 4000, 8, 2, dim, dtype=torch.bfloat16, device="cuda")
    first = fa_serve.attention(q, k, v, causal=True, precision=precision, backend=backend)
    assert (first.float() - fa_serve.attention(q, k, v, causal=True).float()).abs().max() < 0.3
    for _ in range(50):
        assert torch.equal(fa_serve.attention(q, k, v, causal=True, precision=precision, backend=backend), first)


def test_in_a_graph(backend: str) -> None:
    q, k, v = make_qkv(1, 1000, 1000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    fa_serve.attention(q, k, v, causal=True, precision="fp8", out=out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa_serve.attention(q, k, v, causal=True, precision="fp8", out=out, backend=backend)
    k.neg_()
    graph.replay()
    assert torch.equal(out, fa_serve.attention(q, k, v, causal=True, precision="fp8", backend=backend))


def test_outliers(backend: str) -> None:
    """The paper's inputs: N(0, 1) + N(0, 100) * Bernoulli(0.001). Its float8 has an error of 9.1e-3."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> torch.Tensor:
        x, wide, rare = (torch.empty(1, 4096, 8, 128, device="cuda") for _ in range(3))
        return x.normal_(generator=generator) + 10 * wide.normal_(generator=generator) * rare.bernoulli_(
            0.001, generator=generator
        )

    q, k, v = (draw().bfloat16() for _ in range(3))
    exact, _ = attention_reference(q.double(), k.double(), v.double(), softmax_scale=128**-0.5)
    for precision, bound in (("fp8", 9.1e-3), ("qk8", 8e-3)):
        out = fa_serve.attention(q, k, v, precision=precision, backend=backend)
        assert (out.double() - exact).pow(2).mean().sqrt() <= bound


@pytest.mark.parametrize("float8", [False, True], ids=["16-bit", "float8"])
@pytest.mark.parametrize("window", [(-1, 0), (200, 0)], ids=str)
@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_pages(dim: int, precision: Precision, window: tuple[int, int], float8: bool, backend: str) -> None:
    """Prompts of unequal lengths beside sequences that decode, whose rows have the bits of the usual decoding kernel."""
    lengths_q = [70, 0, 1, 150, 90, 700, 1, 17]
    lengths_k = [70, 30, 900, 310, 0, 1000, 1, 1111]
    call, sequences = paged_call(lengths_q, lengths_k, dim, float8, window, device="cuda")
    out = fa_serve.attention_paged(**call, precision=precision, backend=backend)
    usual = fa_serve.attention_paged(**call, backend=backend)
    for b, (rows, keys, values) in enumerate(sequences):
        if lengths_q[b] > 16 and lengths_k[b]:
            # the values of a float8 cache are not rounded again
            rounded = "qk8" if float8 else precision
            q = call["q"][None, rows].cpu()
            exact, _ = attention_reference(*dequantized(q, keys, values, rounded), softmax_scale=dim**-0.5, window_size=window)
            found = out[None, rows].cpu()
            assert torch.isfinite(found).all()
            assert (found.double() - exact).norm() <= BOUND[precision] * exact.norm()
            assert not torch.equal(out[rows], usual[rows])
        elif not float8:
            assert torch.equal(out[rows], usual[rows])
        else:  # without float8 products, prompts behind this cache are decoded too, with other splits
            torch.testing.assert_close(out[rows], usual[rows], rtol=0.02, atol=0.02)
    for _ in range(20):
        assert torch.equal(fa_serve.attention_paged(**call, precision=precision, backend=backend), out)


def test_many_sequences_in_pages(backend: str) -> None:
    """300 sequences, of which every third one decodes."""
    lengths_q = [1 if i % 3 == 0 else 20 + i % 50 for i in range(300)]
    lengths_k = [100 + 7 * i % 390 for i in range(300)]
    call, sequences = paged_call(lengths_q, lengths_k, 64, False, (-1, 0), device="cuda")
    out = fa_serve.attention_paged(**call, precision="fp8", backend=backend)
    for b in (1, 2, 4, 100, 200, 299):
        rows, keys, values = sequences[b]
        check(out[None, rows], call["q"][None, rows], keys, values, "fp8", softmax_scale=0.125, window_size=(-1, 0))


def test_pages_need_no_host_and_can_be_captured(
    no_synchronisation: Callable[[], AbstractContextManager[None]], backend: str
) -> None:
    call, _ = paged_call([300, 1, 40], [1000, 500, 40], 128, False, (-1, 0), device="cuda")
    out = torch.empty_like(call["q"])
    expected = fa_serve.attention_paged(**call, precision="fp8", backend=backend)
    with no_synchronisation():
        fa_serve.attention_paged(**call, precision="fp8", out=out, backend=backend)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa_serve.attention_paged(**call, precision="fp8", out=out, backend=backend)
    call["k_cache"].neg_()
    call["seqused_k"] -= 5
    graph.replay()
    assert torch.equal(out, fa_serve.attention_paged(**call, precision="fp8", backend=backend))
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("float8", [False, True], ids=["16-bit", "float8"])
def test_a_call_whose_copies_would_not_fit_keeps_the_dtype_of_q(float8: bool, backend: str) -> None:
    """The longest sequence might have 2M keys, as far as the host knows."""
    call, _ = paged_call([70, 1, 20, 30], [300, 200, 70, 400], 64, float8, (-1, 0), device="cuda")
    entries = call["block_table"]
    call["block_table"] = torch.nn.functional.pad(entries, (0, (1 << 17) - entries.shape[1]), value=2**28)
    call["max_seqlen_k"] = 1 << 21
    torch.cuda.reset_peak_memory_stats()
    out = fa_serve.attention_paged(**call, precision="fp8", backend=backend)
    assert torch.equal(out, fa_serve.attention_paged(**call, backend=backend))
    assert torch.cuda.max_memory_allocated() < MAX_COPY_BYTES


def test_the_engine_with_float8_products() -> None:
    """Prompts that are cut into chunks, beside sequences that decode: the log-probabilities of an engine without, nearly."""
    sizes = {"head_dim": 64, "hidden_size": 256, "vocab_size": 512, "initializer_range": 0.06, "num_attention_heads": 8}
    draw = random.Random(0)
    asked = [[draw.randrange(5, 512) for _ in range(draw.randint(1, 700))] for _ in range(60)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    seen = {}
    for name, settings in {
        "bf16": {},
        "qk8": {"attention_precision": "qk8"},
        "fp8": {"attention_precision": "fp8"},
        "fp8 and cache": {"attention_precision": "fp8", "kv_cache_dtype": "fp8"},
    }.items():
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES | sizes | {"max_position_embeddings": 1024})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
        limits = {"num_pages": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 512}
        engine = Engine(EngineConfig(device="cuda", seed=0, **limits, **settings), model=model)
        completions = engine.generate(asked, params)
        seen[name] = torch.tensor([c.logprobs[0].logprob for c in completions if c.logprobs])
    assert seen["bf16"].std() > 0.1, "prompts have different log-probabilities"
    for name in ("qk8", "fp8", "fp8 and cache"):
        difference = (seen[name] - seen["bf16"]).abs()
        assert 0 < difference.mean() < 0.25 * seen["bf16"].std()
