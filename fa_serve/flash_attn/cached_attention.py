"""Attention over a KV cache as flash-attn defines it: append new keys and values, rotate, attend.

    out, lse = attend_cache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, options=options)

A contiguous cache (batch, seqlen, heads, dim) is a paged cache with one page per sequence, so that every call becomes
`fa_serve.store_kv` and `fa_serve.attention_paged`. Sequences that begin after the start of their cache (`cache_leftpad`) are
read as pages of one token. The host reads nothing from the device, so a call can be captured in a CUDA graph.

Left out: float8 queries, and the softmax arguments, which the callers translate.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fa_serve import api
from fa_serve.flash_attn.arguments import refuse
from fa_serve.flash_attn.rotary import rotate, row_positions, sequence_of_rows
from fa_serve.spec import ParameterError

Rotary = tuple[Tensor, Tensor]


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    options: dict[str, Any],
    rotary: Rotary | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Append, rotate and attend, with the arguments of FlashAttention-2's and FlashAttention-3's `flash_attn_with_kvcache`.

    q:    (batch, seqlen_q, heads, dim), or (total_q, heads, dim) with `cu_seqlens_q` and `max_seqlen_q`
    k, v: (batch, seqlen_new, kv_heads, dim), or (total_new, kv_heads, dim) with `cu_seqlens_k_new`

    Returns out like q, and lse (batch, heads, seqlen_q), or (heads, total_q) for a packed q, or None.
    """
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    is_plain = k is None and v is None and rotary is None and cu_seqlens_q is None
    if not is_plain:
        given = {"k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
        _check(given | {"max_seqlen_q": max_seqlen_q, "cache_seqlens": cache_seqlens}, rotary)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        table = _table(batch, k_cache, cache_batch_idx, block_table)
        lengths = cache_seqlens if isinstance(cache_seqlens, Tensor) else _lengths(cache_seqlens, batch, table, k_cache)
        if rotary is not None:
            at = lengths if rotary_seqlens is None else rotary_seqlens
            moves = options["causal"] or options["window_size"] != (-1, -1)
            q = rotate(q, *rotary, _query_positions(q, at, cu_seqlens_q, moves), rotary_interleaved)
        if k is not None and v is not None:
            if rotary is not None:
                k = rotate(k, *rotary, row_positions(k, at, cu_seqlens_k_new), rotary_interleaved)
            slots = _slots(k, lengths, table, k_cache.shape[1], cu_seqlens_k_new)
            new_k, new_v = (x if x.dim() == 3 else x.flatten(0, 1) for x in (k, v))
            api.store_kv(new_k, new_v, k_cache, v_cache, slots, k_descale=k_descale, v_descale=v_descale)
            lengths = lengths + (k.shape[1] if cu_seqlens_k_new is None else packed_lengths(cu_seqlens_k_new))
            lengths = lengths.clamp(max=table.shape[1] * k_cache.shape[1])
        if cache_leftpad is not None:
            table, k_cache, v_cache = _token_pages(table, cache_leftpad, k_cache, v_cache)
            lengths = (lengths - cache_leftpad).clamp(min=0)
        result = api.attention_paged(
            q.flatten(0, 1) if cu_seqlens_q is None else q,
            k_cache,
            v_cache,
            block_table=table,
            seqused_k=lengths,
            cu_seqlens_q=even_starts(batch, q.shape[1], q.device) if cu_seqlens_q is None else cu_seqlens_q,
            max_seqlen_q=q.shape[1] if max_seqlen_q is None else max_seqlen_q,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=num_splits,
            return_lse=return_lse,
            **options,
        )
    out, lse = result if isinstance(result, tuple) else (result, None)
    if cu_seqlens_q is not None:
        return out, lse
    return as_batch(out, lse, batch, q.shape[1])


def as_batch(out: Tensor, lse: Tensor | None, batch: int, seqlen: int) -> tuple[Tensor, Tensor | None]:
    """Results of sequences of one length: out (batch, seqlen, heads, dim), and lse (batch, heads, seqlen)."""
    out = out.view(batch, seqlen, *out.shape[1:])
    return out, None if lse is None else lse.view(-1, batch, seqlen).transpose(0, 1)


def packed_lengths(cu_seqlens: Tensor) -> Tensor:
    """The lengths (batch,) of packed sequences with these cu_seqlens (batch + 1,)."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def _check(given: dict[str, Any], rotary: Rotary | None) -> None:
    """The checks that flash-attn makes before it looks at a tensor; `given` holds arguments of `attend_cache` by name."""
    for one, other in (("k", "v"), ("v", "k"), ("cu_seqlens_k_new", "k"), ("cu_seqlens_q", "max_seqlen_q")):
        if given[one] is not None and given[other] is None:
            raise ParameterError(other, f"be given with {one}", None)
    if given["k"] is not None and given["cache_seqlens"] is None:
        raise ParameterError("cache_seqlens", "be given with k and v: they are written from this position on", None)
    if rotary is not None and given["k"] is None:
        raise ParameterError("rotary_cos", "be None without k and v", tuple(rotary[0].shape))


def _table(batch: int, k_cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor:
    """(batch, max_pages), int32: the pages of each sequence; the rows of a contiguous cache are its pages."""
    if block_table is not None:
        return block_table if cache_batch_idx is None else block_table[cache_batch_idx]
    if cache_batch_idx is None:
        return even_starts(batch, 1, k_cache.device)[:-1, None]
    return cache_batch_idx.to(torch.int32)[:, None]


def _lengths(cache_seqlens: int | None, batch: int, table: Tensor, k_cache: Tensor) -> Tensor:
    """(batch,), int32: the number of keys in the cache before the call, the same for all sequences; None is a full cache."""
    length = table.shape[1] * k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)


def _query_positions(q: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, moves: bool) -> Tensor:
    """The position of each row of q: the offset plus its place, or only the offset if no mask distinguishes the rows."""
    if moves:
        return row_positions(q, offsets, cu_seqlens)
    if cu_seqlens is None:
        return offsets[:, None]
    return offsets[sequence_of_rows(q, cu_seqlens)]


def _slots(k: Tensor, lengths: Tensor, table: Tensor, page_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """Where each row of k goes: page * page_size + position in the page, int64; -1 for a row past the end of the cache."""
    position = row_positions(k, lengths, cu_seqlens)
    fits = position < table.shape[1] * page_size
    if cu_seqlens is None:
        pages = table.gather(1, (position // page_size).clamp(max=table.shape[1] - 1))
    else:
        sequence = sequence_of_rows(k, cu_seqlens)
        pages = table[sequence, (position // page_size).clamp(max=table.shape[1] - 1)]
        fits &= torch.arange(k.shape[0], device=k.device) < cu_seqlens[-1]
    return torch.where(fits, pages.long() * page_size + position % page_size, -1).flatten()


def _token_pages(table: Tensor, leftpad: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The table and the caches as pages of one token, where the first page of a sequence is its first key."""
    page_size = k_cache.shape[1]
    tokens = [divmod(cache.stride(0), cache.stride(1)) for cache in (k_cache, v_cache)]  # from page to page
    if tokens[0] != tokens[1] or tokens[0][1]:
        strides = (k_cache.stride(), v_cache.stride())
        rule = "be None unless both caches have page strides that are the same multiple of their token strides"
        refuse("cache_leftpad", rule, strides)
    apart = tokens[0][0]
    position = leftpad[:, None] + torch.arange(table.shape[1] * page_size, device=table.device)
    position = position.clamp(max=table.shape[1] * page_size - 1)
    pages = table.gather(1, position // page_size)
    views = []
    for cache in (k_cache, v_cache):
        _, token, head, unit = cache.stride()
        count = (cache.shape[0] - 1) * apart + page_size
        views.append(cache.as_strided((count, 1, *cache.shape[2:]), (token, token, head, unit)))
    return (pages * apart + position % page_size).to(torch.int32), views[0], views[1]


MAX_STARTS = 256
_STARTS: dict[tuple[int, int, torch.device], Tensor] = {}


def even_starts(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """cu_seqlens of sequences of one length. A tensor allocated in a capture is filled only by a replay, so it is not kept."""
    key = (batch, seqlen, device)
    starts = _STARTS.get(key)
    if starts is not None:
        return starts
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if type(starts) is Tensor and not is_captured:
        if len(_STARTS) >= MAX_STARTS:
            _STARTS.clear()
        _STARTS[key] = starts
    return starts
