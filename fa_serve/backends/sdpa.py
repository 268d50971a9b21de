"""Attention through PyTorch's own fused operators: what a CPU uses, and any device or option that our kernels do not serve.

On a CPU it calls the operator under scaled_dot_product_attention directly, because that one also returns the log-sum-exp,
with which sinks cost one multiplication and lse nothing. Where a mask is needed (bottom-right causality with unequal lengths,
windows, explicit masks) the queries are cut into chunks and each chunk sees only the keys its rows can reach, so memory stays
linear in the sequence length. softcap has no fused operator and is computed openly, chunk by chunk.

Everything here is differentiable. Left out: CUDA-graph safety (lengths are read by the host), and speed on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_serve.spec import AttentionSpec

FEW_TOKENS = 8
CHUNK = 512  # query rows per mask: 512 x 32k keys in float32 is 64 MB, and a call of that size is long past its overhead
NEG_INF = float("-inf")


class SdpaBackend:
    name = "sdpa"

    def supports(self, spec: AttentionSpec) -> str | None:
        return "a paged cache has no gradient" if spec.layout == "paged" and spec.needs_grad else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        result, lse = _attend(q, k, v, **options)
        return result if out is None else out.copy_(result), lse

    def forward_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        out: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        result, lse = _without_keys(q, v.shape[-1], options["return_lse"])
        ends_k = pairwise(cu_seqlens_k.tolist())
        for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), ends_k, strict=True):
            _put(_attend(q[None, a:b], k[None, c:d], v[None, c:d], **options), result, lse, slice(a, b))
        return result if out is None else out.copy_(result), lse

    def forward_paged(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor,
        seqused_k: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        num_splits: int,
        out: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        page_size = k_cache.shape[1]
        left = options["window_size"][0]
        caches = ((k_cache, k_descale), (v_cache, v_descale))
        rows = list(pairwise(cu_seqlens_q.tolist()))
        lengths = seqused_k.tolist()
        if rows == [(0, len(q))]:
            k, v = _keys(caches, block_table[0], lengths[0], q.dtype)
            result, lse = _attend(q[None], k, v, **options)
            return result[0] if out is None else out.copy_(result[0]), None if lse is None else lse[0]
        result, lse = _without_keys(q, v_cache.shape[-1], options["return_lse"])

        single = [b for b, (start, end) in enumerate(rows) if end - start == 1 and lengths[b] > 0]
        longest = max((lengths[b] for b in single), default=0)
        # padding to the longest may cost more than one call each; with `num_splits` given the others have no say in a result
        if num_splits or len(single) == 1 or longest * len(single) > 2 * sum(lengths[b] for b in single) + 4096:
            single = []
        if single:
            # one call for all decoding sequences: positions past a sequence's end read its first key and are masked out
            index = torch.tensor(single, device=q.device)
            used = seqused_k[index, None]
            position = torch.arange(longest, device=q.device)[None]
            seen = (position < used) & (position >= (used - 1 - left if left >= 0 else 0))
            position = torch.where(position < used, position, 0)
            pages = block_table[index].long().gather(1, position // page_size)
            k, v = (_read(cache, (pages, position % page_size), descale, q.dtype) for cache, descale in caches)
            at = cu_seqlens_q[index].long()
            everything = options | {"window_size": (-1, -1), "mask": seen[:, None, None]}
            _put(_attend(q[at][:, None], k, v, **everything), result, lse, at)
        for b in sorted(set(range(len(rows))) - set(single)):
            start, end = rows[b]
            if start < end:
                k, v = _keys(caches, block_table[b], lengths[b], q.dtype)
                _put(_attend(q[None, start:end], k, v, **options), result, lse, slice(start, end))
        return result if out is None else out.copy_(result), lse

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
    ) -> None:
        if k.device.type == "cpu" and len(k) <= FEW_TOKENS and k_descale is None:
            for token, slot in enumerate(slot_mapping.tolist()):  # cheaper than to index with tensors
                if slot >= 0:
                    place = divmod(slot, k_cache.shape[1])
                    k_cache[place], v_cache[place] = k[token], v[token]
            return
        owned = slot_mapping >= 0
        slots = slot_mapping[owned]
        page = slots // k_cache.shape[1]
        position = slots % k_cache.shape[1]
        for x, cache, descale in ((k, k_cache, k_descale), (v, v_cache, v_descale)):
            x = x[owned]
            if descale is not None:
                x = (x.float() / descale[:, None]).clamp(-448.0, 448.0)  # e4m3fn saturates here, its cast would give NaN
            cache[page, position] = x.to(cache.dtype)


def _keys(caches: Sequence[tuple[Tensor, Tensor | None]], pages: Tensor, length: int, dtype: torch.dtype) -> list[Tensor]:
    """The first `length` keys, and values, of the sequence in these pages: (1, length, heads, dim). A view if they allow it."""
    numbers = pages.tolist()[: -(-length // caches[0][0].shape[1])]
    in_a_row = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    index: Any = slice(numbers[0], numbers[-1] + 1) if in_a_row else pages[: len(numbers)]
    return [_read(cache, (index,), descale, dtype).flatten(0, 1)[None, :length] for cache, descale in caches]


def _read(cache: Tensor, index: tuple[Any, ...], descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if descale is None:
        return cache.index_select(0, index[0]) if len(index) == 1 and isinstance(index[0], Tensor) else cache[index]
    # float8 tensors cannot be indexed on every device: read their bytes
    return (cache.view(torch.uint8)[index].view(cache.dtype).float() * descale[:, None]).to(dtype)


def _without_keys(q: Tensor, head_dim_v: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out and lse of packed queries that see nothing, such as rows behind the last sequence, which belong to nobody."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((q.shape[1], q.shape[0]), NEG_INF, dtype=dtype) if return_lse else None
    return q.new_zeros(*q.shape[:2], head_dim_v), lse


def _put(found: tuple[Tensor, Tensor | None], result: Tensor, lse: Tensor | None, at: slice | Tensor) -> None:
    """What `_attend` gave for a batch, to its packed rows."""
    out, out_lse = found
    result[at] = out.flatten(0, 1)
    if lse is not None and out_lse is not None:
        lse[:, at] = out_lse.transpose(0, 1).flatten(1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(batch, seqlen, heads, dim) -> out in the same layout, lse (batch, heads, seqlen_q) if wanted."""
    seqlen_q = q.shape[1]
    seqlen_k = k.shape[1]
    if q.numel() == 0 or seqlen_k == 0:
        # torch's operator divides by zero on empty input
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full((q.shape[0], q.shape[2], seqlen_q), NEG_INF, dtype=torch.promote_types(q.dtype, torch.float32))
        return out, (lse if sinks is None else sinks.to(lse.dtype)[None, :, None].expand_as(lse)) if return_lse else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    left, right = window_size
    offset = seqlen_k - seqlen_q
    if right >= 0 and seqlen_q == 1:
        right = -1  # the last query sees up to the last key: nothing to hide
    implicit = left < 0 and (right < 0 or (right == 0 and offset == 0))
    if implicit and (mask is None or right < 0) and (not softcap or seqlen_q <= CHUNK):
        # torch keeps no score matrix here either: one call
        bias = None if mask is None else _as_bias(mask, q)
        out, one_lse = _one_call(q, k, v, softmax_scale, right == 0, softcap, sinks, bias, return_lse)
        return out.transpose(1, 2), one_lse
    outs = []
    lses = []
    for start in range(0, seqlen_q, CHUNK):
        end = min(start + CHUNK, seqlen_q)
        first = 0 if left < 0 else min(max(start + offset - left, 0), seqlen_k - 1)
        last = seqlen_k if right < 0 else max(min(end + offset + right, seqlen_k), first + 1)
        i = torch.arange(start, end, device=q.device)[:, None] + offset
        j = torch.arange(first, last, device=q.device)[None, :]
        keep = torch.ones(end - start, last - first, dtype=torch.bool, device=q.device)
        if left >= 0:
            keep &= j >= i - left
        if right >= 0:
            keep &= j <= i + right
        bias = _as_bias(keep[None, None], q)
        if mask is not None:
            bias = bias + _as_bias(_slice(_slice(mask, 2, start, end), 3, first, last), q)
        parts = q[:, :, start:end], k[:, :, first:last], v[:, :, first:last]
        o, o_lse = _one_call(*parts, softmax_scale, False, softcap, sinks, bias, return_lse)
        outs.append(o)
        lses.append(o_lse)
    return torch.cat(outs, dim=2).transpose(1, 2), torch.cat([x for x in lses if x is not None], dim=2) if return_lse else None


