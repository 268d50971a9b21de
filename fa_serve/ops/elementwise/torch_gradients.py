"""The gradients of ops between products, in plain PyTorch, for any device.

They compute in float32, or in float64 for float64 input, and round each result once, as the ops themselves do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_serve.ops.ops_backend import Norm

_aten: Any = torch.ops.aten


def torch_rms_norm_backward(dy: Tensor, x: Tensor, norm: Norm, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
    """Arguments and results are those of `OpsBackend.rms_norm_backward`; dy and x may have more dimensions."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dy = dy.to(wide.dtype)
    scale = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    normed = wide * scale
    weighted = dy * (norm.weight.to(wide.dtype) + norm.offset)
    dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    if not needs_weight:
        return dx.to(x.dtype), None
    dweight = (dy * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype), dweight.to(norm.weight.dtype)


def torch_act_and_mul_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """Arguments and result are those of `OpsBackend.act_and_mul_backward`."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    dy = dy.to(gate.dtype)
    if activation == "silu":
        activated = torch.nn.functional.silu(gate)
        dgate = _aten.silu_backward(dy * up, gate)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        activated = torch.nn.functional.gelu(gate, approximate=approximate)
        dgate = _aten.gelu_backward(dy * up, gate, approximate=approximate)
    return torch.cat([dgate, dy * activated], dim=-1).to(x.dtype)


def torch_rotary_backward(
    dqkv: Tensor,
    qkv: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    needs_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Arguments and results are those of `OpsBackend.rotary_backward`."""
    heads = dqkv.view(len(dqkv), -1, dim)
    queries = heads.shape[1] - 2 * num_kv_heads
    step = queries // num_heads
    places = (slice(0, queries, step), slice(queries, queries + num_kv_heads))
    found: list[Tensor | None] = []
    for place, norm in zip(places, (q_norm, k_norm), strict=True):
        part = heads[:, place]
        turned = _rotated_back(part, cos, sin)
        dweight = None
        if norm is not None:
            assert qkv is not None
            given = qkv.view(len(qkv), -1, dim)[:, place]
            turned, dweight = torch_rms_norm_backward(turned, given, norm, needs_weights)
        part.copy_(turned)
        found.append(dweight)
    return found[0], found[1]


def _rotated_back(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """x (total, heads, dim), the first 2 * cos.shape[1] elements of each head rotated by the negative angles."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if cos is None or sin is None:
        return wide
    half = cos.shape[1]
    first, second, rest = wide.split_with_sizes([half, half, x.shape[2] - 2 * half], dim=2)
    cos = cos.to(wide.dtype).unsqueeze(1)
    sin = sin.to(wide.dtype).unsqueeze(1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=2)
