"""Float8 products of the portable forward kernel in Triton's interpreter, beside attention of what the inputs stand for.

The interpreter multiplies no bfloat16. The GPU suite runs more cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_cases import BOUND, correct_interpreter, dequantized, paged_call
from torch import Tensor

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tiles import TileConfig
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

CASES: dict[str, tuple[int, Precision, dict[str, Any]]] = {
    "D64": (64, "fp8", {"window_size": (-1, 0)}),
    "D64-qk8": (64, "qk8", {"window_size": (-1, 30), "alibi_slopes": [0.02, 0.1]}),
    "D128": (128, "fp8", {"window_size": (60, 0), "softcap": 20.0, "sinks": [0.5, 3.0]}),
    "D128-alibi": (128, "fp8", {"alibi_slopes": [0.02, 0.1]}),
    "D256-qk8": (256, "qk8", {"window_size": (60, 0), "softcap": 20.0, "sinks": [0.5, 3.0]}),
}


@pytest.fixture(autouse=True)
def correct_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_interpreter(monkeypatch)


def check(out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, precision: Precision, **options: Any) -> None:
    """One sequence (1, seqlen, heads, dim); lse (num_heads, seqlen)."""
    exact, exact_lse = attention_reference(*dequantized(q, k, v, precision), softmax_scale=q.shape[-1] ** -0.5, **options)
    assert torch.isfinite(out).all()
    assert (out.double() - exact).norm() <= BOUND[precision] * exact.norm()
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_dense(name: str) -> None:
    """Odd lengths, groups of heads, values whose size changes, heads that are a part of more."""
    dim, precision, given = CASES[name]
    q, k, v = make_qkv(1, 70, 261, 2, 1, dim + 8, dtype=torch.float16)
    q, k, v = (x[..., :dim] for x in (q, k, v))
    v[:, :128] *= 20
    options = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in given.items()}
    out, lse = fa_serve.attention(q, k, v, precision=precision, backend="triton", return_lse=True, **options)
    check(out, lse[0], q, k, v, precision, **options)


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
def test_packed(precision: Precision) -> None:
    """Sequences without keys, without queries and shorter than a group of keys."""
    lengths_q = [70, 0, 1, 30, 20]
    lengths_k = [70, 30, 9, 200, 0]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 2, 1, 64, dtype=torch.float16))
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    out, lse = fa_serve.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=70,
        max_seqlen_k=200,
        causal=True,
        precision=precision,
        backend="triton",
        return_lse=True,
    )
    for b in range(len(lengths_q)):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        if lengths_q[b] and lengths_k[b]:
            one = (q[None, rows], k[None, keys], v[None, keys])
            check(out[None, rows], lse[:, rows], *one, precision, window_size=(-1, 0))
        if not lengths_k[b]:
            assert not out[rows].any()
            assert torch.isneginf(lse[:, rows]).all()


@pytest.mark.parametrize(
    ("window", "precision", "float8"),
    [((-1, 0), "fp8", True), ((100, 0), "qk8", False), ((100, 0), "qk8", True), ((40, 0), "fp8", False)],
    ids=str,
)
def test_pages(window: tuple[int, int], precision: Precision, float8: bool) -> None:
    """Prompts beside sequences that decode, which have the usual kernel. Pages before a window are given up."""
    call, sequences = paged_call([20, 1, 30, 0, 18], [20, 200, 261, 30, 0], 64, float8, window, dtype=torch.float16)
    out = fa_serve.attention_paged(**call, precision=precision, backend="triton")
    for b in (0, 2):
        rows, keys, values = sequences[b]
        # the values of a float8 cache are not rounded again
        rounded = "qk8" if float8 else precision
        q = call["q"][None, rows]
        exact, _ = attention_reference(*dequantized(q, keys, values, rounded), softmax_scale=0.125, window_size=window)
        assert torch.isfinite(out[rows]).all()
        assert (out[None, rows].double() - exact).norm() <= BOUND[precision] * exact.norm()
    rows, keys, values = sequences[1]
    exact, _ = attention_reference(call["q"][None, rows].double(), keys, values, softmax_scale=0.125, window_size=window)
    torch.testing.assert_close(out[None, rows].double(), exact, rtol=0.01, atol=0.02)
    assert not out[sequences[4][0]].any()


def test_without_keys_and_without_queries() -> None:
    for lengths in ((20, 0), (0, 20)):
        q, k, v = make_qkv(1, *lengths, 2, 1, 64, dtype=torch.float16)
        out = fa_serve.attention(q, k, v, precision="fp8", backend="triton")
        assert out.shape == q.shape
        assert not out.any()


@pytest.mark.parametrize(("block_m", "block_n", "masks_all"), [(16, 32, False), (128, 128, True)], ids=str)
def test_any_tile_gives_nearly_the_same(block_m: int, block_n: int, masks_all: bool) -> None:
    q, k, v = make_qkv(1, 40, 300, 1, 1, 64, dtype=torch.float16)
    options = {"softmax_scale": 0.2, "window_size": (37, 0), "softcap": 0.0, "sinks": None, "out": None, "return_lse": True}
    expected, expected_lse = run_plan(plan_forward, q, k, v, precision="fp8", **options)
    tiles = TileConfig(block_m, block_n, num_warps=4, num_stages=1, masks_all=masks_all)
    out, lse = run_plan(plan_forward, q, k, v, tiles=tiles, precision="fp8", **options)
    assert (out - expected).norm() <= 0.03 * expected.norm(), "P is rounded beside another maximum"
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
