"""Lists of key blocks in the Hopper kernel: the cases of the portable kernel, long lists, equal bits, pages, and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_sparse_cases import BASE, CASES, PAGED, SparseCase, check_sparse

import fa_serve
from fa_serve.spec import FEW_QUERIES
from fa_serve.testing import make_qkv

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


def served(case: SparseCase) -> bool:
    whole_pages = case.layout != "paged" or case.page_size % 16 == 0
    many = max(case.lengths_q, default=0) > FEW_QUERIES and case.num_splits == 0
    return many and whole_pages and case.head_dim <= 256 and not (case.alibi or case.chunk or case.float8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if served(case)], ids=str)
def test_cases(case: SparseCase, dtype: torch.dtype) -> None:
    check_sparse(case, "hopper", dtype, "cuda")


@pytest.mark.parametrize("size", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_wide_heads_and_long_lists(head_dim: int, size: tuple[int, int]) -> None:
    """Many key blocks for each tile, so that every stage is used again, and more tiles than multiprocessors."""
    case = replace(
        BASE, lengths_q=(777,), lengths_k=(2100,), heads=32, kv_heads=8, head_dim=head_dim, block_size=size, bits=True
    )
    for list_heads in ("one", "kv", "q"):
        check_sparse(replace(case, list_heads=list_heads, causal=list_heads != "one"), "hopper", torch.bfloat16, "cuda")
    paged = replace(PAGED, head_dim=head_dim, lengths_q=(300, 17, 700), lengths_k=(2000, 70, 900), block_size=size, bits=True)
    check_sparse(paged, "hopper", torch.bfloat16, "cuda")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_qkv(2, 4000, 4000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")


def random_lists(seed: int) -> fa_serve.BlockLists:
    keep = torch.rand(2, 8, 32, 32, generator=torch.Generator().manual_seed(seed)) < 0.3
    return fa_serve.BlockLists.from_blocks(keep.cuda())


def test_equal_calls_have_equal_bits() -> None:
    """A number that is read before it is written, or after the stage has been used again, would show sooner or later."""
    q, k, v = inputs()
    lists = random_lists(0)
    first = fa_serve.attention(q, k, v, causal=True, block_mask=lists, backend="hopper")
    portable = fa_serve.attention(q, k, v, causal=True, block_mask=lists, backend="triton")
    assert (first.float() - portable.float()).abs().max() < 0.02  # type: ignore[union-attr]
    for _ in range(100):
        assert torch.equal(fa_serve.attention(q, k, v, causal=True, block_mask=lists, backend="hopper"), first)


def test_all_blocks_are_a_dense_call() -> None:
    q, k, v = inputs()
    lists = fa_serve.BlockLists.from_blocks(torch.ones(1, 1, 32, 32, dtype=torch.bool, device="cuda"))
    for causal in (False, True):
        sparse = fa_serve.attention(q, k, v, causal=causal, block_mask=lists, backend="hopper")
        dense = fa_serve.attention(q, k, v, causal=causal, backend="hopper")
        assert (sparse.float() - dense.float()).abs().max() < 0.01  # type: ignore[union-attr]


def test_lists_may_change_below_a_captured_graph() -> None:
    q, k, v = inputs()
    lists = random_lists(1)
    fa_serve.attention(q, k, v, block_mask=lists, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_serve.attention(q, k, v, block_mask=lists, backend="hopper")
    other = random_lists(2)
    lists.kv_num_blocks.copy_(other.kv_num_blocks)
    lists.kv_indices.copy_(other.kv_indices)
    graph.replay()
    assert torch.equal(out, fa_serve.attention(q, k, v, block_mask=other, backend="hopper"))
