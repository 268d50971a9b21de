"""The kernels between a layer's products compile for every GPU, without spills."""

from __future__ import annotations

import pytest
import torch
from cross_compile import TARGETS, compiling_for

from fa_serve.backends.triton.layers import launch_act_and_mul, launch_rms_norm, launch_rotary_store_kv
from fa_serve.backends.triton.linear import launch_linear_row


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
        for activation in ("silu", "gelu_tanh", "gelu"):
            launch_act_and_mul(bf16(3, 2 * 14336), activation, bf16(3, 14336))
    assert [kernel.name for kernel in kernels] == ["_rms_norm"] * 2 + ["_rotary_store_kv"] * 3 + ["_act_and_mul"] * 3
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
            weight, norm = bf16(2 * n if gated else n, k), (bf16(k), 1e-6, 0.0)
            launch_linear_row(bf16(1, k), weight, None, norm, "silu" if gated else None, None, 1.0, bf16(1, n))
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 5
