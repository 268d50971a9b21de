"""flash_attn_with_kvcache of both interfaces against an oracle that works sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from cache_checks import (
    CAPACITY,
    DIM,
    GRID,
    HEADS,
    KV_HEADS,
    LENGTHS,
    OTHERS,
    Case,
    cached_attention,
    check,
    draw,
    rotary_table,
)

from fa_serve import ParameterError
from fa_serve.flash_attn import cached_attention as module
from fa_serve.flash_attn import flash_attn_with_kvcache, interface
from fa_serve.testing import cu_seqlens


@pytest.mark.parametrize("case", GRID[::7] + OTHERS, ids=repr)
@pytest.mark.parametrize("fa3", [False, True], ids=["fa2", "fa3"])
def test_matches_the_oracle(case: Case, fa3: bool) -> None:
    check(case, fa3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_rotary_seqlens", [False, True])
def test_packed_queries_and_packed_new_keys(causal: bool, has_rotary_seqlens: bool) -> None:
    lengths_q = [2, 1, 3]
    lengths_new = [1, 4, 0]
    q = draw(sum(lengths_q), HEADS, DIM, seed=1)
    k, v = (draw(sum(lengths_new), KV_HEADS, DIM, seed=seed) for seed in (6, 7))
    k_cache, v_cache = (draw(3, CAPACITY, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    rotary = rotary_table()
    starts = [7, 1, 2] if has_rotary_seqlens else None
    oracle = cached_attention(
        list(q.split(lengths_q)),
        [x[:length] for x, length in zip(k_cache, LENGTHS, strict=True)],
        [x[:length] for x, length in zip(v_cache, LENGTHS, strict=True)],
        list(k.split(lengths_new)),
        list(v.split(lengths_new)),
        rotary=rotary,
        interleaved=False,
        rotary_starts=starts,
        causal=causal,
    )
    out, lse = interface.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary[0],
        rotary_sin=rotary[1],
        rotary_interleaved=False,
        rotary_seqlens=None if starts is None else torch.tensor(starts, dtype=torch.int32),
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        cu_seqlens_q=cu_seqlens(lengths_q),
        cu_seqlens_k_new=cu_seqlens(lengths_new),
        max_seqlen_q=3,
        causal=causal,
        return_softmax_lse=True,
    )
    torch.testing.assert_close(out, torch.cat(oracle.outs).float(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, torch.cat(oracle.lses, dim=1).float(), rtol=1e-5, atol=2e-6)
    for b, keys in enumerate(oracle.k_rows):
        torch.testing.assert_close(k_cache[b, : len(keys)], keys.float())


def test_an_integer_and_a_full_cache() -> None:
    q = draw(3, 1, HEADS, DIM, seed=1)
    k_cache, v_cache = (draw(3, CAPACITY, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    full = flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(full, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=CAPACITY))
    oracle = cached_attention(list(q), [x[:5] for x in k_cache], [x[:5] for x in v_cache])
    five = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5)
    torch.testing.assert_close(five, torch.stack(oracle.outs).float(), rtol=1e-5, atol=2e-6)


def test_rows_behind_the_end_of_the_cache_are_not_written() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 4, KV_HEADS, DIM)
    new = torch.ones(2, 3, KV_HEADS, DIM)
    flash_attn_with_kvcache(
        torch.ones(2, 1, HEADS, DIM), k_cache, v_cache, new, new, cache_seqlens=torch.tensor([0, 2], dtype=torch.int32)
    )
    assert k_cache[:, :, 0, 0].tolist() == [[1, 1, 1, 0], [0, 0, 1, 1]]


def test_a_float8_cache() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 16, KV_HEADS, DIM).to(torch.float8_e4m3fn)
    descale = torch.tensor([0.5, 2.0])
    q = draw(2, 4, HEADS, DIM, seed=1)
    new = draw(2, 4, KV_HEADS, DIM, seed=2)
    words = {"cache_seqlens": 0, "causal": True}
    expanded = descale.expand(2, KV_HEADS)
    out = interface.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, k_descale=expanded, v_descale=descale, **words)
    keys = k_cache.float() * descale[:, None]
    exact = flash_attn_with_kvcache(q, keys, v_cache.float() * descale[:, None], cache_seqlens=4, causal=True)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=2e-6)
    with pytest.raises(ParameterError, match="k_descale must have the shape"):
        interface.flash_attn_with_kvcache(q, k_cache, v_cache, k_descale=torch.ones(2, KV_HEADS), v_descale=descale, **words)


def test_no_gradients_are_asked_for() -> None:
    q = draw(1, 1, HEADS, DIM, seed=1).requires_grad_()
    k_cache, v_cache = (draw(1, 8, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    assert not flash_attn_with_kvcache(q, k_cache, v_cache).requires_grad


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"k": 1}, "v"),
        ({"k": 1, "v": 1}, "cache_seqlens"),
        ({"rotary_cos": 2, "rotary_sin": 2}, "rotary_cos"),
    ],
)
def test_arguments_that_belong_together(words: dict[str, int], field: str) -> None:
    tensors = {
        1: torch.ones(1, 1, KV_HEADS, DIM),
        2: torch.ones(8, 4),
    }
    q = torch.ones(1, 1, HEADS, DIM)
    cache = torch.ones(1, 8, KV_HEADS, DIM)
    with pytest.raises(ParameterError) as caught:
        flash_attn_with_kvcache(q, cache, cache, **{name: tensors[number] for name, number in words.items()})
    assert caught.value.field == field


def test_packed_queries_need_their_greatest_length() -> None:
    cache = torch.ones(1, 8, KV_HEADS, DIM)
    with pytest.raises(ParameterError) as caught:
        interface.flash_attn_with_kvcache(torch.ones(2, HEADS, DIM), cache, cache, cu_seqlens_q=cu_seqlens([2]))
    assert caught.value.field == "max_seqlen_q"


def test_leftpad_of_caches_with_different_strides_is_refused() -> None:
    q = torch.ones(1, 1, HEADS, DIM)
    cache = torch.ones(2, 8, KV_HEADS, DIM)
    odd = torch.ones(2, 9, KV_HEADS, DIM)[:, :8]
    with pytest.raises(ParameterError, match="cache_leftpad"):
        flash_attn_with_kvcache(q, cache, odd, cache_leftpad=torch.ones(1, dtype=torch.int32))


def test_starts_are_kept_and_bounded() -> None:
    module._STARTS.clear()
    first = module.even_starts(3, 2, torch.device("cpu"))
    assert first.tolist() == [0, 2, 4, 6]
    assert module.even_starts(3, 2, torch.device("cpu")) is first
    for batch in range(module.MAX_STARTS + 5):
        module.even_starts(batch, 1, torch.device("cpu"))
    assert len(module._STARTS) <= module.MAX_STARTS
