"""Attention by a fixed tree, compiled for other GPUs: registers suffice, and Hopper has one instruction for every form."""

from __future__ import annotations

import re

import pytest
import torch
from cross_compile import SHARED_BYTES, Kernel, compiling_for

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.tree.plan import plan_tree


def compiled(
    target: str,
    *,
    queries: int,
    apart: bool,
    head_dim: int = 128,
    block_m: int = 64,
    fp8: bool = False,
    until: str | None = None,
) -> list[Kernel]:
    q = torch.zeros(queries, 32, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(64, 8, 16, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    numbers = torch.zeros(64, dtype=torch.int32)
    tensors = AttentionTensors(q, cache, cache, cu_seqlens_q=numbers[:2], keys=numbers[:1], block_table=numbers[None])
    if fp8:
        descale = torch.zeros(8)
        cache = cache.to(torch.float8_e4m3fn)
        tensors = tensors._replace(k=cache, v=cache, k_descale=descale, v_descale=descale)
    call = AttentionOptions(0.1, (-1, 0), 0.0, queries, 1024, False, num_splits=-1)
    with compiling_for(target, until) as kernels:
        plan_tree(tensors, call, apart=apart, block_m=block_m)(tensors)
    return kernels


@pytest.mark.parametrize(("queries", "apart", "block_m"), [(1, True, 64), (100, True, 64), (100, False, 64), (100, False, 128)])
def test_hopper_multiplies_every_tile_by_the_same_instruction(queries: int, apart: bool, block_m: int) -> None:
    kernels = compiled("sm90", queries=queries, apart=apart, block_m=block_m)
    assert [kernel.name for kernel in kernels] == ["attn_tree"] + ["fold_groups"] * apart
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", kernels[0].binary.asm["ptx"]))
    assert found == {"m64n64k16", "m64n128k16"}
    assert not kernels[0].instructions["HMMA"]
    # both outputs of a row, of the open group and of those before it, are in registers but for a part
    assert max(kernel.spill_bytes for kernel in kernels) <= 160


def test_the_addresses_of_a_block_take_few_instructions() -> None:
    """They are those of the decoding kernel. By a division and a 64-bit product for each key, the loop had 895 instructions."""
    kernel, *_ = compiled("sm90", queries=1, apart=False)
    assert kernel.hot_loop.total() <= 700
    assert 2 * (kernel.shared_bytes + 1024) <= 228 << 10, "two programs run on a multiprocessor"


@pytest.mark.parametrize(("target", "head_dim"), [("sm120", 128), ("sm120", 256), ("sm90", 256), ("gfx942", 128)])
def test_other_gpus_and_head_sizes_have_room(target: str, head_dim: int) -> None:
    for kernel in compiled(target, queries=100, apart=True, head_dim=head_dim):
        assert kernel.shared_bytes <= SHARED_BYTES[target]


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
def test_a_float8_cache_is_widened_to_float16(apart: bool) -> None:
    kernel, *_ = compiled("sm90", queries=1, apart=apart, fp8=True, until="ptx")
    assert "cvt.rn.f16x2.e4m3x2" in kernel.binary.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" in kernel.binary.asm["ptx"]
