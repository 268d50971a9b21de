"""The rules that users test their backends with: they accept what plain PyTorch computes and catch what is worse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fa_serve.backends.plan import AttentionOptions, AttentionTensors, Run
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
    run_plan,
)

EXACT = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64)
EAGER = EXACT.to(torch.float16)
EPS = torch.finfo(torch.float16).eps


def off(error: float) -> Tensor:
    """The exact values with an error in the first one. float16 near 1 has steps of EPS, so multiples of EPS are exact."""
    return (EXACT + torch.tensor([error, 0.0, 0.0])).to(torch.float16)


def test_the_bound_is_two_roundings_of_the_largest_value() -> None:
    """Here eager is exact, and the largest value is 4."""
    assert_matches_reference(off(8 * EPS), EXACT, EAGER)
    with pytest.raises(AssertionError, match=r"out: error 8.789e-03, allowed 7.812e-03"):
        assert_matches_reference(off(9 * EPS), EXACT, EAGER)


def test_an_inexact_eager_result_widens_the_bound() -> None:
    eager = off(-4 * EPS)
    assert_matches_reference(off(16 * EPS), EXACT, eager)
    with pytest.raises(AssertionError, match="error"):
        assert_matches_reference(off(17 * EPS), EXACT, eager)


def test_the_type_of_the_result_decides_how_exact_it_must_be() -> None:
    """The error of the test above is too large for a result in float32."""
    with pytest.raises(AssertionError, match="error"):
        assert_matches_reference(off(8 * EPS).float(), EXACT, EXACT.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(AssertionError, match="grad: 1 values are not finite"):
        assert_matches_reference(off(value), EXACT, EAGER, "grad")


def test_a_result_of_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"out: shape \(1, 3\), expected \(3,\)"):
        assert_matches_reference(off(0.0)[None], EXACT, EAGER)
    assert_matches_reference(EAGER[:0], EXACT[:0], EAGER[:0])


def test_lse_is_compared_where_it_is_finite() -> None:
    exact = torch.tensor([3.0, -math.inf, 10.0], dtype=torch.float64)
    assert_lse_matches(torch.tensor([3.0015, -math.inf, 9.9985]), exact)
    with pytest.raises(AssertionError, match="lse: error"):
        assert_lse_matches(torch.tensor([3.0025, -math.inf, 10.0]), exact)
    with pytest.raises(AssertionError, match="-inf at other rows"):
        assert_lse_matches(torch.tensor([3.0, -1e30, 10.0]), exact)
    assert_lse_matches(torch.tensor([-math.inf]), torch.tensor([-math.inf]))


def test_the_rule_catches_a_window_that_is_wrong_by_one() -> None:
    q, k, v = make_qkv(1, 40, 40, 4, 2, 32, dtype=torch.bfloat16)
    options = {"softmax_scale": 32**-0.5, "window_size": (8, 0)}
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    eager = eager_attention(q, k, v, **options)
    assert_matches_reference(eager, exact, eager)
    wrong, wrong_lse = attention_reference(q, k, v, **(options | {"window_size": (9, 0)}))
    with pytest.raises(AssertionError, match="out: error"):
        assert_matches_reference(wrong.bfloat16(), exact, eager)
    with pytest.raises(AssertionError, match="lse: error"):
        assert_lse_matches(wrong_lse.float(), exact_lse)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (5, 0)},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
        {"mask": (torch.arange(13) % 3 > 0)[None, None, None]},
        {"mask": torch.linspace(-2, 2, 13, dtype=torch.float64)[None, None, None]},
    ],
    ids=["plain", "window", "softcap", "sinks", "mask-bool", "mask-float"],
)
def test_eager_attention_is_the_equation(options: dict) -> None:
    """In float64 it is the reference."""
    q, k, v = make_qkv(2, 7, 13, 4, 2, 16, 8, dtype=torch.float64)
    expected, _ = attention_reference(q, k, v, softmax_scale=0.3, **options)
    torch.testing.assert_close(eager_attention(q, k, v, softmax_scale=0.3, **options), expected, rtol=1e-12, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = make_qkv(1, 5, 3, 2, 2, 8)
    out = eager_attention(q, k, v, softmax_scale=0.3, window_size=(-1, 0))
    assert not out[:, :2].any(), "two queries come before the first key"
    assert out[:, 2:].all()


def test_inputs_have_the_same_values_in_every_dtype() -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16, 8, seed=3)
    assert [tuple(x.shape) for x in (q, k, v)] == [(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)]
    halves = make_qkv(2, 5, 7, 4, 2, 16, 8, dtype=torch.float16, seed=3)
    for x, half in zip((q, k, v), halves, strict=True):
        assert torch.equal(x.half(), half)
    assert not torch.equal(make_qkv(2, 5, 7, 4, 2, 16, 8, seed=4)[0], q)


def test_cu_seqlens() -> None:
    starts = cu_seqlens([3, 0, 5])
    assert starts.tolist() == [0, 3, 3, 8]
    assert starts.dtype == torch.int32


def test_a_cache_holds_each_sequence_and_nothing_else() -> None:
    lengths = [5, 0, 9]
    keys = [torch.randn(n, 2, 16) for n in lengths]
    values = [torch.randn(n, 2, 8) for n in lengths]
    k_cache, v_cache, table, used = make_paged(keys, values, 4, spare_pages=2)
    assert (tuple(k_cache.shape), tuple(v_cache.shape)) == ((2 + 0 + 3 + 2, 4, 2, 16), (7, 4, 2, 8))
    assert used.tolist() == lengths
    taken = [page for row, n in zip(table.tolist(), lengths, strict=True) for page in row[: -(-n // 4)]]
    assert len(set(taken)) == len(taken) == 5
    for cache, parts in ((k_cache, keys), (v_cache, values)):
        for row, part in zip(table, parts, strict=True):
            pages = row[: -(-len(part) // 4)].long()
            assert torch.equal(cache[pages].flatten(0, 1)[: len(part)], part)
        assert int(torch.isfinite(cache).all(-1).all(-1).sum()) == sum(lengths), "every other slot is NaN"
    assert (table[0, 2:] >= 2**20).all(), "entries that no sequence uses are outside of the cache"


def test_run_plan_gives_each_argument_its_place() -> None:
    """A maker of plans gets the tensors, the options and the tiles, and its plan gets the same tensors."""
    q, k, v = make_qkv(1, 5, 7, 4, 2, 16)
    seen = []

    def make(tensors: AttentionTensors, options: AttentionOptions, tiles: str = "default") -> Run:
        seen.append((tensors, options, tiles))
        return lambda again: (again.q * 2, None) if again is tensors else pytest.fail("other tensors")

    shared = {"softmax_scale": 0.3, "window_size": (-1, 0), "softcap": 0.0, "return_lse": True}
    used = torch.tensor([7])
    out, lse = run_plan(make, q, k, v, seqused_k=used, tiles="small", skip_q=4, **shared)
    assert torch.equal(out, q * 2)
    assert lse is None
    run_plan(make, q, k, v, cu_seqlens_k=used, max_seqlen_q=3, **shared)
    (first, options, tiles), (second, longer, other_tiles) = seen
    assert (tiles, other_tiles) == ("small", "default")
    assert first.q is q
    assert first.keys is second.keys is used
    assert first.out is None
    assert options == AttentionOptions(0.3, (-1, 0), 0.0, 5, 7, True, skip_q=4)
    assert longer == AttentionOptions(0.3, (-1, 0), 0.0, 3, 7, True)
