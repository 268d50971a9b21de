"""The tools for tests of backends: inputs, a paged cache with poisoned memory, and the tolerance rule."""

from __future__ import annotations

import pytest
import torch

from fa_serve.api import attention
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)


def test_inputs_have_the_shapes_and_share_their_values() -> None:
    q, k, v = make_qkv(2, 3, 5, 4, 2, 8, 6, seed=1)
    assert (q.shape, k.shape, v.shape) == ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6))
    half, _, _ = make_qkv(2, 3, 5, 4, 2, 8, 6, seed=1, dtype=torch.float16)
    assert torch.equal(half, q.half())
    assert cu_seqlens([3, 0, 5]).tolist() == [0, 3, 3, 8]


def test_a_paged_cache_holds_the_sequences_and_poison_elsewhere() -> None:
    lengths = (5, 1, 8)
    keys = [torch.randn(n, 2, 4) for n in lengths]
    values = [torch.randn(n, 2, 3) for n in lengths]
    k_cache, v_cache, table, seqused = make_paged(keys, values, 4, spare_pages=2)
    assert seqused.tolist() == list(lengths)
    assert k_cache.shape == (2 + 1 + 2 + 2, 4, 2, 4)
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        pages = table[row, : -(-len(k) // 4)].long()
        assert torch.equal(k_cache[pages].flatten(0, 1)[: len(k)], k)
        assert torch.equal(v_cache[pages].flatten(0, 1)[: len(v)], v)
    assert int(k_cache.isfinite().sum()) == sum(k.numel() for k in keys)
    assert int(table[1, 1]) >= len(k_cache), "an entry past the last page points outside the cache"


@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_eager_attention_is_the_equation(options) -> None:
    q, k, v = make_qkv(2, 6, 9, 4, 2, 8)
    expected = attention(q, k, v, softmax_scale=0.3, backend="reference", **options)
    torch.testing.assert_close(eager_attention(q, k, v, softmax_scale=0.3, **options), expected, rtol=1e-5, atol=1e-5)


def test_the_tolerance_follows_the_eager_error() -> None:
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64)
    eager = torch.tensor([1.001, -2.0])
    assert_matches_reference(torch.tensor([1.0019, -2.0]), exact, eager)
    with pytest.raises(AssertionError, match="allowed"):
        assert_matches_reference(torch.tensor([1.0021, -2.0]), exact, eager)
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_matches_reference(torch.tensor([1.0, float("nan")]), exact, eager)
    with pytest.raises(AssertionError, match="shape"):
        assert_matches_reference(torch.zeros(3), exact, eager)


def test_a_log_sum_exp_has_the_same_infinities() -> None:
    exact = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    assert_lse_matches(torch.tensor([1.001, float("-inf")]), exact)
    with pytest.raises(AssertionError, match="other rows"):
        assert_lse_matches(torch.tensor([1.0, 0.0]), exact)
    with pytest.raises(AssertionError, match=r"allowed 2\.000e-03"):
        assert_lse_matches(torch.tensor([1.01, float("-inf")]), exact)
    assert_lse_matches(torch.tensor([1.01, float("-inf")]), exact, softcap=20.0)
