"""What a decoder layer computes beside attention and its products, for packed tokens: one kernel each on a GPU.

    h = layers.rms_norm(x, weight, 1e-6)
    layers.rotary_store_kv(qkv, k_cache, v_cache, slots, num_heads=32, cos=cos, sin=sin)     # in place
    h = layers.act_and_mul(gate_up, "silu")

Triton's kernels on a GPU, plain torch elsewhere; both compute in float32 (float64 stays) and round once. Arguments come from
`engine.fusion`, which has compared the result with the model's own layer, so they are not validated again at each of some ten
calls a layer. Sources: RMS norm (Zhang, Sennrich 2019, arXiv:1910.07467), rotary embedding (Su et al. 2021, arXiv:2104.09864),
gated units (Shazeer 2020, arXiv:2002.05202). Left out: attention (api.py).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), plus `residual`; x, residual, out (total, width), weight (width,)."""
    out = torch.empty_like(x) if out is None else out
    if kernels := _kernels(x.device):
        kernels.launch_rms_norm(x, weight, eps, offset, residual, out)
        return out
    y = _normed(x, weight, eps, offset)
    return out.copy_(y if residual is None else y + residual)


def rotary_store_kv(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, num_heads: int, cos: Tensor | None = None,
    sin: Tensor | None = None, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0,
) -> None:  # fmt: skip
    """Norm and turn queries and keys in place, then write keys and values into the paged cache.

    qkv:          (total, (num_heads + 2 * num_kv_heads) * head_dim): heads of q, then of k, then of v
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim) of qkv's dtype, last dimension contiguous; v_cache likewise
    slot_mapping: (total,) int64: page * page_size + position in the page; -1 writes nothing
    cos, sin:     (total, rotary_dim), the second half of each row as the first: the first rotary_dim numbers of a head turn,
                  its halves against each other. None turns nothing
    q_weight:     (head_dim,): RMS norm of each head before it is turned; k_weight likewise; both or none
    """
    if kernels := _kernels(qkv.device):
        kernels.launch_rotary_store_kv(
            qkv, cos, sin, q_weight, k_weight, eps, offset, k_cache, v_cache, slot_mapping, num_heads
        )
        return
    page_size, num_kv_heads, dim = k_cache.shape[1:]
    q, k, v = torch.split(qkv.view(len(qkv), -1, dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = _wide(x) if weight is None else _normed(x, weight, eps, offset)
        if cos is not None and sin is not None:
            half = cos.shape[1] // 2
            first, second, rest = torch.split(y, [half, half, dim - 2 * half], dim=2)
            c, s = _wide(cos[:, None, :half]), _wide(sin[:, None, :half])
            y = torch.cat([first * c - second * s, second * c + first * s, rest], dim=2)
        x.copy_(y)
    written = slot_mapping >= 0
    page, position = slot_mapping[written] // page_size, slot_mapping[written] % page_size
    k_cache[page, position], v_cache[page, position] = k[written], v[written]


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up with x (total, 2 * width) = [gate, up] -> (total, width); one of ACTIVATIONS."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    if kernels := _kernels(x.device):
        kernels.launch_act_and_mul(x, activation, out)
        return out
    gate, up = _wide(x).chunk(2, dim=1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return out.copy_(gate * up)


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    y = _wide(x)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (_wide(weight) + offset)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def _kernels(device: torch.device) -> Any:
    """Triton's launchers, None on a device without them."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module("fa_serve.backends.triton.layers")
    except ImportError:
        return None
