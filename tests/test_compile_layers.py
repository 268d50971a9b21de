"""The kernels between a layer's products compile for every GPU, without spills."""

from __future__ import annotations

import pytest
import torch
from cross_compile import TARGETS, compiling_for

from fa_serve.backends.triton.layers import launch_act_and_mul, launch_rms_norm, launch_rotary_store_kv
from fa_serve.backends.triton.linear import launch_linear_row, row_tiles


@pytest.mark.parametrize("target", TARGETS)
def test_layers(target: str) -> None:
    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    caches = [bf16(2, 8, 16, 128).transpose(1, 2) for _ in "kv"]
    slots = torch.zeros(3, dtype=torch.int64)
    with compiling_for(target) as kernels:
        launch_rms_norm(bf16(3, 4096), bf16(4096), 1e-6, 0.0, None, bf16(3, 4096))
        launch_rms_norm(bf16(3, 8192), bf16(8192), 1e-6, 0.0, bf16(3, 8192), bf16(3, 8192))
        for norm in (None, (bf16(128), 1e-6, 0.0)):
            launch_rotary_store_kv(bf16(3, 48 * 128), bf16(3, 128), bf16(3, 128), norm, norm, *caches, slots, 32, None, None)
        launch_rotary_store_kv(bf16(3, 48 * 128), bf16(3, 64), bf16(3, 64), None, None, *caches, slots, 32, None, None)
        norm = (bf16(128), 1e-6, 0.0)  # 32 heads in a program, and heads of 256
        launch_rotary_store_kv(bf16(3, 32 * 128), bf16(3, 128), bf16(3, 128), norm, norm, *caches, slots, 16, None, None)
        caches = [bf16(2, 8, 16, 256).transpose(1, 2) for _ in "kv"]
        norm = (bf16(256), 1e-6, 1.0)
        launch_rotary_store_kv(bf16(3, 32 * 256), bf16(3, 256), bf16(3, 256), norm, norm, *caches, slots, 16, None, None)
        for activation in ("silu", "gelu_tanh", "gelu"):
            launch_act_and_mul(bf16(3, 2 * 14336), activation, bf16(3, 14336))
    assert [kernel.name for kernel in kernels] == ["_rms_norm"] * 2 + ["_rotary_store_kv"] * 5 + ["_act_and_mul"] * 3
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)


@pytest.mark.parametrize("target", TARGETS)
def test_linear_row(target: str) -> None:
    """The products of an 8B layer, and of a small one."""

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    with compiling_for(target) as kernels:
        for n, k, gated in (
            (6144, 4096, False),
            (14336, 4096, True),
            (4096, 14336, False),
            (1024, 2048, False),
            (3072, 1024, True),
        ):
            weight = bf16(2 * n if gated else n, k)
            norm = (bf16(k), 1e-6, 0.0)
            launch_linear_row(bf16(1, k), weight, None, norm, "silu" if gated else None, None, 1.0, bf16(1, n))
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 5


@pytest.mark.parametrize("n", [1, 5, 1000, 4096, 151936])
@pytest.mark.parametrize("k", [64, 1024, 3000, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_row_tiles_fill_the_gpu(n: int, k: int, gated: bool) -> None:
    block_n, block_k = row_tiles(132, n, k, gated)
    assert block_n == 1 or -(-n // block_n) >= 256
    assert block_n * block_k * (1 + gated) <= 8192, "what a thread can have in flight"
    assert block_k & (block_k - 1) == 0


def test_row_tiles_as_measured() -> None:
    assert row_tiles(132, 6144, 4096, gated=False) == (8, 1024)
    assert row_tiles(132, 4096, 14336, gated=False) == (8, 512)
    assert row_tiles(132, 14336, 4096, gated=True) == (4, 1024)
    assert row_tiles(132, 3072, 1024, gated=True) == (4, 512)
