"""The public functions as the adapter calls them: the same, and one opaque node in the graph of a forward that is compiled.

Choosing a backend and launching its kernels is Python that a tracer should not walk through. Left out: gradients of a compiled
forward, which PyTorch then refuses by name.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fa_serve import api


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, sinks: Tensor | None, softmax_scale: float | None,
    window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    """`fa_serve.attention`."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _attention(q, k, v, mask, sinks, softmax_scale, *window_size, softcap))
    return api.attention(q, k, v, mask=mask, sinks=sinks, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    sinks: Tensor | None, softmax_scale: float | None, window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    """`fa_serve.attention_varlen`."""
    if torch.compiler.is_compiling():
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return cast(Tensor, _attention_varlen(q, k, v, *lengths, sinks, softmax_scale, *window_size, softcap))
    out = api.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        sinks=sinks, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
    )  # fmt: skip
    return cast(Tensor, out)


@torch.library.custom_op("fa_serve::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, softmax_scale: float | None, left: int,
    right: int, softcap: float,
) -> Tensor:  # fmt: skip
    window = (left, right)
    out = api.attention(q, k, v, mask=mask, sinks=sinks, softmax_scale=softmax_scale, window_size=window, softcap=softcap)
    return out.contiguous()


@torch.library.custom_op("fa_serve::attention_varlen", mutates_args=())
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    sinks: Tensor | None, softmax_scale: float | None, left: int, right: int, softcap: float,
) -> Tensor:  # fmt: skip
    out = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks=sinks, softmax_scale=softmax_scale,
        window_size=(left, right), softcap=softcap,
    )  # fmt: skip
    return out.contiguous()


@_attention.register_fake
@_attention_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
