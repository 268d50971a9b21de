"""The public functions as the adapter calls them: the same, and one opaque node in the graph of a forward that is compiled.

Choosing a backend and launching its kernels is Python that a tracer should not walk through. Left out: gradients of a compiled
forward, which PyTorch then refuses by name.
"""

from __future__ import annotations

from typing import Any, cast

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


def attention_listed(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, used: Tensor, rows: Tensor, *, sinks: Tensor | None,
    softmax_scale: float | None, softcap: float,
) -> Tensor:  # fmt: skip
    """One query per row over keys that are listed by number, as transformers lays them out.

    query: (batch, heads, 1, head_dim); key, value: (batch, kv_heads, keys, dim)
    table: int32 (batch, keys), used: int32 (batch,): row b sees the keys table[b, :used[b]]; rows: int32, 0 to batch
    Returns out (batch, 1, heads, head_dim_v), contiguous.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, _attention_listed(query, key, value, table, used, rows, sinks, softmax_scale, softcap))
    batch, keys = table.shape
    stride = 0
    if batch > 1:
        # a key is a page of one token: if a row is a whole number of keys away from the next, a page's number tells both
        if not (_keys_to_next_row(key) == _keys_to_next_row(value) != 0):
            key, value = key.contiguous(), value.contiguous()
        stride = _keys_to_next_row(key)
        table = table + rows[:-1, None] * stride
    caches = (
        x.as_strided(((batch - 1) * stride + keys, 1, x.shape[1], x.shape[3]), (x.stride(2), x.stride(2), x.stride(1), 1))
        for x in (key, value)
    )
    out = api.attention_paged(
        query[:, :, 0], *caches, block_table=table, seqused_k=used, cu_seqlens_q=rows, max_seqlen_q=1, sinks=sinks,
        softmax_scale=softmax_scale, softcap=softcap,
    )  # fmt: skip
    return cast(Tensor, out)[:, None]


def _keys_to_next_row(x: Tensor) -> int:
    """How many keys lie between a row and the next, of (batch, heads, keys, dim); 0 if that is no whole number."""
    row, _, key, _ = x.stride()
    return row // key if key > 0 and row % key == 0 else 0


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


@torch.library.custom_op("fa_serve::attention_listed", mutates_args=())
def _attention_listed(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, used: Tensor, rows: Tensor, sinks: Tensor | None,
    softmax_scale: float | None, softcap: float,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"sinks": sinks, "softmax_scale": softmax_scale, "softcap": softcap}
    return attention_listed(query, key, value, table, used, rows, **options).contiguous()


@_attention_listed.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


@_attention.register_fake
@_attention_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
