"""What a decoder layer computes beside attention and its products, for packed tokens: one kernel each on a GPU.

    qkv = ops.linear(x, qkv_weight, norm=Norm(weight, 1e-6))
    ops.rotary_store_kv(qkv, k_cache, v_cache, slots, num_heads=32, cos=cos, sin=sin)     # in place
    h = ops.linear(x, gate_up_weight, norm=Norm(weight, 1e-6), activation="silu")
    x = ops.linear(h, down_weight, residual=x)                                            # in place

Triton's kernels on a GPU, plain torch elsewhere; both compute in float32 (float64 stays) and round once. Arguments come from
`engine.fusion`, which has compared the result with the model's own layer, so they are not validated again at each of some ten
calls a layer. Sources: RMS norm (Zhang, Sennrich 2019, arXiv:1910.07467), rotary embedding (Su et al. 2021, arXiv:2104.09864),
gated units (Shazeer 2020, arXiv:2002.05202). Left out: attention (api.py).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.backends.sdpa import SdpaBackend

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


class Norm(NamedTuple):
    """An RMS norm: weight (width,); offset is 1 for models that keep weights around 0."""

    weight: Tensor
    eps: float
    offset: float = 0.0


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """norm(x) @ weight.T + bias, then gated or added to the residual; one kernel for a single token on a GPU.

    x: (total, k); weight: (n, k), contiguous; bias: (n,)
    activation: the first half of the product, activated, gates the second -> (total, n / 2)
    residual:   (total, n), to which alpha times the product is added in place; it is what returns
    """
    kernels = _kernels("linear", x.device) if x.shape[0] == 1 else None
    if kernels:
        out = x.new_empty(1, weight.shape[0] // (1 if activation is None else 2)) if residual is None else residual
        kernels.launch_linear_row(x, weight, bias, norm, activation, residual, alpha, out)
        return out
    if norm is not None:
        x = rms_norm(x, norm)
    if residual is not None:
        if bias is not None:
            residual.add_(bias, alpha=alpha)
        return residual.addmm_(x, weight.t(), alpha=alpha)
    y = torch.nn.functional.linear(x, weight, bias)
    return y if activation is None else act_and_mul(y, activation)


def rms_norm(x: Tensor, norm: Norm, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), plus `residual`; x, residual, out (total, width), weight (width,)."""
    if kernels := _kernels("layers", x.device):
        out = torch.empty_like(x) if out is None else out
        kernels.launch_rms_norm(x, *norm, residual, out)
        return out
    y = _normed(x, norm)
    y = y if residual is None else y + residual
    return y.to(x.dtype) if out is None else out.copy_(y)


def rotary_store_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Norm and turn queries and keys in place, then write keys and values into the paged cache.

    qkv:          (total, (num_heads + 2 * num_kv_heads) * head_dim): heads of q, then of k, then of v
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim), last dimension contiguous, of qkv's dtype, or float8_e4m3fn
                  with k_descale (num_kv_heads,) float32, by which keys are divided; v_cache likewise
    slot_mapping: (total,) int64: page * page_size + position in the page; -1 writes nothing
    cos, sin:     (total, rotary_dim), the second half of each row as the first: the first rotary_dim numbers of a head turn,
                  its halves against each other. None turns nothing
    q_norm:       of head_dim: what each head goes through before it is turned; k_norm likewise; both or none, alike but in
                  their weights
    """
    if kernels := _kernels("layers", qkv.device):
        kernels.launch_rotary_store_kv(
            qkv, cos, sin, q_norm, k_norm, k_cache, v_cache, slot_mapping, num_heads, k_descale, v_descale
        )
        return
    num_kv_heads, dim = k_cache.shape[2:]
    turning, v = torch.split_with_sizes(qkv.view(len(qkv), -1, dim), [num_heads + num_kv_heads, num_kv_heads], dim=1)
    k = turning[:, num_heads:]
    for x, norm in [(turning, None)] if q_norm is None else [(turning[:, :num_heads], q_norm), (k, k_norm)]:
        y = _wide(x) if norm is None else _normed(x, norm)
        if cos is None or sin is None:
            x.copy_(y)
            continue
        if (width := cos.shape[1]) < dim:
            x[..., width:] = y[..., width:]
            x = x[..., :width]
            y = y[..., :width]
        first, second = y.chunk(2, dim=2)
        torch.addcmul(y * _wide(cos).unsqueeze(1), torch.cat([-second, first], dim=2), _wide(sin).unsqueeze(1), out=x)
    SdpaBackend().store_kv(k, v, k_cache, v_cache, slot_mapping, k_descale=k_descale, v_descale=v_descale)


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up with x (total, 2 * width) = [gate, up] -> (total, width); one of ACTIVATIONS."""
    if kernels := _kernels("layers", x.device):
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        kernels.launch_act_and_mul(x, activation, out)
        return out
    gate, up = _wide(x).chunk(2, dim=1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(x.dtype)


def sample_rows(
    logits: Tensor,
    keys: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> Tensor | None:
    """A token for each row of logits (n, vocab), -1 where a row's maximum is not finite: (n,) int64. None without a kernel.

    keys:        (n,) int64, of the row's random numbers; None when every row is greedy
    temperature: (n,) float32, 0 is greedy; top_k: (n,) int64; top_p, min_p: (n,) float32; None when no row uses it
    last_tokens: int64, of which `slots` (n,) int64 get the tokens, 0 for -1
    """
    kernels = _kernels("sampling", logits.device)
    if not kernels:
        return None
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    kernels.launch_sample_rows(logits, keys, temperature, top_k, top_p, min_p, slots, last_tokens, tokens)
    return tokens


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., k) @ weight (n, k).T + bias (n,) -> (..., n); the bits of a row do not depend on how many others there are."""
    rows = x.reshape(-1, x.shape[-1])
    if kernels := _kernels("invariant", x.device):
        out = x.new_empty(len(rows), weight.shape[0])
        kernels.launch_linear(rows, weight, bias, out)
    else:
        # a library chooses its way by the number of rows: one at a time
        linear_row = torch.nn.functional.linear
        out = torch.cat([linear_row(row[None], weight, bias) for row in rows]) if len(rows) else rows @ weight.t()
    return out.view(*x.shape[:-1], weight.shape[0])


def invariant_sum(x: Tensor) -> Tensor:
    """Over the last dimension, in float32 or wider; the bits of a row do not depend on how many others there are."""
    rows = x.reshape(-1, x.shape[-1])
    if kernels := _kernels("invariant", x.device):
        out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        kernels.launch_row_sum(rows, out)
    else:
        out = torch.stack([_wide(row).sum() for row in rows]) if len(rows) else _wide(rows).sum(-1)
    return out.view(x.shape[:-1])


def _normed(x: Tensor, norm: Norm) -> Tensor:
    weight = _wide(norm.weight) + norm.offset if norm.offset else _wide(norm.weight)
    return torch.nn.functional.rms_norm(_wide(x), weight.shape, weight, norm.eps)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


@cache
def _kernels(module: str, device: torch.device) -> Any:
    """Triton's launchers, None on a device without them."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module(f"fa_serve.backends.triton.{module}")
    except ImportError:
        return None
