"""flash_attn_with_kvcache of both interfaces against an oracle that works sequence by sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cache_oracle import cached_attention
from torch import Tensor

from fa_serve import ParameterError
from fa_serve.flash_attn import cached_attention as module
from fa_serve.flash_attn import flash_attn_with_kvcache, interface
from fa_serve.testing import cu_seqlens

HEADS = 4
KV_HEADS = 2
DIM = 16
ROTARY = 8
CAPACITY = 24
LENGTHS = [5, 0, 16]


@dataclass(frozen=True)
class Case:
    """One call: `page_size` 0 is a contiguous cache, `new` the number of new keys per sequence."""

    seqlen_q: int = 3
    new: int = 0
    page_size: int = 0
    rotary: bool = False
    interleaved: bool = True
    leftpad: bool = False
    rows: bool = False
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, rotary_dim / 2)."""
    angle = draw(CAPACITY + 8, ROTARY // 2, seed=9) * 3
    return angle.cos(), angle.sin()


def paged(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """A contiguous cache (batch, seqlen, heads, dim) as pages in random order, and its block table."""
    pages = cache.unflatten(1, (-1, page_size)).flatten(0, 1)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(3))
    shuffled = torch.empty_like(pages)
    shuffled[order] = pages
    return shuffled, order.view(len(cache), -1).to(torch.int32)


def contiguous(cache: Tensor, table: Tensor) -> Tensor:
    """Undo `paged`."""
    return cache[table.long()].flatten(1, 2)


GRID = [
    Case(seqlen_q, new, page_size, rotary, interleaved, leftpad, rows, causal)
    for seqlen_q, new, page_size, rotary, interleaved, leftpad, rows, causal in itertools.product(
        (1, 3), (0, 1, 3), (0, 4, 8), (False, True), (False, True), (False, True), (False, True), (False, True)
    )
    if not (rotary and not new) and not (rows and page_size) and (rotary or interleaved)
]
OTHERS = [
    Case(window_size=(4, 0)),
    Case(new=3, rotary=True, causal=False, window_size=(4, 2)),
    Case(new=2, rotary=True, interleaved=False, page_size=8, causal=False, window_size=(-1, 1)),
    Case(new=3, softcap=5.0, page_size=4),
    Case(new=1, seqlen_q=1, softcap=5.0, leftpad=True),
    Case(seqlen_q=20, new=8, causal=True),
]


@pytest.mark.parametrize("case", GRID[::7] + OTHERS, ids=repr)
@pytest.mark.parametrize("fa3", [False, True], ids=["fa2", "fa3"])
def test_matches_the_oracle(case: Case, fa3: bool) -> None:
    check(case, fa3)


def check(case: Case, fa3: bool) -> None:
    batch = len(LENGTHS)
    q = draw(batch, case.seqlen_q, HEADS, DIM, seed=1)
    rows = [3, 0, 4] if case.rows else list(range(batch))
    pads = [2, 0, 7] if case.leftpad else [0] * batch
    k_cache, v_cache = (draw(5, CAPACITY, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    if not case.rows:
        k_cache, v_cache = (x[:batch].clone() for x in (k_cache, v_cache))
    k, v = (draw(batch, case.new, KV_HEADS, DIM, seed=seed) if case.new else None for seed in (6, 7))
    rotary = table_of(q) if case.rotary else None
    oracle = cached_attention(
        list(q),
        [k_cache[row, :length] for row, length in zip(rows, LENGTHS, strict=True)],
        [v_cache[row, :length] for row, length in zip(rows, LENGTHS, strict=True)],
        None if k is None else list(k),
        None if v is None else list(v),
        rotary=rotary,
        interleaved=case.interleaved,
        leftpad=pads,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
    )
    words: dict[str, Any] = {"causal": case.causal, "window_size": case.window_size, "softcap": case.softcap}
    words |= {"rotary_interleaved": case.interleaved, "return_softmax_lse": True}
    words |= {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    if case.leftpad:
        words["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if case.rows:
        words["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    if rotary is not None:
        words |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1]}
    given = (k_cache, v_cache)
    table = None
    if case.page_size:
        k_pages, table = paged(k_cache, case.page_size)
        given = (k_pages, paged(v_cache, case.page_size)[0])
        words["page_table" if fa3 else "block_table"] = table
    before = [x.clone() for x in given]
    function = interface.flash_attn_with_kvcache if fa3 else flash_attn_with_kvcache
    out, lse = function(q, *given, k, v, **words)
    assert out.shape == q.shape
    assert lse.shape == (batch, HEADS, case.seqlen_q)
    torch.testing.assert_close(out, torch.stack(oracle.outs).float(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, torch.stack(oracle.lses).float(), rtol=1e-5, atol=2e-6)
    for cache, old, expected in zip(given, before, (oracle.k_rows, oracle.v_rows), strict=True):
        now, then = (cache, old) if table is None else (contiguous(cache, table), contiguous(old, table))
        for row, length, keys in zip(rows, LENGTHS, expected, strict=True):
            torch.testing.assert_close(now[row, : len(keys)], keys.float())
            assert torch.equal(now[row, length + case.new :], then[row, length + case.new :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_rotary_seqlens", [False, True])
def test_packed_queries_and_packed_new_keys(causal: bool, has_rotary_seqlens: bool) -> None:
    lengths_q = [2, 1, 3]
    lengths_new = [1, 4, 0]
    q = draw(sum(lengths_q), HEADS, DIM, seed=1)
    k, v = (draw(sum(lengths_new), KV_HEADS, DIM, seed=seed) for seed in (6, 7))
    k_cache, v_cache = (draw(3, CAPACITY, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    rotary = table_of(q)
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
    with pytest.raises(ParameterError, match="k_descale must be"):
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
        ({"block_table": 3, "cache_batch_idx": 4}, "cache_batch_idx"),
    ],
)
def test_arguments_that_belong_together(words: dict[str, int], field: str) -> None:
    tensors = {
        1: torch.ones(1, 1, KV_HEADS, DIM),
        2: torch.ones(8, 4),
        3: torch.zeros(1, 1, dtype=torch.int32),
        4: torch.zeros(1, dtype=torch.int32),
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
    first = module._even_starts(3, 2, torch.device("cpu"))
    assert first.tolist() == [0, 2, 4, 6]
    assert module._even_starts(3, 2, torch.device("cpu")) is first
    for batch in range(module.MAX_STARTS + 5):
        module._even_starts(batch, 1, torch.device("cpu"))
    assert len(module._STARTS) <= module.MAX_STARTS
