"""FlashAttention-3's functions: used rows, packed inputs, combining, refusals. Its KV cache is in test_cached_attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_serve import ParameterError
from fa_serve.backends.reference import attention_reference
from fa_serve.flash_attn import interface as fa3
from fa_serve.testing import cu_seqlens, make_qkv


def test_dense_and_hints() -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16, 8)
    exact, lse = attention_reference(q.double(), k.double(), v.double(), softmax_scale=0.25, window_size=(-1, 0))
    out = fa3.flash_attn_func(q, k, v, causal=True, num_splits=3, pack_gqa=True, sm_margin=8)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=2e-6)
    found = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(found[1], lse.float(), rtol=1e-5, atol=2e-6)
    assert len(found) == 2


def test_packed_heads() -> None:
    q, k, v = make_qkv(2, 5, 5, 4, 2, 16)
    out = fa3.flash_attn_func(q, k, v)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], dim=2), num_heads_q=4), out)
    square = torch.stack([q, q, q], dim=2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(square), fa3.flash_attn_func(q, q, q))
    with pytest.raises(ParameterError) as caught:
        fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], dim=2))
    assert caught.value.field == "num_heads_q"


LENGTHS_Q = [4, 0, 6, 3]
LENGTHS_K = [5, 3, 8, 4]
USED_Q = [2, 0, 6, 0]
USED_K = [5, 1, 3, 0]


def packed(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q (13, 4, 16), k and v (20, 2, 16), and NaN in the keys that are not used."""
    q = make_qkv(1, sum(LENGTHS_Q), 1, 4, 2, 16, seed=seed)[0][0]
    _, k, v = (x[0] for x in make_qkv(1, 1, sum(LENGTHS_K), 4, 2, 16, seed=seed + 1))
    return q, k, v


