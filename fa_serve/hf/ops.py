"""The public functions as the adapter calls them: the same, and one opaque node in the graph of a forward that is compiled,
exported or traced.

Choosing a backend and launching its kernels is Python that a tracer should not walk through. Left out: gradients of a compiled
forward, which PyTorch then refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.spec import FEW_QUERIES

# query, key, value, heads before tokens, and the mask over keys -> what `fa_serve.attention` returns, or None: not this way
Step = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], "Tensor | None"]
# by what is alike in layers and in forwards: the short way of a backend that has one, else None
_STEPS: dict[tuple[Any, ...], Step | None] = {}


def traced(*inputs: Tensor) -> bool:
    """Whether the operations of a forward are written down, to be run again, without ours, which go to the driver unseen.

    On a CPU and with gradients they are PyTorch's own: a trace of these by torch.jit needs nothing of fa_serve to be loaded.
    """
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return torch.compiler.is_compiling() or (torch._C._is_tracing() and inputs[0].is_cuda and not grad)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """`fa_serve.attention`, contiguous."""
    call = _attention if traced(q, k, v) else _call
    return cast(Tensor, call(q, k, v, mask, sinks, softmax_scale, *window_size, softcap))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: None, **options: Any
) -> tuple[Tensor, Step | None]:
    """The same for a layer's own tensors, heads before tokens, on a GPU, where no gradient is asked for and nothing is traced;
    and the short way for calls that are like this one, if there is one."""
    keys = key.shape[2]
    prompt = query.shape[2] != 1
    q = query.transpose(1, 2)
    k = key.transpose(1, 2)
    v = value.transpose(1, 2)
    if keys <= FEW_QUERIES or (mask is not None and (prompt or mask.dtype != torch.bool or mask.shape[1] != 1)):
        return attention(q, k, v, mask=mask, sinks=None, **options), None
    options["softmax_scale"] = float(q.shape[3] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"])
    hidden = mask if mask is None else (mask.device, mask.shape[0], mask.shape[3] == keys, mask.stride(3))
    kept = [(x.shape[:2], x.shape[2] == keys, x.shape[3], x.stride(3), x.dtype, x.device) for x in (key, value)]
    # a token's tiles differ for twice the keys, and hardly for fewer
    length = (keys, key.stride(), value.stride()) if prompt else keys.bit_length()
    alike = (query.shape, query.stride(), query.dtype, query.device, length, *kept, hidden, *options.values())
    step = _STEPS.get(alike)
    out: Tensor | None = None if step is None else step(query, key, value, mask)
    if out is None:
        out = attention(q, k, v, mask=mask, sinks=None, **options)
        if alike not in _STEPS:
            if len(_STEPS) >= 1024:
                _STEPS.clear()
            few = q.shape[1] <= FEW_QUERIES
            make = getattr(api._backend("dense", q, k, v, dict(options), None, mask, 0, True, "auto", few), "step", None)
            step = _STEPS[alike] = None if make is None else make(q, k, v, mask, **options)
    return out, step


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    sinks: Tensor | None,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """`fa_serve.attention_varlen`, contiguous."""
    call = _attention_varlen if traced(q, k, v) else _call_varlen
    return cast(Tensor, call(q, k, v, cu_q, cu_k, max_q, max_k, sinks, softmax_scale, *window_size, softcap))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float | None,
    left: int,
    right: int,
    softcap: float,
) -> Tensor:
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": (left, right), "softcap": softcap}
    return cast(Tensor, api.attention(q, k, v, mask=mask, sinks=sinks, **options)).contiguous()


def _call_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    sinks: Tensor | None,
    softmax_scale: float | None,
    left: int,
    right: int,
    softcap: float,
) -> Tensor:
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "window_size": (left, right), "softcap": softcap}
    return cast(Tensor, api.attention_varlen(q, k, v, sinks=sinks, **lengths, **options)).contiguous()


_attention = torch.library.custom_op("fa_serve::attention", _call, mutates_args=())
_attention_varlen = torch.library.custom_op("fa_serve::attention_varlen", _call_varlen, mutates_args=())


@_attention.register_fake
@_attention_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
