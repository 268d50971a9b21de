"""FlashAttention-2's functions against the reference: layouts, results, windows, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opaque_backend import opaque_backend
from torch import Tensor

import fa_serve.flash_attn as fa2
from fa_serve import ParameterError
from fa_serve.backends.reference import attention_reference
from fa_serve.flash_attn import interface as fa3
from fa_serve.launching.plans import PLANS
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

SCALE = 0.3
CALLS = [
    pytest.param({}, id="plain"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"window_size": [3, -5]}, id="left"),
    pytest.param({"window_size": torch.tensor([2, 1])}, id="window-in-a-tensor"),
    pytest.param({"causal": True, "window_size": (4, 4)}, id="causal-window"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"softcap": -1.0, "softmax_scale": None}, id="softcap-off"),
]


def reference(q: Tensor, k: Tensor, v: Tensor, words: dict[str, Any]) -> tuple[Tensor, Tensor]:
    left, right = (int(n) for n in words.get("window_size", (-1, -1)))
    out, lse = attention_reference(
        q.double(),
        k.double(),
        v.double(),
        softmax_scale=words.get("softmax_scale", SCALE) or q.shape[-1] ** -0.5,
        window_size=(left, 0 if words.get("causal") else max(right, -1)),
        softcap=max(words.get("softcap", 0.0), 0.0),
    )
    return out.float(), lse.float()


@pytest.mark.parametrize("words", CALLS)
def test_dense(words: dict[str, Any]) -> None:
    q, k, v = make_qkv(2, 7, 9, 4, 2, 16)
    out, lse = reference(q, k, v, words)
    given = {"softmax_scale": SCALE} | words
    torch.testing.assert_close(fa2.flash_attn_func(q, k, v, **given), out, rtol=1e-5, atol=2e-6)
    found = fa2.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[1], lse, rtol=1e-5, atol=2e-6)
    assert found[2].shape == (0,)
    assert found[2].dtype == q.dtype
    kv = torch.stack([k, v], dim=2)
    torch.testing.assert_close(fa2.flash_attn_kvpacked_func(q, kv, **given), out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("words", CALLS)
def test_packed(words: dict[str, Any]) -> None:
    lengths_q = [3, 0, 7]
    lengths_k = [5, 2, 9]
    q, _, _ = (x[0] for x in make_qkv(1, 10, 1, 4, 2, 16))
    _, k, v = (x[0] for x in make_qkv(1, 1, 16, 4, 2, 16, seed=1))
    pieces = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    exact = [reference(a[None], b[None], c[None], words) for a, b, c in pieces if len(a)]
    out = torch.cat([o[0] for o, _ in exact])
    lse = torch.cat([x[0] for _, x in exact], dim=1)
    given = {"softmax_scale": SCALE} | words
    ends = (cu_seqlens(lengths_q), cu_seqlens(lengths_k), 7, 9)
    found = fa2.flash_attn_varlen_func(q, k, v, *ends, return_attn_probs=True, **given)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[1], lse, rtol=1e-5, atol=2e-6)
    assert found[1].shape == (4, 10)
    kv = torch.stack([k, v], dim=1)
    torch.testing.assert_close(fa2.flash_attn_varlen_kvpacked_func(q, kv, *ends, **given), out, rtol=1e-5, atol=2e-6)
    k_cache, v_cache, table, _ = make_paged(k.split(lengths_k), v.split(lengths_k), 4)
    pages = fa2.flash_attn_varlen_func(q.requires_grad_(), k_cache, v_cache, *ends, block_table=table, **given)
    assert not pages.requires_grad
    torch.testing.assert_close(pages, out, rtol=1e-5, atol=2e-6)


def test_one_tensor_of_queries_keys_and_values() -> None:
    q, k, v = make_qkv(2, 6, 6, 4, 4, 16)
    qkv = torch.stack([q, k, v], dim=2)
    out, lse = reference(q, k, v, {"causal": True})
    found = fa2.flash_attn_qkvpacked_func(qkv, softmax_scale=SCALE, causal=True, return_attn_probs=True)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[1], lse, rtol=1e-5, atol=2e-6)
    packed = fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_seqlens([6, 6]), 6, softmax_scale=SCALE, causal=True)
    torch.testing.assert_close(packed, out.flatten(0, 1), rtol=1e-5, atol=2e-6)


def test_a_length_in_a_tensor() -> None:
    q, k, v = (x[0] for x in make_qkv(1, 6, 6, 4, 4, 16))
    ends = cu_seqlens([2, 4])
    found = fa2.flash_attn_varlen_func(q, k, v, ends, ends, torch.tensor(4), torch.tensor(4))
    assert torch.equal(found, fa2.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4))


def test_gradients() -> None:
    q, k, v = make_qkv(2, 5, 5, 2, 2, 8, dtype=torch.float64)
    qkv = torch.stack([q, k, v], dim=2).requires_grad_()
    ends = cu_seqlens([5, 5])
    weights = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    exact, _ = attention_reference(*qkv.unbind(2), softmax_scale=8**-0.5, window_size=(-1, 0))
    expected = torch.autograd.grad((exact * weights).sum(), qkv)[0]
    for out in (
        fa2.flash_attn_qkvpacked_func(qkv, causal=True),
        fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends, 5, causal=True).view(q.shape),
        fa2.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)[0],
    ):
        torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), qkv)[0], expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_repeat(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(False)
    q, k, v = make_qkv(2, 5, 5, 2, 2, 8)
    qkv = torch.stack([q, k, v], dim=2).requires_grad_()
    heads = qkv.flatten(2, 3)
    ends = cu_seqlens([5, 5])
    rows = qkv.flatten(0, 1)
    with opaque_backend() as backend:
        for out in (
            fa2.flash_attn_func(*qkv.unbind(2), deterministic=deterministic),
            fa2.flash_attn_qkvpacked_func(qkv, deterministic=deterministic),
            fa2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], deterministic=deterministic),
            fa2.flash_attn_varlen_func(*rows.unbind(1), ends, ends, 5, 5, deterministic=deterministic),
            fa2.flash_attn_varlen_qkvpacked_func(rows, ends, 5, deterministic=deterministic),
            fa2.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], ends, ends, 5, 5, deterministic=deterministic),
            fa3.flash_attn_func(*qkv.unbind(2), deterministic=deterministic),
            fa3.flash_attn_qkvpacked_func(heads, num_heads_q=2, deterministic=deterministic),
            fa3.flash_attn_varlen_func(*rows.unbind(1), ends, ends, 5, 5, deterministic=deterministic),
        ):
            backend.planned.clear()
            PLANS.clear()
            out.sum().backward()
            assert [spec.deterministic for spec, _ in backend.planned] == [deterministic]


def test_dropout_is_refused_by_name() -> None:
    q, k, v = make_qkv(1, 4, 4, 2, 2, 8)
    ends = cu_seqlens([4])
    for call in (
        lambda: fa2.flash_attn_func(q, k, v, 0.1),
        lambda: fa2.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4, dropout_p=0.1),
    ):
        with pytest.raises(ParameterError) as caught:
            call()
        assert (caught.value.field, caught.value.code, caught.value.value) == ("dropout_p", "unsupported", 0.1)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi(shape: tuple[int, ...]) -> None:
    q, k, v = make_qkv(2, 5, 8, 4, 2, 16)
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(4))
    distance = (torch.arange(5)[:, None] + 3 - torch.arange(8)).abs()
    bias = -slopes.view(-1, 4, 1, 1) * distance
    exact, _ = attention_reference(q, k, v, softmax_scale=0.25, window_size=(-1, 0), mask=bias)
    ends = (cu_seqlens([5, 5]), cu_seqlens([8, 8]), 5, 8)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    words = {"causal": True, "alibi_slopes": slopes}
    for found in (
        fa2.flash_attn_func(q, k, v, **words),
        fa2.flash_attn_varlen_func(*rows, *ends, **words).view(q.shape),
        fa2.flash_attn_with_kvcache(q, k, v, **words),
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6)


def test_the_lse_of_alibi_differs_from_that_of_flash_attn_as_documented() -> None:
    """In causal calls flash-attn adds slope * j to the score of key j (csrc/flash_attn/src/alibi.h), for every query."""
    q, k, v = make_qkv(2, 5, 8, 4, 2, 16)
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(4))
    _, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    bias = (slopes[:, None, None] * torch.arange(8)).expand(1, 4, 5, 8)
    _, theirs = attention_reference(q, k, v, softmax_scale=0.25, window_size=(-1, 0), mask=bias)
    torch.testing.assert_close(lse + slopes[:, None] * (torch.arange(5) + 8 - 5), theirs, rtol=1e-5, atol=2e-6)


def test_errors_of_the_api_name_the_argument() -> None:
    q, k, v = make_qkv(1, 4, 4, 3, 2, 8)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads"):
        fa2.flash_attn_func(q, k, v)
