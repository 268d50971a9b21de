"""FlashAttention-4's functions: the signatures of its `flash_attn.cute`, as of 4.0.0b36.

    out, _ = flash_attn_func(q, k, v, causal=True)
    out, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    out, _ = flash_attn_varlen_func(q, k_cache, v_cache, seqused_k=lengths, page_table=pages, causal=True)

Every function returns (out, lse). The lse is None unless `return_lse` is set.

Arguments that both attention functions share, in addition to those of `fa_serve.flash_attn.flash_attn_interface`:

    window_size:    (left, right), None unlimited. Two negative numbers are unlimited too; a single negative number is refused
    learnable_sink: (num_heads,): one more logit per head in the denominator of the softmax
    num_splits:     parts of each sequence's keys in a cache, 0 lets a heuristic choose. Other calls do not split the keys
    pack_gqa:       has no effect: the kernels choose
    qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, block_sparse_tensors,
    block_sparse_tensors_bwd, gather_bwd_recompute_p, gather_bwd_token_chunk: must have their defaults

Differences from FlashAttention-4: FlashAttention-4 also returns the lse for tensors that require gradients, and its lse has the
heads last where k and v are one tensor with a head_dim of 512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.flash_attn.arguments import (
    NO_QV,
    UNLIMITED,
    host_integer,
    refuse,
    refuse_float8,
    refuse_tensor,
    softmax_arguments,
)
from fa_serve.flash_attn.cached_attention import as_batch, attend_cache, even_starts
from fa_serve.flash_attn.interface import flash_attn_combine as merge_parts
from fa_serve.flash_attn.interface import get_scheduler_metadata as get_scheduler_metadata
from fa_serve.flash_attn.packed_attention import Attended, attend_packed, attend_used_queries
from fa_serve.flash_attn.stand_in import VERSION_4
from fa_serve.flash_attn.used_rows import UsedRows
from fa_serve.spec import ParameterError

__version__ = VERSION_4

Window = Sequence[int | None]

_NO_FUNCTION = "kernels are compiled before the call and cannot include a Python function"
_NO_BLOCKS = "FlashAttention-4's lists of blocks belong to a mask_mod; pass block_mask to the functions of fa_serve instead"
_NO_GATHER = "the kernels do not gather individual keys"
_NO_MOD_DATA = "only score_mod and mask_mod read it, and both are refused"
_WHY_REFUSED = {
    "qv": NO_QV,
    "gather_kv_indices": _NO_GATHER,
    "score_mod": _NO_FUNCTION,
    "score_mod_bwd": _NO_FUNCTION,
    "mask_mod": _NO_FUNCTION,
    "aux_tensors": _NO_MOD_DATA,
    "aux_scalars": _NO_MOD_DATA,
    "block_sparse_tensors": _NO_BLOCKS,
    "block_sparse_tensors_bwd": _NO_BLOCKS,
    "gather_bwd_recompute_p": _NO_GATHER,
    "gather_bwd_token_chunk": _NO_GATHER,
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Attended:
    """Attention over a dense batch.

    q: (batch, seqlen_q, num_heads, head_dim); k: (batch, seqlen_k, num_kv_heads, head_dim); v: the same with head_dim_v
    Returns out (batch, seqlen_q, num_heads, head_dim_v), and lse (batch, num_heads, seqlen_q) or None.
    """
    _refuse_unknown(
        q,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    options = _options(softmax_scale, causal, window_size, softcap, learnable_sink)
    flags = {"deterministic": deterministic, "return_lse": return_lse}
    found: Any = api.attention(q, k, v, **flags, **options)  # type: ignore[call-overload]
    return found if return_lse else (found, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Attended:
    """Attention over packed sequences, over a dense batch of which some rows are used, or over keys in pages.

    q:            (total_q, num_heads, head_dim) with `cu_seqlens_q`, else (batch, seqlen_q, num_heads, head_dim)
    k:            (total_k, num_kv_heads, head_dim) with `cu_seqlens_k`, (num_pages, page_size, num_kv_heads, head_dim) with
                  `page_table`, else (batch, seqlen_k, num_kv_heads, head_dim); v: the same with head_dim_v
    cu_seqlens_*: (batch + 1,), int32: where each sequence begins
    max_seqlen_*: upper bounds; None: the number of rows of the packed tensor
    seqused_*:    (batch,), int32: how many rows of each sequence are used, from its first row on. Other rows of `out` are 0,
                  and their lse is -inf
    page_table:   (batch, max_pages), int32: the pages of each sequence, of any size. Such a call has no gradients
    min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: have no effect
    Returns out like q with head_dim_v, and lse or None: (num_heads, total_q) for a packed q, else (batch, num_heads, seqlen_q).
    """
    _refuse_unknown(
        q,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    if page_table is not None and cu_seqlens_k is not None:
        raise ParameterError(
            "cu_seqlens_k", "be None with page_table: pass the lengths as seqused_k", tuple(cu_seqlens_k.shape)
        )
    out, lse = _attend(
        q,
        k,
        v,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        max_seqlens=(max_seqlen_q, max_seqlen_k),
        seqused=(seqused_q, seqused_k),
        page_table=page_table,
        num_splits=num_splits,
        deterministic=deterministic,
        options=_options(softmax_scale, causal, window_size, softcap, learnable_sink),
        return_lse=return_lse,
    )
    return (out, lse) if cu_seqlens_q is not None else as_batch(out, lse, *q.shape[:2])


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Attended:
    """Merge results over parts of the keys, in PyTorch.

    out_partial: (num_splits, batch, seqlen, num_heads, head_dim), or (num_splits, total_q, num_heads, head_dim) of packed rows
    lse_partial: (num_splits, batch, seqlen, num_heads), or (num_splits, total_q, num_heads)
    cu_seqlens:  (batch + 1,), int32: where each packed sequence begins
    seqused:     (batch,), int32: how many rows of each sequence are used. Other rows of `out`, and packed rows after the last
                 sequence, are 0, and their lse is -inf
    virtual_batch_idx: must be None
    Returns out in `out_dtype`, and lse, with the shapes above without num_splits.
    """
    refuse_tensor("virtual_batch_idx", "all sequences are merged together, in no particular order", virtual_batch_idx)
    merged, lse = merge_parts(out_partial, lse_partial, None, out_dtype)
    if cu_seqlens is not None:
        is_used = UsedRows.of(lse, cu_seqlens, cu_seqlens.diff() if seqused is None else seqused).is_used
    elif seqused is not None:
        is_used = torch.arange(lse.shape[1], device=lse.device) < seqused[:, None]
    else:
        is_used = None
    if is_used is not None:
        merged = merged.masked_fill(~is_used[..., None, None], 0.0)
        lse = lse.masked_fill(~is_used[..., None], float("-inf"))
    return merged if out is None else out.copy_(merged), lse if return_lse else None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    max_seqlens: tuple[int | None, int | None],
    seqused: tuple[Tensor | None, Tensor | None],
    page_table: Tensor | None,
    num_splits: int,
    deterministic: bool,
    options: dict[str, Any],
    return_lse: bool,
) -> Attended:
    """-> out (total_q, num_heads, head_dim_v), and lse (num_heads, total_q) or None. Pairs are for (queries, keys)."""
    seqused_q, seqused_k = seqused
    rows, starts_q, longest_q = _packed(q, cu_seqlens[0], max_seqlens[0])
    differentiable = _needs_gradients(q, k, v, options.get("sinks"))
    if page_table is None and (seqused_k is None or cu_seqlens[1] is not None or differentiable):
        keys, starts_k, longest_k = _packed(k, cu_seqlens[1], max_seqlens[1])
        return attend_packed(
            rows,
            keys,
            v if cu_seqlens[1] is not None else v.flatten(0, 1),
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            deterministic=deterministic,
            options=options,
            return_lse=return_lse,
        )
    cache: dict[str, Any] = {"cache_seqlens": seqused_k, "block_table": page_table, "num_splits": num_splits}

    def attend(rows: Tensor, starts: Tensor) -> Attended:
        lengths: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": longest_q}
        return attend_cache(rows, k, v, None, None, options=options, return_lse=return_lse, **lengths, **cache)

    return attend_used_queries(rows, starts_q, seqused_q, attend)


def _refuse_unknown(q: Tensor, **given: Any) -> None:
    """Refuse float8 queries, and arguments that are neither None nor empty."""
    refuse_float8(q)
    for name, value in given.items():
        if isinstance(value, Tensor):
            refuse(name, f"be None, because {_WHY_REFUSED[name]}", tuple(value.shape))
        if value:
            refuse(name, f"be {'False' if value is True else 'None'}, because {_WHY_REFUSED[name]}", value)


def _options(
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float, learnable_sink: Tensor | None
) -> dict[str, Any]:
    """`softmax_arguments` for a window in which None means unlimited."""
    left, right = window_size
    bounds = [bound for bound in (left, 0 if causal else right) if bound is not None]
    if left is not None and right is not None and max(left, right) < 0:
        window: Sequence[int] = UNLIMITED
    elif any(bound < 0 for bound in bounds):
        refuse("window_size", "have numbers >= 0 or None, because a window includes its query's position", window_size)
    else:
        window = tuple(-1 if bound is None else bound for bound in (left, right))
    return softmax_arguments(softmax_scale, causal, window, softcap, sinks=learnable_sink)


def _packed(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[Tensor, Tensor, int]:
    """(rows, cu_seqlens, an upper bound of the lengths) of packed sequences or of a dense batch."""
    if cu_seqlens is None:
        return x.flatten(0, 1), even_starts(x.shape[0], x.shape[1], x.device), x.shape[1]
    return x, cu_seqlens, x.shape[0] if max_seqlen is None else host_integer(max_seqlen)


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
