"""Addresses in caches of 2^31 elements and more, in Triton's interpreter, which computes with the widths of the kernel's
numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter_bounds import checked_accesses
from large_caches import BOUND, KEYS, LargeCache, fill, large_caches, memory_on_disk
from torch import Tensor

import fa_serve
from fa_serve import BlockLists
from fa_serve.backends.reference import attention_reference
from fa_serve.backends.triton.decode.plan import plan_decode
from fa_serve.backends.triton.latent.plan import plan_latent
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.testing import make_qkv, run_plan

HEADS = 8
DIM = 64
CACHES = large_caches(HEADS, DIM)
WHOLE_TREE = partial(plan_tree, apart=False)
"""A program for each of the thousands of groups of keys would take minutes."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.iterdir():
        file.unlink()


def call(cache: LargeCache, folder: Path, queries: int, dim_v: int = DIM) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
    """q, k_cache, v_cache and the other arguments of a call, and the exact result."""
    memory = memory_on_disk(folder, cache.numel(HEADS, DIM), torch.float16)
    k_cache = cache.view(memory, HEADS, DIM)
    v_cache = k_cache[..., :dim_v]  # one file is enough
    used = min(KEYS, cache.length)
    q, k, _ = (x[0] for x in make_qkv(1, queries, used, HEADS, HEADS, DIM, dtype=torch.float16))
    table = fill(cache, k_cache, v_cache, k, k[..., :dim_v])
    window = (cache.window, 0)
    options = {
        "block_table": table,
        "seqused_k": torch.tensor([cache.length], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32),
        "max_seqlen_q": queries,
        "max_seqlen_k": cache.length,
        "softmax_scale": 0.2,
        "window_size": window,
    }
    exact, _ = attention_reference(*(x[None].double() for x in (q, k, k[..., :dim_v])), softmax_scale=0.2, window_size=window)
    return (q, k_cache, v_cache), options, exact[0]


def check(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact, rtol=2e-2, atol=2e-3)


@pytest.mark.every_case
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("make", [plan_decode, plan_forward, WHOLE_TREE], ids=["decode", "forward", "tree"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_plain_calls(cache: LargeCache, make: Any, queries: int, folder: Path) -> None:
    tensors, options, exact = call(cache, folder, queries)
    with checked_accesses():
        out, _ = run_plan(make, *tensors, **options, softcap=0.0, return_lse=False)
    check(out, exact)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_block_lists(cache: LargeCache, folder: Path) -> None:
    tensors, options, exact = call(cache, folder, 20)
    last = (cache.length - 1) // 64
    indices = torch.arange(last, max(last - 2, -1), -1, dtype=torch.int32).view(1, 1, 1, -1)
    lists = BlockLists(torch.tensor([[[indices.shape[-1]]]], dtype=torch.int32), indices, block_size=(64, 64))
    with checked_accesses():
        out = fa_serve.attention_paged(*tensors, **options, block_mask=lists, backend="triton")
    check(out, exact)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("cache", [cache for cache in CACHES if cache.window < 0], ids=str)
def test_latent_calls(cache: LargeCache, decodes: bool, folder: Path) -> None:
    tensors, options, exact = call(cache, folder, 3, dim_v=48)
    with checked_accesses():
        out, _ = run_plan(partial(plan_latent, decodes=decodes), *tensors, **options, softcap=0.0, return_lse=False)
    check(out, exact)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_stored_tokens(cache: LargeCache, folder: Path) -> None:
    """The last token of the last page, and the first one of the first."""
    memory = memory_on_disk(folder, cache.numel(HEADS, DIM), torch.float16)
    k_cache = cache.view(memory, HEADS, DIM)
    slots = torch.tensor([cache.pages * cache.page_size - 1, 0, -1])
    k = torch.randn(3, HEADS, DIM, dtype=torch.float16)
    with checked_accesses():
        fa_serve.store_kv(k, k, k_cache, k_cache, slots, backend="triton")
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(k_cache[0, 0], k[1])


def test_a_mask_whose_keys_are_far_apart(folder: Path) -> None:
    """A column of a large matrix hides keys."""
    memory = memory_on_disk(folder, BOUND + 4096, torch.uint8)
    mask = memory.view(torch.bool).as_strided((1, 1, 1, 33), (0, 0, 0, BOUND // 32))
    mask[..., ::3] = True
    q, k, v = make_qkv(1, 1, 33, 2, 1, 32)
    exact, _ = attention_reference(*(x.double() for x in (q, k, v)), softmax_scale=0.2, mask=mask)
    options = {"softmax_scale": 0.2, "window_size": (-1, -1), "softcap": 0.0, "return_lse": False, "mask": mask}
    for make in (plan_decode, plan_forward):
        with checked_accesses():
            out, _ = run_plan(make, q, k, v, **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
