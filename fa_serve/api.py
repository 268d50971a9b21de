"""The public functions: attention, attention_varlen, attention_paged, store_kv. They validate, default and dispatch.

    out = fa_serve.attention(q, k, v, causal=True)
    out = fa_serve.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=512, max_seqlen_k=512)
    fa_serve.store_kv(k, v, k_cache, v_cache, slot_mapping)
    out = fa_serve.attention_paged(q, k_cache, v_cache, block_table=pages, seqused_k=lengths, cu_seqlens_q=cu, ...)

Conventions shared by all:

- Causality and windows are aligned to the bottom-right corner: the last query sees up to the last key. Query i sees key j
  when i + offset - left <= j <= i + offset + right, offset = seqlen_k - seqlen_q.
- `window_size=(left, right)`, -1 unlimited; `causal=True` means right = 0.
- `softmax_scale` defaults to head_dim ** -0.5. `softcap` s (0.0 off) turns a scaled score x into s * tanh(x / s).
- `sinks` (num_heads,): one more logit per head in the softmax's denominator that has no value.
- `lse`: float32, natural logarithm of the softmax denominator (float64 from the reference on float64 input), the sink
  included. A row that sees no key returns 0 and lse -inf (with sinks: lse = the sink).
- Lengths on the device (`cu_seqlens_*`, `seqused_k`) are never read by the host when the tensors are on a GPU; their values
  are the caller's promise. `max_seqlen_*` are host integers and upper bounds.

Algorithm: FlashAttention-2 (Dao 2023, arXiv:2307.08691), FlashAttention-3 on Hopper (Shah et al. 2024, arXiv:2407.08608),
the paged cache of vLLM (Kwon et al. 2023, arXiv:2309.06180). Left out: anything a backend decides (strides, tiles, arch).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fa_serve.backends import Backend, select_backend
from fa_serve.backends.mixed import forward_mixed
from fa_serve.spec import FEW_QUERIES, AttentionSpec, Layout, arch_of

MAX_KEYS_PER_TILE = 128
"""The largest number of keys that a kernel reads as one tile. A cache may only give back whole tiles behind a window."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FAR = 1 << 29  # a window beyond any length; the kernels add lengths to it in 32 bits
_MOST_PLANS = 4096
# Calls that differ in addresses alone are checked once: who serves them, and with which options.
_PLANS: dict[tuple[Any, ...], tuple[Any, ...]] = {}


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
          after softcap. It comes on top of `causal` and `window_size`.
    out:  (batch, seqlen_q, num_heads, head_dim_v), written in place and returned
    Returns out, or (out, lse) with lse (batch, num_heads, seqlen_q).

    Raises ValueError or TypeError that names the argument; UnsupportedError when no backend can, with every reason.
    """
    window = tuple(window_size)
    scale = softmax_scale if softmax_scale is None else float(softmax_scale)
    (sinks,) = _side_by_side(sinks)
    key = ("dense", _facts(q, k, v, sinks, mask, out), return_lse, causal, scale, window, float(softcap), backend)
    plan = _PLANS.get(key)
    if plan is None:
        _check_qkv("dense", q, k, v)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}")
        options = _check_options(q, causal, scale, window, softcap, sinks)
        if mask is not None:
            _check_mask(mask, q, k)
        _check_out(out, q, v)
        few = q.shape[1] <= FEW_QUERIES < k.shape[1] and (
            mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
        )
        chosen = _backend("dense", q, k, v, options, sinks, mask, 0, True, backend, few)
        plan = _remember(key, chosen.forward, options)
    result, lse = plan[0](q, k, v, sinks=sinks, mask=mask, out=out, return_lse=return_lse, **plan[1])
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
    cu_seqlens_k: the same for k and v
    max_seqlen_*: upper bounds of the lengths, host integers
    Returns out (total_q, num_heads, head_dim_v), or (out, lse) with lse (num_heads, total_q).
    """
    window = tuple(window_size)
    scale = softmax_scale if softmax_scale is None else float(softmax_scale)
    cu_seqlens_q, cu_seqlens_k, sinks = _side_by_side(cu_seqlens_q, cu_seqlens_k, sinks)
    tensors = _facts(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, out)
    key = ("varlen", tensors, return_lse, max_seqlen_q, max_seqlen_k, causal, scale, window, float(softcap), backend)
    plan = _PLANS.get(key)
    if plan is None:
        _check_qkv("varlen", q, k, v)
        options = _check_options(q, causal, scale, window, softcap, sinks)
        _check_index("cu_seqlens_q", cu_seqlens_q, q, None)
        _check_index("cu_seqlens_k", cu_seqlens_k, q, cu_seqlens_q.shape[0])
        _check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        _check_out(out, q, v)
        chosen = _backend("varlen", q, k, v, options, sinks, None, 0, True, backend, False)
        plan = _remember(key, chosen.forward_varlen, options | {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
    result, lse = plan[0](
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, out=out, return_lse=return_lse, **plan[1]
    )
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
    seqused_k:    (batch,), int32: keys in the cache, those of this call's queries included
    max_seqlen_k: upper bound of seqused_k, default max_pages * page_size
    k_descale:    (num_kv_heads,), float32: what a stored key is multiplied by (float8 caches only); v_descale likewise
    num_splits:   0 lets a heuristic on host-known shapes choose, 1 none, n > 1 exactly n parts of each sequence's keys
    Returns out (total_q, num_heads, head_dim_v), or (out, lse) with lse (num_heads, total_q).
    """
    window = tuple(window_size)
    scale = softmax_scale if softmax_scale is None else float(softmax_scale)
    block_table = block_table if block_table.stride()[-1:] == (1,) else block_table.contiguous()
    seqused_k, cu_seqlens_q, sinks, k_descale, v_descale = _side_by_side(seqused_k, cu_seqlens_q, sinks, k_descale, v_descale)
    tensors = _facts(q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, sinks, k_descale, v_descale, out)
    lengths = (max_seqlen_q, max_seqlen_k, num_splits, not (k_cache.data_ptr() | v_cache.data_ptr()) & 15)
    key = ("paged", tensors, return_lse, lengths, causal, scale, window, float(softcap), backend)
    plan = _PLANS.get(key)
    if plan is None:
        _check_qkv("paged", q, k_cache, v_cache)
        options = _check_options(q, causal, scale, window, softcap, sinks)
        _check_index("cu_seqlens_q", cu_seqlens_q, q, None)
        _check_index("seqused_k", seqused_k, q, cu_seqlens_q.shape[0] - 1)
        if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.device != q.device:
            raise ValueError(
                f"block_table must be int32 (batch, max_pages) on {q.device}, got {_show(block_table)} on {block_table.device}"
            )
        if block_table.shape[0] != seqused_k.shape[0]:
            raise ValueError(f"block_table must have {seqused_k.shape[0]} rows, one per sequence, got {block_table.shape[0]}")
        page_size = k_cache.shape[1]
        capacity = block_table.shape[1] * page_size
        length = capacity if max_seqlen_k is None else max_seqlen_k
        _check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=length)
        if length > capacity:
            raise ValueError(f"max_seqlen_k must be at most max_pages * page_size = {capacity}, got {length}")
        if num_splits < 0:
            raise ValueError(f"num_splits must be 0 (heuristic) or positive, got {num_splits}")
        _check_cache(k_cache, v_cache)
        _check_descale(k_cache, k_descale, v_descale)
        _check_out(out, q, v_cache)
        few = max_seqlen_q <= FEW_QUERIES or num_splits > 0
        paging = (page_size, _of_whole_rows(k_cache) and _of_whole_rows(v_cache))
        chosen = _backend("paged", q, k_cache, v_cache, options, sinks, None, *paging, backend, few)
        forward = chosen.forward_paged
        if not few and q.shape[0] < seqused_k.shape[0] * max_seqlen_q and backend == "auto":
            decoder = _backend("paged", q, k_cache, v_cache, options, sinks, None, *paging, backend, True)
            if decoder is not chosen:  # each has a kernel for one kind of sequence
                forward = partial(forward_mixed, decoder.forward_paged, chosen.forward_paged)
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": length, "num_splits": num_splits}
        plan = _remember(key, forward, options)
    result, lse = plan[0](
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
        k_descale=k_descale,
        v_descale=v_descale,
        out=out,
        return_lse=return_lse,
        **plan[1],
    )
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
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim); v_cache likewise. A float8_e4m3fn cache stores
                  k / k_descale, saturated at +-448
    slot_mapping: (total,), int64: page * page_size + position in the page; -1 skips the token
    """
    slot_mapping, k_descale, v_descale = _side_by_side(slot_mapping, k_descale, v_descale)
    key = ("store", _facts(k, v, k_cache, v_cache, slot_mapping, k_descale, v_descale), backend)
    plan = _PLANS.get(key)
    if plan is None:
        for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if x.dim() != 3 or cache.dim() != 4 or x.shape[1:] != cache.shape[2:]:
                raise ValueError(
                    f"{name} must be (total, num_kv_heads, dim) and {name}_cache (num_pages, page_size, num_kv_heads, dim) "
                    f"of the same heads and dim, got {tuple(x.shape)} and {tuple(cache.shape)}"
                )
        if k.shape[:2] != v.shape[:2] or k_cache.shape[:3] != v_cache.shape[:3]:
            raise ValueError(
                f"k and v must agree in tokens, pages and heads, got {tuple(k.shape)} and {tuple(v.shape)}, "
                f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
            )
        if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1] or slot_mapping.device != k.device:
            raise ValueError(
                f"slot_mapping must be int64 ({k.shape[0]},) on {k.device}, got {_show(slot_mapping)} on {slot_mapping.device}"
            )
        if not k.device == v.device == k_cache.device == v_cache.device:
            raise ValueError(
                f"v, k_cache and v_cache must be on k's device {k.device}, got {v.device}, {k_cache.device} and "
                f"{v_cache.device}"
            )
        if k_cache.dtype not in (k.dtype, torch.float8_e4m3fn):
            raise TypeError(f"k_cache must have k's dtype {k.dtype} or float8_e4m3fn, got {k_cache.dtype}")
        if v.dtype != k.dtype or v_cache.dtype != k_cache.dtype:
            raise TypeError(
                f"v and v_cache must have the dtypes of k and k_cache, {k.dtype} and {k_cache.dtype}, got "
                f"{v.dtype} and {v_cache.dtype}"
            )
        _check_cache(k_cache, v_cache)
        _check_descale(k_cache, k_descale, v_descale)
        spec = AttentionSpec(
            "paged",
            k.device.type,
            arch_of(k.device),
            k.dtype,
            k_cache.dtype,
            k.shape[2],
            v.shape[2],
            k.shape[1],
            k.shape[1],
            page_size=k_cache.shape[1],
            few_queries=True,
        )
        plan = _remember(key, select_backend(spec, backend).store_kv, {})
    plan[0](k, v, k_cache, v_cache, slot_mapping, k_descale=k_descale, v_descale=v_descale)


def _facts(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Whatever is checked of tensors, and may decide who serves them."""
    grad = torch.is_grad_enabled()
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad) for x in tensors])


def _side_by_side(*tensors: Any) -> list[Any]:
    """The same numbers as kernels read them."""
    return [x if x is None else x.contiguous() for x in tensors]


def _remember(key: tuple[Any, ...], *plan: Any) -> Any:
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    return _PLANS.setdefault(key, plan)


def _backend(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    sinks: Tensor | None,
    mask: Tensor | None,
    page_size: int,
    whole_rows: bool,
    name: str,
    few_queries: bool,
) -> Backend:
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks, mask))
    spec = AttentionSpec(
        layout,
        q.device.type,
        arch_of(q.device),
        q.dtype,
        k.dtype,
        q.shape[-1],
        v.shape[-1],
        q.shape[-2],
        k.shape[-2],
        options["window_size"],
        options["softcap"] != 0.0,
        sinks is not None,
        None if mask is None else "bool" if mask.dtype == torch.bool else "float",
        page_size,
        needs_grad,
        few_queries,
        whole_rows,
    )
    chosen = select_backend(spec, name)
    options |= {"memo": {}} if getattr(chosen, "plans", False) else {}
    return chosen


def _show(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]} {tuple(x.shape)}"


def _check_qkv(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
    q_rank, k_rank = {"dense": (4, 4), "varlen": (3, 3), "paged": (3, 4)}[layout]
    k_name, v_name = ("k_cache", "v_cache") if layout == "paged" else ("k", "v")
    for name, x, rank in (("q", q, q_rank), (k_name, k, k_rank), (v_name, v, k_rank)):
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got {_show(x)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if k.dtype != q.dtype and not (layout == "paged" and k.dtype == torch.float8_e4m3fn):
        raise TypeError(f"{k_name} must have q's dtype {q.dtype}, got {k.dtype}")
    if v.dtype != k.dtype:
        raise TypeError(f"{v_name} must have {k_name}'s dtype {k.dtype}, got {v.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{v_name} must match {k_name} in all but the last dimension, got {tuple(v.shape)}, {tuple(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name} must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {q.shape[-2]} and {k.shape[-2]}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim must be positive, got {q.shape[-1]} and head_dim_v {v.shape[-1]}")


def _check_options(
    q: Tensor, causal: bool, softmax_scale: float | None, window_size: tuple[int, ...], softcap: float, sinks: Tensor | None
) -> dict[str, Any]:
    """What backends take: the softmax scale, the window with causality folded in (right == 0), softcap."""
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}")
    left, right = window_size
    if not (type(left) is type(right) is int and left >= -1 and right >= -1):
        raise ValueError(f"window_size must be integers (left, right) with each >= -1, got {window_size}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and >= 0 (0 is off), got {softcap}")
    if sinks is not None and (sinks.shape != (q.shape[-2],) or sinks.device != q.device):
        raise ValueError(
            f"sinks must be ({q.shape[-2]},) on {q.device}, one per query head, got {_show(sinks)} on {sinks.device}"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale must be finite and > 0, got {softmax_scale}")
    window = (min(left, _FAR), 0 if causal else min(right, _FAR))
    return {"softmax_scale": scale, "window_size": window, "softcap": float(softcap)}


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask.dim() != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=True)):
        raise ValueError(f"mask must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = {full}, got {_show(mask)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be bool or floating point, got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.device}")


def _check_index(name: str, x: Tensor, q: Tensor, length: int | None) -> None:
    if x.dim() != 1 or x.dtype != torch.int32 or x.device != q.device:
        raise ValueError(f"{name} must be int32 of one dimension on {q.device}, got {_show(x)} on {x.device}")
    if x.shape[0] == 0 if length is None else x.shape[0] != length:
        raise ValueError(f"{name} must have {'at least 1' if length is None else length} entries, got {x.shape[0]}")


def _check_lengths(**lengths: int) -> None:
    for name, value in lengths.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a non-negative int on the host, got {value!r}")


def _check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.stride()[3] != 1 or v_cache.stride()[3] != 1:
        name, x = ("v_cache", v_cache) if k_cache.stride()[3] == 1 else ("k_cache", k_cache)
        raise ValueError(f"{name} must have a contiguous last dimension, got strides {x.stride()}")


def _of_whole_rows(cache: Tensor) -> bool:
    page, token, head, _ = cache.stride()
    return token > 0 and page % token == 0 and not ((token | head) * cache.element_size() | cache.data_ptr()) & 15


def _check_descale(k_cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> None:
    if k_cache.dtype != torch.float8_e4m3fn:
        if k_descale is not None or v_descale is not None:
            name = "v_descale" if k_descale is None else "k_descale"
            raise ValueError(f"{name} must be None for a cache of {k_cache.dtype}, which is not quantised")
        return
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None or x.shape != (k_cache.shape[2],) or x.dtype != torch.float32 or x.device != k_cache.device:
            raise ValueError(
                f"{name} must be float32 ({k_cache.shape[2]},) on {k_cache.device} for a float8_e4m3fn cache, got "
                f"{None if x is None else f'{_show(x)} on {x.device}'}"
            )


def _check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is not None and (out.shape != (*q.shape[:-1], v.shape[-1]) or out.dtype != q.dtype or out.device != q.device):
        raise ValueError(
            f"out must be {str(q.dtype)[6:]} {(*q.shape[:-1], v.shape[-1])} on {q.device}, got {_show(out)} on {out.device}"
        )
