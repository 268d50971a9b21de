"""Float8 products of the Hopper kernel: against attention of the numbers that their inputs stand for, and the paper's error."""

from __future__ import annotations

import pytest
import torch
from float8_cases import dequantized

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_qkv

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BOUND = {"qk8": 0.004, "fp8": 0.03}
CASES = [(dim, precision) for dim in (64, 128) for precision in ("qk8", "fp8")] + [(256, "qk8")]


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
def test_dense(dim: int, precision: Precision, dtype: torch.dtype) -> None:
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
        out = fa_serve.attention(q, k, v, precision=precision, **given)
        host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        for b in range(2):
            check(out[b : b + 1], q[b : b + 1], k[b : b + 1], v[b : b + 1], precision, softmax_scale=dim**-0.5, **host)


@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_packed(dim: int, precision: Precision) -> None:
    """Sequences without keys, without queries and shorter than a group of keys, and 300, which the search reads in parts."""
    for lengths_q, lengths_k in (
        ([70, 0, 1, 150, 90, 700], [70, 30, 9, 310, 0, 1000]),
        ([20 + i % 50 for i in range(300)], [100 + 7 * i % 90 for i in range(300)]),
    ):
        q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, dim, dtype=torch.bfloat16, device="cuda"))
        cu_q, cu_k = (cu_seqlens(lengths).cuda() for lengths in (lengths_q, lengths_k))
        lengths = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
        out = fa_serve.attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, precision=precision, **lengths
        )
        for b in [*range(6), len(lengths_q) - 1]:
            rows = slice(cu_q[b], cu_q[b + 1])
            keys = slice(cu_k[b], cu_k[b + 1])
            if lengths_q[b] and lengths_k[b]:
                one = (out[None, rows], q[None, rows], k[None, keys], v[None, keys])
                check(*one, precision, softmax_scale=dim**-0.5, window_size=(-1, 0))
            assert lengths_k[b] or not out[rows].any()


@pytest.mark.parametrize(("dim", "precision"), CASES)
def test_equal_calls_have_equal_bits(dim: int, precision: Precision) -> None:
    q, k, v = make_qkv(2, 4000, 4000, 8, 2, dim, dtype=torch.bfloat16, device="cuda")
    first = fa_serve.attention(q, k, v, causal=True, precision=precision)
    assert (first.float() - fa_serve.attention(q, k, v, causal=True).float()).abs().max() < 0.3
    for _ in range(50):
        assert torch.equal(fa_serve.attention(q, k, v, causal=True, precision=precision), first)


def test_in_a_graph() -> None:
    q, k, v = make_qkv(1, 1000, 1000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    fa_serve.attention(q, k, v, causal=True, precision="fp8", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa_serve.attention(q, k, v, causal=True, precision="fp8", out=out)
    k.neg_()
    graph.replay()
    assert torch.equal(out, fa_serve.attention(q, k, v, causal=True, precision="fp8"))


def test_outliers() -> None:
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
        out = fa_serve.attention(q, k, v, precision=precision)
        assert (out.double() - exact).pow(2).mean().sqrt() <= bound
