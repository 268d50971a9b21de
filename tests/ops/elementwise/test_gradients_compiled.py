"""The kernels of gradients compile for every GPU without spills."""

from __future__ import annotations

import pytest
import torch
from cross_compile import compiling_for, sm90_and
from torch import Tensor

from fa_serve.ops import ACTIVATIONS, Norm
from fa_serve.ops.elementwise.gradients import (
    launch_act_and_mul_backward,
    launch_rms_norm_backward,
    launch_rotary_backward,
)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("target", sm90_and("sm80"))
def test_kernels_of_gradients(target: str) -> None:
    def rotary(num_heads: int, num_kv_heads: int, dim: int, rotary_dim: int, norm: Norm | None) -> None:
        qkv = bf16(3, (num_heads + 2 * num_kv_heads) * dim)
        angles = bf16(3, rotary_dim)[:, : rotary_dim // 2]
        launch_rotary_backward(qkv, qkv, num_heads, num_kv_heads, dim, angles, angles, norm, norm, norm is not None)

    with compiling_for(target) as kernels:
        for activation in ACTIVATIONS:
            launch_act_and_mul_backward(bf16(3, 14336), bf16(3, 2 * 14336), activation)
        for width in (1024, 4096, 8192):
            launch_rms_norm_backward(bf16(3, width), bf16(3, width), Norm(bf16(width), 1e-6), True)
        launch_rms_norm_backward(bf16(3, 4096), bf16(3, 4096), Norm(bf16(4096), 1e-6), False)
        rotary(32, 8, 128, 128, None)
        rotary(16, 8, 128, 128, Norm(bf16(128), 1e-6))
        rotary(8, 4, 256, 256, Norm(bf16(256), 1e-6, 1.0))
        rotary(16, 2, 256, 64, Norm(bf16(256), 1e-6, 1.0))
    names = {"_gated_gradients": 3, "_rms_norm_gradients": 4, "_rotary_gradients": 4}
    assert [kernel.name for kernel in kernels] == [name for name, count in names.items() for _ in range(count)]
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)
