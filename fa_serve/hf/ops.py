"""The public functions as the adapter calls them: the same, and one opaque node in the graph of a forward that is compiled.

Choosing a backend and launching its kernels is Python that a tracer should not walk through. Left out: gradients of a compiled
forward, which PyTorch then refuses by name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.spec import FEW_QUERIES

# by what is alike in layers and in steps: the short way of a backend that has one, else None
_STEPS: dict[tuple[Any, ...], Any] = {}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, sinks: Tensor | None, softmax_scale: float | None,
    window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    """`fa_serve.attention`."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _attention(q, k, v, mask, sinks, softmax_scale, *window_size, softcap))
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap}
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if q_shape[1] != 1 or sinks is not None or not q.is_cuda or torch.is_grad_enabled() or k_shape[1] <= FEW_QUERIES:
        return cast(Tensor, api.attention(q, k, v, mask=mask, sinks=sinks, **options))
    hidden = mask if mask is None else (mask.dtype, mask.device, mask.shape[:3], mask.shape[3] == k_shape[1], mask.stride(3))
    # tiles differ for twice the keys, and hardly for fewer
    key = (
        q_shape, q.stride(), q.dtype, q.device, k_shape[0], k_shape[1].bit_length(), k_shape[2:], k.stride(3), k.dtype,
        k.device, v_shape[0], v_shape[1] == k_shape[1], v_shape[2:], v.stride(3), v.dtype, v.device, hidden, *options.values(),
    )  # fmt: skip
    step = _STEPS.get(key)
    out: Tensor | None = None if step is None else step(q, k, v, mask)
    if out is None:
        out = api.attention(q, k, v, mask=mask, **options)
        if key not in _STEPS:
            if len(_STEPS) >= 1024:
                _STEPS.clear()
            options["softmax_scale"] = q_shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale)
            make = getattr(api._backend("dense", q, k, v, dict(options), None, mask, 0, True, "auto", True), "step", None)
            over_keys = mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)
            _STEPS[key] = make(q, k, v, mask, **options) if make is not None and over_keys else None
    return out


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, sinks: Tensor | None,
    softmax_scale: float | None, window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    """`fa_serve.attention_varlen`."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, sinks, softmax_scale, *window_size, softcap))
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap, "sinks": sinks}
    return cast(Tensor, api.attention_varlen(q, k, v, **lengths, **options))


@torch.library.custom_op("fa_serve::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, softmax_scale: float | None, left: int,
    right: int, softcap: float,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": (left, right), "softcap": softcap}
    return cast(Tensor, api.attention(q, k, v, mask=mask, sinks=sinks, **options)).contiguous()


@torch.library.custom_op("fa_serve::attention_varlen", mutates_args=())
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, sinks: Tensor | None,
    softmax_scale: float | None, left: int, right: int, softcap: float,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": (left, right), "softcap": softcap}
    return attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, sinks=sinks, **options).contiguous()


@_attention.register_fake
@_attention_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
