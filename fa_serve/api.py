"""The public functions: attention, attention_varlen, attention_paged, store_kv. They validate, fill in defaults and dispatch.

    out = fa_serve.attention(q, k, v, causal=True)
    out = fa_serve.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=512, max_seqlen_k=512)
    fa_serve.store_kv(k, v, k_cache, v_cache, slot_mapping)
    out = fa_serve.attention_paged(q, k_cache, v_cache, block_table=pages, seqused_k=lengths, cu_seqlens_q=cu, ...)

Conventions shared by all:

- Causality and windows are aligned to the bottom-right corner: the last query sees up to the last key. Query i sees key j
  when i + offset - left <= j <= i + offset + right, offset = seqlen_k - seqlen_q.
- `window_size=(left, right)`, -1 unlimited; `causal=True` means right = 0.
- `softmax_scale` defaults to head_dim ** -0.5. `softcap` s (0.0 off) turns a scaled score x into s * tanh(x / s).
- `sinks` (num_heads,): one more logit per head in the denominator of the softmax, without a value.
- `lse`: float32, the natural logarithm of the softmax denominator including the sink (float64 from the reference for float64
  input). A row that sees no key returns 0, and its lse is -inf (with sinks, its lse is the sink).
- The host never reads lengths on a GPU (`cu_seqlens_*`, `seqused_k`); the caller guarantees their values. `max_seqlen_*` are
  host integers and upper bounds.
- Calls that look alike are decided once (see `backends.plan`): checks, the backend and its tiles are kept in a plan.

Algorithm: FlashAttention-2 (Dao 2023, arXiv:2307.08691), FlashAttention-3 on Hopper (Shah et al. 2024, arXiv:2407.08608),
the paged cache of vLLM (Kwon et al. 2023, arXiv:2309.06180). This module leaves out everything that a backend decides (strides,
tiles, architecture); `argument_checks` holds the checks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fa_serve.argument_checks import (
    SoftmaxOptions,
    check_block_table,
    check_cache,
    check_descale,
    check_index,
    check_lengths,
    check_mask,
    check_out,
    check_qkv,
    check_store,
    softmax_options,
)
from fa_serve.backends import MAX_KEYS_PER_TILE as MAX_KEYS_PER_TILE
from fa_serve.backends import select_backend
from fa_serve.backends.chunks import divides_keys
from fa_serve.backends.mixed import plan_mixed
from fa_serve.backends.plan import PLANS, AttentionOptions, AttentionTensors, Run, StoreTensors, facts, growing_facts
from fa_serve.spec import FEW_QUERIES, AttentionSpec, Layout, Op, arch_of


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a dense batch.

    q:    (batch, seqlen_q, num_heads, head_dim), float16, bfloat16, float32 (float64 on the reference)
    k:    (batch, seqlen_k, num_kv_heads, head_dim); num_heads is a multiple of num_kv_heads (GQA, MQA)
    v:    (batch, seqlen_k, num_kv_heads, head_dim_v)
    mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k); bool keeps where True, float is added to the scores
          after softcap. It applies in addition to `causal` and `window_size`.
    out:  (batch, seqlen_q, num_heads, head_dim_v), written in place and returned
    Returns out, or (out, lse) with lse (batch, num_heads, seqlen_q).

    Raises ValueError or TypeError that names the argument, and UnsupportedError with every reason when no backend can serve
    the call.
    """
    options = (causal, _as_float(softmax_scale), tuple(window_size), float(softcap), return_lse, backend)
    if sinks is not None:
        sinks = sinks.contiguous()
    tensors = AttentionTensors(q, k, v, sinks, mask, out=out)
    # One query per sequence behind a cache that grows: the calls of all steps look alike.
    growing = growing_facts(q, k, v, mask) if q.dim() == 4 and q.shape[1] == 1 and out is None else None
    key: tuple[Any, ...]
    if growing is None:
        key = ("dense", facts(q, k, v, sinks, mask, out), options)
    else:
        key = ("growing", growing, facts(sinks), options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_dense(tensors, options))
    result, lse = run(tensors)
    return result if lse is None else (result, lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences packed end to end, without padding.

    q:            (total_q, num_heads, head_dim); k: (total_k, num_kv_heads, head_dim); v: (total_k, num_kv_heads, head_dim_v)
    cu_seqlens_q: (batch + 1,), int32, on q's device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; empty allowed
    cu_seqlens_k: the same for the rows of k and v
    max_seqlen_*: upper bounds of the lengths, host integers
    Returns out (total_q, num_heads, head_dim_v), or (out, lse) with lse (num_heads, total_q).
    """
    options = (causal, _as_float(softmax_scale), tuple(window_size), float(softcap), return_lse, backend)
    tensors = AttentionTensors(q, k, v, _contiguous(sinks), None, _contiguous(cu_seqlens_q), _contiguous(cu_seqlens_k), out=out)
    key = (
        "varlen",
        facts(q, k, v, tensors.sinks, tensors.cu_seqlens_q, tensors.keys, out),
        max_seqlen_q,
        max_seqlen_k,
        options,
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_varlen(tensors, max_seqlen_q, max_seqlen_k, options))
    result, lse = run(tensors)
    return result if lse is None else (result, lse)


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over a paged KV cache: prompts, chunks of prompts and single tokens in one call.

    q:            (total_q, num_heads, head_dim), packed by cu_seqlens_q (batch + 1,), int32
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim); v_cache: the same with head_dim_v. Any strides, as long as
                  the last dimension is contiguous; q's dtype, or float8_e4m3fn with k_descale and v_descale
    block_table:  (batch, max_pages), int32: the pages of each sequence in order; entries past seqused_k are never read
    seqused_k:    (batch,), int32: keys in the cache, including the keys of this call's queries
    max_seqlen_k: upper bound of seqused_k, default max_pages * page_size
    k_descale:    (num_kv_heads,), float32: what a stored key is multiplied by (float8 caches only); v_descale likewise
    num_splits:   0 lets a heuristic on host-known shapes choose, 1 none, n > 1 exactly n parts of each sequence's keys
    Returns out (total_q, num_heads, head_dim_v), or (out, lse) with lse (num_heads, total_q).
    """
    options = (causal, _as_float(softmax_scale), tuple(window_size), float(softcap), return_lse, backend)
    tensors = AttentionTensors(
        q,
        k_cache,
        v_cache,
        _contiguous(sinks),
        None,
        _contiguous(cu_seqlens_q),
        _contiguous(seqused_k),
        block_table if block_table.stride()[-1:] == (1,) else block_table.contiguous(),
        _contiguous(k_descale),
        _contiguous(v_descale),
        out,
    )
    is_aligned = not (k_cache.data_ptr() | v_cache.data_ptr()) & 15
    key = ("paged", facts(*tensors), max_seqlen_q, max_seqlen_k, num_splits, is_aligned, options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, options))
    result, lse = run(tensors)
    return result if lse is None else (result, lse)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write new keys and values into a paged cache, in place.

    k:            (total, num_kv_heads, head_dim); v: (total, num_kv_heads, head_dim_v)
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim); v_cache has the same layout. A float8_e4m3fn
                  cache stores k / k_descale, saturated at +-448
    slot_mapping: (total,), int64: page * page_size + position in the page; -1 skips the token
    """
    tensors = StoreTensors(k, v, k_cache, v_cache, slot_mapping.contiguous(), _contiguous(k_descale), _contiguous(v_descale))
    key = ("store", facts(*tensors), backend)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_store(tensors, backend))
    run(tensors)


Options = tuple[bool, float | None, tuple[int, ...], float, bool, str]
"""causal, softmax_scale, window_size, softcap, return_lse and backend, as they were given."""


def _as_float(softmax_scale: float | None) -> float | None:
    return softmax_scale if softmax_scale is None else float(softmax_scale)


def _contiguous(x: Any) -> Any:
    """The same numbers in the layout that kernels read; None stays None."""
    return x if x is None else x.contiguous()


def _plan_dense(tensors: AttentionTensors, given: Options) -> Run:
    q, k, v, sinks, mask = tensors[:5]
    causal, scale, window_size, softcap, return_lse, backend = given
    check_qkv("dense", q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}")
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    if mask is not None:
        check_mask(mask, q, k)
    check_out(tensors.out, q, v)
    over_keys = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
    op: Op = "decode" if 0 < q.shape[1] <= FEW_QUERIES < k.shape[1] and over_keys else "attention"
    spec = _spec("dense", op, tensors, options)
    if backend == "auto" and over_keys and divides_keys(spec, q.shape[0], q.shape[1], k.shape[1], _multiprocessors(q)):
        spec = replace(spec, op="decode")
    complete = AttentionOptions(*options, q.shape[1], k.shape[1], return_lse)
    return select_backend(spec, backend).plan(spec, tensors, complete)


def _plan_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, given: Options) -> Run:
    q, k, v, sinks = tensors[:4]
    causal, scale, window_size, softcap, return_lse, backend = given
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    check_qkv("varlen", q, k, v)
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    check_index("cu_seqlens_k", tensors.keys, q, tensors.cu_seqlens_q.shape[0])
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    check_out(tensors.out, q, v)
    spec = _spec("varlen", "attention", tensors, options)
    complete = AttentionOptions(*options, max_seqlen_q, max_seqlen_k, return_lse)
    return select_backend(spec, backend).plan(spec, tensors, complete)


def _plan_paged(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, given: Options) -> Run:
    q, k_cache, v_cache, sinks = tensors[:4]
    causal, scale, window_size, softcap, return_lse, backend = given
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    assert tensors.block_table is not None
    check_qkv("paged", q, k_cache, v_cache)
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    batch = tensors.cu_seqlens_q.shape[0] - 1
    check_index("seqused_k", tensors.keys, q, batch)
    check_block_table(tensors.block_table, q, batch)
    capacity = tensors.block_table.shape[1] * k_cache.shape[1]
    length = capacity if max_seqlen_k is None else max_seqlen_k
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=length)
    if length > capacity:
        raise ValueError(f"max_seqlen_k must be at most max_pages * page_size = {capacity}, got {length}")
    if num_splits < 0:
        raise ValueError(f"num_splits must be 0 (heuristic) or positive, got {num_splits}")
    check_cache(k_cache, v_cache)
    check_descale(k_cache, tensors.k_descale, tensors.v_descale)
    check_out(tensors.out, q, v_cache)
    decodes = max_seqlen_q <= FEW_QUERIES or num_splits > 0 or k_cache.dtype != q.dtype
    spec = _spec("paged", "decode" if decodes else "attention", tensors, options)
    unequal = q.shape[0] < batch * max_seqlen_q
    if backend == "auto" and not unequal and divides_keys(spec, batch, max_seqlen_q, length, _multiprocessors(q)):
        spec = replace(spec, op="decode")
    complete = AttentionOptions(*options, max_seqlen_q, length, return_lse, num_splits)
    chosen = select_backend(spec, backend)
    if not decodes and unequal:
        # Some sequences have fewer queries than the longest one, and may be decoding.
        decode_spec = _spec("paged", "decode", tensors, options)
        decoder = select_backend(decode_spec, backend) if backend == "auto" else chosen
        if decoder.mixed_rows is not None and decoder.supports(decode_spec) is None:
            return plan_mixed(decoder, chosen, spec, tensors, complete)
    return chosen.plan(spec, tensors, complete)


def _multiprocessors(q: Tensor) -> int:
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0


def _plan_store(tensors: StoreTensors, backend: str) -> Run:
    k, v, k_cache, v_cache, slot_mapping, k_descale, v_descale = tensors
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_cache(k_cache, v_cache)
    check_descale(k_cache, k_descale, v_descale)
    spec = AttentionSpec(
        layout="paged",
        device=k.device.type,
        arch=arch_of(k.device),
        dtype=k.dtype,
        kv_dtype=k_cache.dtype,
        head_dim=k.shape[2],
        head_dim_v=v.shape[2],
        num_heads=k.shape[1],
        num_kv_heads=k.shape[1],
        page_size=k_cache.shape[1],
        op="store_kv",
    )
    return select_backend(spec, backend).plan(spec, tensors, None)


def _spec(layout: Layout, op: Op, tensors: AttentionTensors, options: SoftmaxOptions) -> AttentionSpec:
    q, k, v, sinks, mask = tensors[:5]
    paged = layout == "paged"
    return AttentionSpec(
        layout=layout,
        device=q.device.type,
        arch=arch_of(q.device),
        dtype=q.dtype,
        kv_dtype=k.dtype,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        window_size=options.window_size,
        softcap=options.softcap != 0.0,
        sinks=sinks is not None,
        mask=None if mask is None else "bool" if mask.dtype == torch.bool else "float",
        page_size=k.shape[1] if paged else 0,
        needs_grad=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks, mask)),
        op=op,
        whole_rows=not paged or (_has_whole_rows(k) and _has_whole_rows(v)),
    )


def _has_whole_rows(cache: Tensor) -> bool:
    """Whether tokens and heads are multiples of 16 bytes apart, and a page is a whole number of tokens."""
    page, token, head, _ = cache.stride()
    return token > 0 and page % token == 0 and not ((token | head) * cache.element_size() | cache.data_ptr()) & 15
