"""The address arithmetic of kernels over caches of 2^31 elements and more, in Triton's first intermediate form.

Every use of a cache's strides must be in 64 bits. Caches of the usual size keep products of 32 bits within a page, which is
checked as well, because a test that only counts wide ones would not see that the cheap form is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cross_compile import Kernel, compiling_for
from large_caches import LargeCache, large_caches, memory_on_disk

from fa_serve import BlockLists
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.backends.triton.decode.plan import plan_decode
from fa_serve.backends.triton.latent.plan import plan_latent
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.testing import run_plan

HEADS = 8
DIM = 64
CACHES = large_caches(HEADS, DIM)
USUAL = LargeCache("usual", (16 * HEADS * DIM, HEADS * DIM), 16, 32, -1)
MAKERS: dict[str, Any] = {
    "decode": plan_decode,
    "forward": plan_forward,
    "latent": partial(plan_latent, decodes=True),
    "block-sparse": plan_block_sparse,
    "tree": plan_tree,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.iterdir():
        file.unlink()


def compile_call(name: str, cache: LargeCache, folder: Path, target: str) -> Kernel:
    k_cache = cache.view(memory_on_disk(folder, cache.numel(HEADS, DIM), torch.float16), HEADS, DIM)
    v_cache = k_cache[..., :48] if name == "latent" else k_cache
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    options = {
        "block_table": torch.zeros(1, cache.pages, dtype=torch.int32),
        "seqused_k": torch.tensor([cache.length], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": cache.length,
        "softmax_scale": 0.2,
        "softcap": 0.0,
        "window_size": (-1, 0),
        "return_lse": False,
        "blocks": BlockLists(one, one[None]) if name == "block-sparse" else None,
    }
    with compiling_for(target, until="ttir") as kernels:
        run_plan(MAKERS[name], torch.zeros(1, HEADS, DIM, dtype=torch.float16), k_cache, v_cache, **options)
    return kernels[0]


def narrow_uses(kernel: Kernel) -> list[str]:
    """Uses of the strides of pages and tokens as numbers of 32 bits."""
    found = []
    for line in kernel.binary.asm["ttir"].splitlines():
        if re.search(r"%stride_[kv][pbt]\b", line) and "tt.func" not in line:
            wide = "arith.extsi" in line or re.search(r": (i64|i64 -> tensor<\d+xi64>)", line)
            found += [] if wide else [line]
    return found


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize(
    ("cache", "target"),
    [(cache, "sm90") for cache in CACHES] + [(cache, target) for cache in CACHES[1:3] for target in ("sm80", "gfx942")],
    ids=str,
)
def test_every_product_with_a_stride_has_64_bits(cache: LargeCache, name: str, target: str, folder: Path) -> None:
    assert narrow_uses(compile_call(name, cache, folder, target)) == []


@pytest.mark.parametrize("name", list(MAKERS))
def test_usual_caches_keep_products_of_32_bits(name: str, folder: Path) -> None:
    assert narrow_uses(compile_call(name, USUAL, folder, "sm90"))


def test_the_copy_engine_gets_coordinates_of_32_bits(folder: Path) -> None:
    """Pages are 2^31 elements apart, so their stride has 64 bits, and it does not reach the coordinates."""
    cache = large_caches(1, 288)[3]
    k_cache = cache.view(memory_on_disk(folder, cache.numel(1, 288), torch.bfloat16), 1, 288)
    with compiling_for("sm90") as kernels:
        run_plan(
            plan_latent_decode,
            torch.zeros(1, 32, 288, dtype=torch.bfloat16),
            k_cache,
            k_cache[..., :256],
            block_table=torch.zeros(1, 2, dtype=torch.int32),
            seqused_k=torch.tensor([32], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=32,
            softmax_scale=0.2,
            softcap=0.0,
            window_size=(-1, 0),
            return_lse=False,
        )
    assert kernels[0].instructions["UTMALDG"] > 0
