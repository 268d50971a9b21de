"""Attention as one opaque node in the graph of a forward that is compiled, exported or traced.

Checking arguments, selecting a backend and launching a kernel is Python that a tracer must not follow: it would break the
graph, or record nothing of a kernel that is launched past PyTorch. `attention` and `attention_varlen` are the functions of
`fa_serve.api` with positional arguments and a contiguous result. While a forward is traced they go through PyTorch's custom
operators `fa_serve::attention` and `fa_serve::attention_varlen`, otherwise straight to the API.

Left out: gradients of a compiled forward. The operators have no backward pass, and PyTorch refuses one with their names.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fa_serve import api


def is_traced(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operations of this forward are recorded, so that attention has to be an operator that PyTorch knows.

    torch.jit does not record kernels that are launched past PyTorch. On a CPU, and where gradients are needed, attention is
    computed by PyTorch's own operators. torch.jit records those as they are, and its trace then runs without fa_serve.
    """
    if torch.compiler.is_compiling():
        return True
    if not (torch._C._is_tracing() and q.is_cuda):
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """`fa_serve.attention` -> out (batch, seqlen_q, num_heads, head_dim_v), contiguous, because models view it as they like.

    The sdpa backend returns a view in another order where it computes heads before tokens.
    """
    left, right = window_size
    if is_traced(q, k, v):
        return cast(Tensor, _attention_op(q, k, v, mask, sinks, softmax_scale, left, right, softcap))
    return _attention(q, k, v, mask, sinks, softmax_scale, left, right, softcap)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """`fa_serve.attention_varlen` -> out (total_q, num_heads, head_dim_v), which every backend allocates as such."""
    function = _attention_varlen_op if is_traced(q, k, v) else _attention_varlen
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return cast(Tensor, function(q, k, v, *lengths, sinks, softmax_scale, *window_size, softcap))


def _attention(
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
    return api.attention(
        q, k, v, softmax_scale=softmax_scale, window_size=(left, right), softcap=softcap, sinks=sinks, mask=mask
    ).contiguous()


def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    softmax_scale: float | None,
    left: int,
    right: int,
    softcap: float,
) -> Tensor:
    out = api.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        window_size=(left, right),
        softcap=softcap,
        sinks=sinks,
    )
    return cast(Tensor, out)


_attention_op = torch.library.custom_op("fa_serve::attention", _attention, mutates_args=())
_attention_varlen_op = torch.library.custom_op("fa_serve::attention_varlen", _attention_varlen, mutates_args=())


@_attention_op.register_fake
@_attention_varlen_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
