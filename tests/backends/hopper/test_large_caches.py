"""Caches of 2^31 elements and more in the Hopper kernels, which the emulator runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_emulator import emulated
from large_caches import KEYS, LargeCache, fill, large_caches, memory_on_disk

from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import make_qkv, run_plan

FAR_PAGES = large_caches(1, 288)[3]


def run(cache: LargeCache, make: object, folder: Path, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    num_heads, kv_heads = heads
    dim, dim_v = dims
    path = memory_on_disk(folder, cache.numel(kv_heads, dim), torch.bfloat16)
    k_cache = cache.view(path, kv_heads, dim)
    used = min(KEYS, cache.length)
    q, k, _ = (x[0] for x in make_qkv(1, 3, used, num_heads, kv_heads, dim, dtype=torch.bfloat16))
    window = (cache.window, 0)
    with emulated():
        out, _ = run_plan(
            make,  # type: ignore[arg-type]
            q,
            k_cache,
            k_cache[..., :dim_v],
            block_table=fill(cache, k_cache, k_cache[..., :dim_v], k, k[..., :dim_v]),
            seqused_k=torch.tensor([cache.length], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
            max_seqlen_q=3,
            max_seqlen_k=cache.length,
            softmax_scale=0.1,
            window_size=window,
            softcap=0.0,
            return_lse=False,
        )
    exact, _ = attention_reference(*(x[None].double() for x in (q, k, k[..., :dim_v])), softmax_scale=0.1, window_size=window)
    torch.testing.assert_close(out.double(), exact[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache", [c for c in large_caches(8, 64) if c.strides[0] % c.strides[1] == 0], ids=str)
def test_forward(cache: LargeCache, tmp_path: Path) -> None:
    """Where tokens are further apart than pages, `HopperBackend.supports` refuses the call."""
    run(cache, plan_hopper_forward, tmp_path, (8, 8), (64, 64))
    for file in tmp_path.iterdir():
        file.unlink()


def test_latent_decoding(tmp_path: Path) -> None:
    run(FAR_PAGES, plan_latent_decode, tmp_path, (32, 1), (288, 256))
    for file in tmp_path.iterdir():
        file.unlink()
