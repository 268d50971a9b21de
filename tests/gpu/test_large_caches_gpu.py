"""Caches of 2^31 elements and more on a GPU that has room for one: no kernel reads or writes beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from large_caches import BOUND, KEYS, LargeCache, fill, large_caches

import fa_serve
from fa_serve import BlockLists
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, eager_attention, make_qkv

SHAPES = [
    pytest.param(16, 64, torch.float16, 40, id="H16-D64-float16-Q40"),
    pytest.param(8, 128, torch.bfloat16, 1, id="H8-D128-bfloat16-Q1"),
    pytest.param(8, 128, torch.bfloat16, 6, id="H8-D128-bfloat16-Q6"),
]


@pytest.fixture(scope="module")
def memory() -> Iterator[torch.Tensor]:
    """Room for keys of 16 bits, whose views are all caches of this module. Values are a part of the same memory."""
    numel = max(cache.numel(heads, dim) for heads, dim in ((16, 64), (8, 128), (1, 576)) for cache in large_caches(heads, dim))
    if torch.cuda.mem_get_info()[0] < 2 * numel + (4 << 30):
        pytest.skip(f"needs {2 * numel + (4 << 30) >> 30} GiB of free memory")
    yield torch.zeros(numel, dtype=torch.int16, device="cuda")
    torch.cuda.empty_cache()


def check_call(
    cache: LargeCache, memory: torch.Tensor, shape: tuple[int, int, int], dims: tuple[int, int], dtype: torch.dtype, **options
) -> None:
    """shape: query heads, KV heads and queries; dims: head_dim and head_dim_v. Values are the first numbers of keys."""
    heads, kv_heads, queries = shape
    dim, dim_v = dims
    memory.zero_()
    k_cache = cache.view(memory.view(dtype), kv_heads, dim)
    v_cache = k_cache[..., :dim_v]
    used = min(KEYS, cache.length)
    q, k, _ = (x[0] for x in make_qkv(1, queries, used, heads, kv_heads, dim, dtype=dtype, device="cuda"))
    table = fill(cache, k_cache, v_cache, k, k[..., :dim_v])
    # a window, or all keys of the cache where there are no more than those
    window = (cache.window, 0)
    out = fa_serve.attention_paged(
        q,
        k_cache,
        v_cache,
        block_table=table,
        seqused_k=torch.tensor([cache.length], dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device="cuda"),
        max_seqlen_q=queries,
        softmax_scale=0.1,
        window_size=window,
        **options,
    )
    torch.cuda.synchronize()
    dense = (q[None], k[None], k[None, ..., :dim_v])
    exact, _ = attention_reference(*(x.double() for x in dense), softmax_scale=0.1, window_size=window)
    assert_matches_reference(out, exact[0], eager_attention(*dense, softmax_scale=0.1, window_size=window)[0])


@pytest.mark.parametrize("backend", ["auto", "triton", "hopper"])
@pytest.mark.parametrize(("heads", "dim", "dtype", "queries"), SHAPES)
@pytest.mark.parametrize("place", range(4))
def test_attention(place: int, heads: int, dim: int, dtype: torch.dtype, queries: int, backend: str, memory) -> None:
    cache = large_caches(heads, dim)[place]
    queries = min(queries, cache.length - 1)
    try:
        check_call(cache, memory, (heads, heads, queries), (dim, dim), dtype, backend=backend)
    except fa_serve.UnsupportedError as error:
        assert backend == "hopper"
        pytest.skip(str(error).splitlines()[-1].strip())


@pytest.mark.parametrize("place", range(4))
def test_block_lists(place: int, memory) -> None:
    cache = large_caches(8, 128)[place]
    last = (cache.length - 1) // 64
    indices = torch.arange(last, max(last - 2, -1), -1, dtype=torch.int32, device="cuda").view(1, 1, 1, -1)
    count = torch.full((1, 1, 1), indices.shape[-1], dtype=torch.int32, device="cuda")
    lists = BlockLists(count, indices, block_size=(64, 64))
    check_call(cache, memory, (8, 8, 20), (128, 128), torch.bfloat16, block_mask=lists, backend="triton")


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("place", [2, 3])
def test_latent_attention(place: int, heads: int, queries: int, memory) -> None:
    check_call(large_caches(1, 576)[place], memory, (heads, 1, queries), (576, 512), torch.bfloat16)


def test_all_keys_of_one_page(memory) -> None:
    """Nearly all keys are 0, whose weight is known: decoding reads all of them, and no window hides a wrong address."""
    cache = large_caches(16, 64)[1]
    memory.zero_()
    k_cache = cache.view(memory.view(torch.float16), 16, 64)
    k = torch.randn(KEYS, 16, 64, dtype=torch.float16, device="cuda")
    table = fill(cache, k_cache, k_cache, k, k)
    q = 8 * k[-1:]
    given = {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device="cuda"), "max_seqlen_q": 1}
    used = torch.tensor([cache.length], dtype=torch.int32, device="cuda")
    out, lse = fa_serve.attention_paged(
        q, k_cache, k_cache, block_table=table, seqused_k=used, **given, softmax_scale=0.1, return_lse=True
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.1
    zeros = torch.full((16, 1, 1), float(cache.length - KEYS), dtype=torch.float64, device="cuda").log()
    exact_lse = torch.cat([scores, zeros], -1).logsumexp(-1)
    exact = torch.einsum("hqk,khd->qhd", (scores - exact_lse[..., None]).exp(), k.double())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("place", range(4))
def test_stored_tokens(place: int, memory) -> None:
    cache = large_caches(8, 128)[place]
    memory.zero_()
    k_cache = cache.view(memory.view(torch.bfloat16), 8, 128)
    slots = torch.tensor([cache.pages * cache.page_size - 1, 0, -1], device="cuda")
    k = torch.randn(3, 8, 128, dtype=torch.bfloat16, device="cuda")
    fa_serve.store_kv(k, k, k_cache, k_cache, slots)
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(k_cache[0, 0], k[1])


def test_a_cache_of_flash_attn_with_one_long_row(memory) -> None:
    """The caches of flash-attn's functions are pages as long as a row."""
    from fa_serve.flash_attn import flash_attn_with_kvcache

    rows = BOUND // (8 * 128) + 40
    memory.zero_()
    cache = memory.view(torch.bfloat16)[: rows * 8 * 128].view(1, rows, 8, 128)
    q, k, _ = make_qkv(1, 4, KEYS, 8, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache[:, -KEYS:] = k
    out = flash_attn_with_kvcache(q, cache, cache, causal=True, window_size=(20, 0))
    exact, _ = attention_reference(*(x.double() for x in (q, k, k)), softmax_scale=128**-0.5, window_size=(20, 0))
    eager = eager_attention(q, k, k, softmax_scale=128**-0.5, window_size=(20, 0))
    assert_matches_reference(out, exact, eager)