@pytest.mark.parametrize("has_q", [False, True])
@pytest.mark.parametrize("has_k", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_used_rows(has_q: bool, has_k: bool, causal: bool) -> None:
    q, k, v = packed()
    used_q = USED_Q if has_q else LENGTHS_Q
    used_k = USED_K if has_k else LENGTHS_K
    poisoned = k.clone()
    for row, length, used in zip(poisoned.split(LENGTHS_K), LENGTHS_K, used_k, strict=True):
        row[used:length] = float("nan")
    found, found_lse = fa3.flash_attn_varlen_func(
        q,
        poisoned,
        v,
        cu_seqlens(LENGTHS_Q),
        cu_seqlens(LENGTHS_K),
        6,
        8,
        seqused_q=torch.tensor(used_q, dtype=torch.int32) if has_q else None,
        seqused_k=torch.tensor(used_k, dtype=torch.int32) if has_k else None,
        causal=causal,
        return_attn_probs=True,
    )
    start_q = start_k = 0
    for length_q, length_k, rows, keys in zip(LENGTHS_Q, LENGTHS_K, used_q, used_k, strict=True):
        exact, lse = attention_reference(
            q[None, start_q : start_q + rows].double(),
            k[None, start_k : start_k + keys].double(),
            v[None, start_k : start_k + keys].double(),
            softmax_scale=0.25,
            window_size=(-1, 0 if causal else -1),
        )
        at = slice(start_q, start_q + rows)
        torch.testing.assert_close(found[at], exact[0].float(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(found_lse[:, at], lse[0].float(), rtol=1e-5, atol=2e-6)
        rest = slice(start_q + rows, start_q + length_q)
        assert not found[rest].any()
        assert (found_lse[:, rest] == float("-inf")).all()
        start_q += length_q
        start_k += length_k


def test_gradients_of_used_rows() -> None:
    tensors = [x.double().requires_grad_() for x in packed()]
    ends = (cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K), 6, 8)
    used = [torch.tensor(lengths, dtype=torch.int32) for lengths in (USED_Q, USED_K)]
    out = fa3.flash_attn_varlen_func(*tensors, *ends, *used)
    gradients = torch.autograd.grad(out.sin().sum(), tensors)
    starts = [[0, 4, 4, 10], [0, 5, 8, 16]]
    exact = torch.zeros_like(out)
    for b, (rows, keys) in enumerate(zip(USED_Q, USED_K, strict=True)):
        if rows and keys:
            q, k, v = (x[None, starts[i > 0][b] : starts[i > 0][b] + (keys if i else rows)] for i, x in enumerate(tensors))
            at = torch.arange(starts[0][b], starts[0][b] + rows)
            exact = exact.index_put((at,), attention_reference(q, k, v, softmax_scale=0.25)[0][0])
    for found, expected in zip(gradients, torch.autograd.grad(exact.sin().sum(), tensors), strict=True):
        torch.testing.assert_close(found, expected)


def test_combine_merges_parts_of_the_keys() -> None:
    q, k, v = make_qkv(2, 5, 12, 4, 4, 16)
    parts = [fa3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True) for a, b in ((0, 3), (3, 9), (9, 12))]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    whole, whole_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2), rtol=1e-5, atol=2e-6)
    written = torch.empty_like(out, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(outs, lses, out=written, out_dtype=torch.bfloat16)[0] is written
    torch.testing.assert_close(written.float(), out, rtol=1e-2, atol=1e-2)
    empty, _ = fa3.flash_attn_combine(outs, torch.full_like(lses, float("-inf")))
    assert not empty.any()
    with pytest.raises(ParameterError, match=r"the shape of out_partial without head_dim, \(3, 2, 5, 4\), got"):
        fa3.flash_attn_combine(outs, lses.transpose(2, 3))  # as attention itself returns it


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_a_causal_call_has_chunks(window: tuple[int, int]) -> None:
    """The query at position p sees the keys p // 3 * 3 to p, also in packed calls and behind a cache."""
    q, k, v = make_qkv(1, 5, 8, 4, 2, 16)
    chunk: dict[str, Any] = {"causal": True, "attention_chunk": 3, "window_size": window}
    position = torch.arange(3, 8)[:, None]
    key = torch.arange(8)
    mask = ((position // 3 == key // 3) & (key <= position))[None, None]
    wanted, wanted_lse = attention_reference(q, k, v, softmax_scale=0.25, mask=mask)
    out, lse = fa3.flash_attn_func(q, k, v, **chunk, return_attn_probs=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-6)
    packed = fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens([5]), cu_seqlens([8]), 5, 8, **chunk)
    torch.testing.assert_close(packed, wanted[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(fa3.flash_attn_with_kvcache(q, k, v, **chunk), wanted, rtol=1e-5, atol=2e-6)
    qkv = torch.cat([k.repeat_interleave(2, 2), k, v], dim=2)
    rows = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4, **chunk)
    same = fa3.flash_attn_func(k.repeat_interleave(2, 2), k, v, **chunk)
    torch.testing.assert_close(rows, same)


def test_refusals_name_the_argument() -> None:
    q, k, v = make_qkv(1, 4, 4, 2, 2, 8)
    ends = cu_seqlens([4])
    for words, field in (
        ({"qv": q}, "qv"),
        ({"q_descale": torch.ones(1, 2)}, "q_descale"),
        ({"attention_chunk": 4}, "attention_chunk"),
        ({"attention_chunk": 4, "causal": True, "window_size": (2, 0)}, "attention_chunk"),
    ):
        calls = (
            lambda words=words: fa3.flash_attn_func(q, k, v, **words),
            lambda words=words: fa3.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4, **words),
            lambda words=words: fa3.flash_attn_with_kvcache(q, k, v, **words),
        )
        for call in calls:
            with pytest.raises(ParameterError) as caught:
                call()
            assert (caught.value.field, caught.value.code) == (field, "unsupported")
    with pytest.raises(ParameterError, match="k_descale"):
        fa3.flash_attn_func(q, k, v, k_descale=torch.ones(1, 2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_queries_are_refused_before_anything_is_computed(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in make_qkv(1, 4, 4, 2, 2, 16))
    ends = cu_seqlens([4])
    angles = torch.zeros(8, 8)
    calls = (
        lambda: fa3.flash_attn_func(q, k, v),
        lambda: fa3.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4),
        lambda: fa3.flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=ends[:1], rotary_cos=angles, rotary_sin=angles),
    )
    for call in calls:
        with pytest.raises(ParameterError, match="the kernels support float8 only in a KV cache") as caught:
            call()
        assert (caught.value.field, caught.value.code) == ("q", "unsupported")


def test_scheduler_metadata_is_nothing() -> None:
    assert fa3.get_scheduler_metadata(1, 1, 8, 2, 2, 8, torch.ones(1)) is None
