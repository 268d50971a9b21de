"""The block-sparse kernel in Triton's interpreter against the float64 oracle, with lists of every kind in each layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_sparse_cases import BASE, CASES, DECODE, SparseCase, check_sparse, make_lists
from sampled_cases import each_nth

import fa_serve
from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.backends.triton.tiles import SparseTiles
from fa_serve.testing import make_qkv, run_plan


@pytest.mark.parametrize("case", each_nth(3, CASES), ids=str)
def test_cases(case: SparseCase) -> None:
    check_sparse(case, "triton", torch.float32)


def test_float16() -> None:
    check_sparse(replace(BASE, causal=True, bits=True), "triton", torch.float16)


@pytest.mark.parametrize("tiles", [SparseTiles(16, 32, 4, 1), SparseTiles(32, 16, 4, 1, 3), SparseTiles(64, 64, 4, 1)], ids=str)
def test_any_tile_gives_the_same(tiles: SparseTiles) -> None:
    case = replace(BASE, lengths_q=(90,), lengths_k=(130,), bits=True, causal=True, list_heads="kv")
    q, k, v = make_qkv(1, 90, 130, 4, 2, 32)
    options = {"softmax_scale": 0.2, "window_size": (60, 0), "softcap": 0.0, "return_lse": True, "blocks": make_lists(case)[0]}
    expected, expected_lse = run_plan(plan_block_sparse, q, k, v, **options)
    out, lse = run_plan(plan_block_sparse, q, k, v, tiles=tiles, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [64, 128])
def test_other_blocks_are_not_read(keys: int) -> None:
    """NaN in every block that no list has leaves no trace."""
    q, k, v = make_qkv(1, 40, 5 * keys, 4, 2, 32)
    keep = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    keep[..., [1, 4]] = True
    lists = fa_serve.BlockLists.from_blocks(keep, (64, keys))
    expected = fa_serve.attention(q, k, v, block_mask=lists, backend="triton")
    for x in (k, v):
        for block in (0, 2, 3):
            x[:, block * keys : (block + 1) * keys] = float("nan")
    assert torch.equal(fa_serve.attention(q, k, v, block_mask=lists, backend="triton"), expected)
    assert bool(expected.isfinite().all())


def test_listed_keys_that_no_query_sees_are_not_read() -> None:
    """Their page may belong to another sequence by now: NaN before the window leaves no trace."""
    q, k, v = make_qkv(1, 40, 320, 4, 2, 32)
    lists = fa_serve.BlockLists.from_blocks(torch.ones(1, 1, 1, 5, dtype=torch.bool), (64, 64))
    options = {"window_size": (50, 0), "block_mask": lists, "backend": "triton"}
    expected = fa_serve.attention(q, k, v, **options)
    for x in (k, v):
        x[:, :230] = float("nan")
    assert torch.equal(fa_serve.attention(q, k, v, **options), expected)
    assert bool(expected.isfinite().all())


def test_strided_inputs_lists_and_out() -> None:
    """Head-first storage, lists that are a slice, and a slice of a wider buffer as `out`."""
    lists, _ = make_lists(replace(BASE, list_heads="kv", bits=True))
    q, k, v = make_qkv(2, 150, 210, 4, 2, 32)
    plain = fa_serve.attention(q, k, v, block_mask=lists, backend="triton")
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    sliced = lists._replace(kv_indices=torch.cat([lists.kv_indices] * 2, dim=3)[..., : lists.kv_indices.shape[3]])
    wide = torch.full((2, 150, 4, 48), float("nan"))
    out = fa_serve.attention(q, k, v, block_mask=sliced, backend="triton", out=wide[..., :32])
    assert out.data_ptr() == wide.data_ptr()
    assert torch.equal(out, plain)
    assert bool(wide[..., 32:].isnan().all())


@pytest.mark.slow
def test_splits_of_decoding_are_merged() -> None:
    """Each number of splits, also more than the lists have tiles."""
    for num_splits in (1, 2, 9):
        check_sparse(replace(DECODE, num_splits=num_splits, kept=0.6), "triton", torch.float32)