def _slice(mask: Tensor, dim: int, start: int, end: int) -> Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, end - start)


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    # the CPU operator takes a float32 bias beside 16-bit queries; the others want q's dtype
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, NEG_INF)


def _one_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    softcap: float,
    sinks: Tensor | None,
    bias: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Head-first tensors, a square causal call or an additive bias, never both."""
    dead = None
    if bias is not None:
        # a row that sees nothing has no softmax: let it see everything, then say what it is
        dead = (bias == NEG_INF).all(dim=-1, keepdim=True)
        bias = bias.masked_fill(dead, 0.0)
    uses_lse = return_lse or sinks is not None
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    bias_grad = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    if softcap or bias_grad or (uses_lse and (wants_grad or q.device.type != "cpu")):
        # the fused operators have no softcap, no gradient of a mask or through lse, and only the CPU's hands lse out
        out, lse = _open(q, k, v, scale, causal, softcap, bias)
    elif q.device.type == "cpu":
        out, lse = _fused_cpu(q, k, v, scale, causal, bias)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=True)
        return (out if dead is None else out.masked_fill(dead, 0.0)), None
    if dead is not None:
        lse = lse.masked_fill(dead.expand(*lse.shape, 1)[..., 0], NEG_INF)
        out = out.masked_fill(dead, 0.0)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[None, :, None]
        # softmax with one more logit is the softmax without it, times the share of the rest
        share = torch.sigmoid((lse - sink).nan_to_num(0.0, -NEG_INF, NEG_INF))  # -inf - -inf of a row without any key
        out = (out * share[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse if return_lse else None


def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    # the operator believes that the last dimension is contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dim = q.shape[-1]
    dim_v = v.shape[-1]
    if dim != dim_v:  # the operator takes one head size: zeros change neither the scores nor the kept columns
        q, k, v = (F.pad(x, (0, max(dim, dim_v) - x.shape[-1])) for x in (q, k, v))
    if bias is not None:
        bias = bias.expand(-1, -1, q.shape[2], k.shape[2])
    operator: Any = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out if out.shape[-1] == dim_v else out[..., :dim_v], lse


def _open(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    s = (q.to(dtype) @ keys.mT) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(dtype)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), NEG_INF)
    lse = torch.logsumexp(s, dim=-1)
    return (torch.softmax(s, dim=-1) @ values).to(q.dtype), lse
