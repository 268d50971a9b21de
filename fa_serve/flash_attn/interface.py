"""FlashAttention-3's functions: the signatures of its `flash_attn_interface`.

    out = flash_attn_func(q, k, v, causal=True)
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, seqused_k=lengths)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, page_table=pages, causal=True)

Arguments that all functions share, in addition to those of `fa_serve.flash_attn.flash_attn_interface`:

    qv:                must be None
    q_descale:         must be None: queries are float16, bfloat16 or float32
    k_descale, v_descale: must be None, except for a float8 cache of `flash_attn_with_kvcache`
    attention_chunk:   c cuts the keys of each sequence into chunks of c, the first of which begins at its first key. A query
                       sees only the keys of its chunk; refused unless the call is causal and has no window on the left
    num_splits:        parts of each sequence's keys in `flash_attn_with_kvcache`, 0 lets a heuristic choose. The other
                       functions do not split the keys
    pack_gqa, sm_margin, scheduler_metadata: have no effect: the kernels choose their own schedule
    return_attn_probs: returns (out, softmax_lse)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.flash_attn.arguments import (
    NO_FLOAT8,
    NO_QV,
    UNLIMITED,
    host_integer,
    refuse,
    refuse_float8,
    refuse_tensor,
    softmax_arguments,
)
from fa_serve.flash_attn.cached_attention import attend_cache
from fa_serve.flash_attn.packed_attention import attend_packed

Window = Sequence[int] | Tensor
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a dense batch.

    q: (batch, seqlen_q, num_heads, head_dim); k: (batch, seqlen_k, num_kv_heads, head_dim); v: the same with head_dim_v
    Returns out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse (batch, num_heads, seqlen_q)).
    """
    _refuse_unknown(q, qv, q_descale, k_descale, v_descale)
    options = softmax_arguments(softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk)
    flags = {"deterministic": deterministic, "return_lse": return_attn_probs}
    found: Result = api.attention(q, k, v, **flags, **options)  # type: ignore[call-overload]
    return found


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim).

    With `num_heads_q`, qkv is (batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim).
    """
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    elif num_heads_q is None:
        refuse("num_heads_q", "be given for a qkv with four dimensions", None)
    else:
        num_kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = torch.split(qkv, [num_heads_q, num_kv_heads, num_kv_heads], dim=-2)
    descales = (q_descale, k_descale, v_descale)
    options: tuple[Any, ...] = (window_size, attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, *descales, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over sequences packed end to end.

    q: (total_q, num_heads, head_dim); k: (total_k, num_kv_heads, head_dim); v: the same with head_dim_v
    cu_seqlens_*: (batch + 1,), int32: where each sequence begins
    seqused_*:    (batch,), int32: how many rows of each sequence are used, from its first row on. Other rows of `out` are 0,
                  and their lse is -inf
    Returns out (total_q, num_heads, head_dim_v), or (out, softmax_lse (num_heads, total_q)).
    """
    _refuse_unknown(q, qv, q_descale, k_descale, v_descale)
    out, lse = attend_packed(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=host_integer(max_seqlen_q),
        max_seqlen_k=host_integer(max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        deterministic=deterministic,
        options=softmax_arguments(softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk),
        return_lse=return_attn_probs,
    )
    return out if lse is None else (out, lse)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Append new keys and values to a KV cache, in place, and attend to all of it. Has no gradients, and can be captured.

    The arguments are those of FlashAttention-2's function, where `page_table` is called `block_table`, and:

    q:                (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with `cu_seqlens_q`
    k, v:             (batch, seqlen_new, num_kv_heads, head_dim), or (total_new, ...) with `cu_seqlens_k_new`
    cu_seqlens_q:     (batch + 1,), int32; needs `max_seqlen_q`, an upper bound on the host
    cu_seqlens_k_new: (batch + 1,), int32
    rotary_seqlens:   (batch,), int32: the position of the first rotated row, instead of `cache_seqlens`
    k_descale, v_descale: (num_kv_heads,), or expanded to (batch, num_kv_heads), float32, for a float8 cache
    Returns out like q with head_dim_v, or (out, softmax_lse). The lse is (batch, num_heads, seqlen_q), or (num_heads, total_q)
    for a packed q.
    """
    _refuse_unknown(q, qv, q_descale, None, None)
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary=None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=None if max_seqlen_q is None else host_integer(max_seqlen_q),
        k_descale=_head_descale("k_descale", k_descale),
        v_descale=_head_descale("v_descale", v_descale),
        num_splits=num_splits,
        options=softmax_arguments(softmax_scale, causal, window_size, softcap, attention_chunk=attention_chunk),
        return_lse=return_softmax_lse,
    )
    return out if lse is None else (out, lse)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge results over parts of the keys, in PyTorch.

    out_partial: (num_splits, ..., num_heads, head_dim), float32; lse_partial: (num_splits, ..., num_heads), float32
    Returns out (..., num_heads, head_dim) in `out_dtype`, and lse (..., num_heads).
    """
    if lse_partial.shape != out_partial.shape[:-1]:
        rule = f"have the shape of out_partial without head_dim, {tuple(out_partial.shape[:-1])}"
        refuse("lse_partial", rule, tuple(lse_partial.shape))
    lse = lse_partial.logsumexp(dim=0)
    share = (lse_partial - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    merged = torch.einsum("s...d,s...->...d", out_partial, share)
    merged = merged.to(out_dtype or out_partial.dtype)
    return merged if out is None else out.copy_(merged), lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None: the kernels choose their own schedule, and `scheduler_metadata` has no effect."""


def _refuse_unknown(
    q: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    refuse_tensor("qv", NO_QV, qv)
    refuse_float8(q)
    for name, given in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        refuse_tensor(name, NO_FLOAT8, given)


def _head_descale(name: str, descale: Tensor | None) -> Tensor | None:
    """(num_kv_heads,) of a descale that may be expanded over the batch."""
    if descale is None or descale.dim() == 1:
        return descale
    if descale.dim() != 2 or (descale.stride(0) and descale.shape[0] > 1):
        refuse(name, "have the shape (num_kv_heads,), or be expanded from it to (batch, num_kv_heads)", tuple(descale.shape))
    return descale[0]
