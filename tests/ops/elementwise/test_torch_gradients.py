"""The gradients of ops between products, against those that autograd finds for the ops in float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.elementwise.torch_gradients import (
    torch_act_and_mul_backward,
    torch_rms_norm_backward,
    torch_rotary_backward,
)
from fa_serve.ops.moe.fallback import torch_activation


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double().requires_grad_() for x in tensors]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight + 1.0, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rms_norm_backward(dtype: torch.dtype) -> None:
    x = randn(5, 160, dtype=dtype)[:, :80]
    weight = randn(80, dtype=dtype, seed=1)
    dy = randn(5, 80, dtype=dtype, seed=2)
    given = wide(x, weight)
    expected = torch.autograd.grad(normed(*given), given, dy.double())
    norm = ops.Norm(weight, 1e-3, 1.0)
    dx, dweight = torch_rms_norm_backward(dy, x, norm, True)
    assert dweight is not None
    assert_rounded_once(dx, expected[0])
    assert_rounded_once(dweight, expected[1])
    alone, none = torch_rms_norm_backward(dy, x, norm, False)
    assert torch.equal(alone, dx)
    assert none is None


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_act_and_mul_backward(activation: str, dtype: torch.dtype) -> None:
    x = randn(5, 2 * 72, dtype=dtype)
    dy = randn(5, 72, dtype=dtype, seed=1)
    [given] = wide(x)
    gate, up = given.chunk(2, dim=1)
    [expected] = torch.autograd.grad(torch_activation(gate, activation) * up, given, dy.double())
    assert_rounded_once(torch_act_and_mul_backward(dy, x, activation), expected)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_rotary_backward(rotary_dim: int, norms: bool, gated: bool) -> None:
    """The gates behind queries are no part of it, and values have the gradients that attention has found."""
    num_heads = 4
    num_kv_heads = 2
    dim = 16
    total = 5
    step = 2 if gated else 1
    heads = step * num_heads + 2 * num_kv_heads
    qkv = randn(total, heads * dim, dtype=torch.float64)
    given = qkv.clone().requires_grad_()
    weights = [randn(dim, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2)]
    angles = randn(total, rotary_dim // 2, dtype=torch.float64, seed=3)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    parts = []
    rows = given.view(total, heads, dim)
    queries = rows[:, : step * num_heads : step]
    for x, weight in zip((queries, rows[:, step * num_heads :][:, :num_kv_heads]), weights, strict=True):
        y = normed(x, weight) if norms else x
        first, second, rest = y.split([rotary_dim // 2, rotary_dim // 2, dim - rotary_dim], dim=2)
        parts.append(torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2))
    results = torch.cat([*parts, rows[:, -num_kv_heads:]], dim=1)
    dqkv = torch.zeros(total, heads, dim, dtype=torch.float64)
    grads = randn(*results.shape, dtype=torch.float64, seed=4)
    dqkv[:, : step * num_heads : step] = grads[:, :num_heads]
    dqkv[:, step * num_heads :] = grads[:, num_heads:]
    expected = torch.autograd.grad(results, [given, *weights], grads, allow_unused=True)
    both = [ops.Norm(weight.detach(), 1e-3, 1.0) if norms else None for weight in weights]
    tables = (None, None) if rotary_dim == 0 else (cos[:, 0], sin[:, 0])
    dqkv = dqkv.flatten(1)
    found = torch_rotary_backward(dqkv, qkv if norms else None, num_heads, num_kv_heads, dim, *tables, *both, norms)
    torch.testing.assert_close(dqkv, expected[0])
    for dweight, wanted in zip(found, expected[1:], strict=True):
        assert (dweight is None) == (not norms)
        if dweight is not None:
            torch.testing.assert_close(dweight, wanted)
