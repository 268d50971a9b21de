"""FlashAttention-2's functions: dense, packed and cached attention, with the signatures of flash-attn 2.8.

    out = flash_attn_func(q, k, v, causal=True)                                   # (batch, seqlen, heads, dim)
    out = flash_attn_varlen_func(q, k, v, cu, cu, max_seqlen, max_seqlen)         # (total, heads, dim)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

Arguments that all functions share:

    dropout_p:         must be 0
    softmax_scale:     default head_dim ** -0.5
    causal:            aligned to the bottom-right corner
    window_size:       (left, right), -1 unlimited
    softcap:           off unless it is positive
    alibi_slopes:      (num_heads,) or (batch, num_heads), float32
    deterministic:     equal calls have equal gradients in every bit. The forward pass is deterministic in any case
    return_attn_probs: returns (out, softmax_lse, probabilities). The probabilities are an empty tensor, as in flash-attn
                       without dropout

Differences from flash-attn: float32 is allowed, head_dim may be any number, a page may have any size, and the lse of a row that
sees no key is -inf. With alibi_slopes, the lse belongs to the bias -slope * |i + seqlen_k - seqlen_q - j|. In causal calls
flash-attn adds slope * j instead, which gives the same probabilities and an lse that is larger by
slope * (i + seqlen_k - seqlen_q).

Raises ParameterError for an argument that is refused, and otherwise what `fa_serve.api` raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.flash_attn.arguments import UNLIMITED, host_integer, refuse_dropout, softmax_arguments
from fa_serve.flash_attn.cached_attention import attend_cache, packed_lengths
from fa_serve.spec import UnsupportedError

Window = Sequence[int] | Tensor
Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a dense batch.

    q:    (batch, seqlen_q, num_heads, head_dim)
    k, v: (batch, seqlen_k, num_kv_heads, head_dim); num_heads is a multiple of num_kv_heads
    Returns out like q, or (out, softmax_lse (batch, num_heads, seqlen_q), empty tensor).
    """
    if dropout_p:
        refuse_dropout(dropout_p)
    options = softmax_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
    flags = {"deterministic": deterministic, "return_lse": return_attn_probs}
    found: Any = api.attention(q, k, v, **flags, **options)  # type: ignore[call-overload]
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim), without copying its parts."""
    q, k, v = qkv.unbind(2)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, num_kv_heads, head_dim), without copying its parts."""
    k, v = kv.unbind(2)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention over sequences packed end to end.

    q:            (total_q, num_heads, head_dim)
    k, v:         (total_k, num_kv_heads, head_dim), or (num_pages, page_size, num_kv_heads, head_dim) with `block_table`
    cu_seqlens_*: (batch + 1,), int32: where each sequence begins; the lengths of the keys, with `block_table`
    block_table:  (batch, max_pages), int32: the pages of each sequence. Such a call has no gradients
    Returns out like q, or (out, softmax_lse (num_heads, total_q), empty tensor).
    """
    if dropout_p:
        refuse_dropout(dropout_p)
    lengths: dict[str, Any] = {"max_seqlen_q": host_integer(max_seqlen_q), "max_seqlen_k": host_integer(max_seqlen_k)}
    if block_table is None:
        options = softmax_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
        found: Any = api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            deterministic=deterministic,
            return_lse=return_attn_probs,
            **lengths,
            **options,
        )
    else:
        options = softmax_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
        with torch.no_grad():
            found = api.attention_paged(
                q,
                k,
                v,
                block_table=block_table,
                seqused_k=packed_lengths(cu_seqlens_k),
                cu_seqlens_q=cu_seqlens_q,
                return_lse=return_attn_probs,
                **lengths,
                **options,
            )
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv (total, 3, num_heads, head_dim), without copying its parts."""
    q, k, v = qkv.unbind(1)
    lengths: tuple[Any, ...] = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_varlen_func(q, k, v, *lengths, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q and kv (total_k, 2, num_kv_heads, head_dim), without copying its parts."""
    k, v = kv.unbind(1)
    lengths: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_varlen_func(q, k, v, *lengths, *options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a KV cache, in place, and attend to all of it. Has no gradients, and can be captured.

    q:               (batch, seqlen_q, num_heads, head_dim)
    k_cache:         (batch_cache, seqlen_cache, num_kv_heads, head_dim), or (num_pages, page_size, num_kv_heads, head_dim) with
                     `block_table`; v_cache: the same
    k, v:            (batch, seqlen_new, num_kv_heads, head_dim), written from position `cache_seqlens` on
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v only. Row i of k is rotated at cache_seqlens + i. So is
                     row i of q if the call is causal or has a window; else all rows of q are rotated at cache_seqlens
    cache_seqlens:   keys in the cache before the call: an int, (batch,) int32, or None for a full cache
    cache_batch_idx: (batch,), int32: the row of the cache, or of `block_table`, of each sequence
    cache_leftpad:   (batch,), int32: the position of each sequence's first key
    block_table:     (batch, max_pages), int32: the pages of each sequence
    num_splits:      parts of each sequence's keys; 0 lets a heuristic choose
    Returns out like q, or (out, softmax_lse (batch, num_heads, seqlen_q)).
    """
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary=None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        num_splits=num_splits,
        options=softmax_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_lse=return_softmax_lse,
    )
    return out if lse is None else (out, lse)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, empty tensor, empty state of random numbers): the operator below `flash_attn_func`.

    It is private in flash-attn, but packages such as diffusers import it to attend to parts of the keys in turn.
    """
    window = (window_size_left, window_size_right)
    found: Any = flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, True)
    return (*found, torch.empty(2, dtype=torch.int64, device=q.device))


def _flash_attn_backward(*args: Any, **kwargs: Any) -> NoReturn:
    """Gradients come from autograd; there is no operator that others could call."""
    raise UnsupportedError("fa_serve.flash_attn has no backward operator: call flash_attn_func, which autograd differentiates")


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
