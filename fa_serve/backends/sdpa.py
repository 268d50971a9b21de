"""Attention through PyTorch's fused operators: for a CPU, and for any device or option that the kernels do not serve.

On a CPU it directly calls the operator that scaled_dot_product_attention would call, because that operator also returns the
log-sum-exp: lse then costs nothing, and sinks cost one multiplication. Where a mask is needed (bottom-right causality with
unequal lengths, windows, explicit masks), the queries are cut into row chunks, and each row chunk sees only the keys that its
rows can reach, so memory stays linear in the sequence length. No fused operator has softcap, and the fused operators of
a GPU add up gradients in an order that varies. So calls with a softcap, and calls whose gradients have to be reproducible, are
computed with the scores in memory, row chunk by row chunk. A block_mask is expanded to a mask of every query and key.

Everything here is differentiable. This module leaves out CUDA graphs (the host reads lengths) and speed on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors, StoreTensors
from fa_serve.backends.recompute import plan_recomputed
from fa_serve.launching.plans import Run
from fa_serve.spec import AttentionSpec

Caches = Sequence[tuple[Tensor, Tensor | None]]
"""K and V caches, each with its descale or None."""

FEW_TOKENS = 8
CHUNK = 512  # query rows per mask: 512 rows x 32k keys in float32 are 64 MB, and a call of that size hides its overhead
_NEG_INF = float("-inf")
_COMPUTED = frozenset({"softcap", "sinks", "alibi", "attention_chunk", "block_mask"})


class SdpaBackend:
    """PyTorch's operators as a backend. A plan holds only the options, because lengths are read at each call."""

    name = "sdpa"
    mixed_rows: int | None = None
    differentiable = True

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.layout == "paged" and spec.needs_grad:
            return "cannot differentiate through a paged cache, and an input requires gradients"
        if options := spec.options_beyond(_COMPUTED):
            return f"does not support {options}, which the call uses"
        if spec.precision != "bf16":
            return f"computes only in q's dtype, got precision {spec.precision!r}"
        return None

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions | None) -> Run:
        if spec.op == "store_kv":
            return _store_kv
        assert options is not None
        if spec.op == "backward":
            return plan_recomputed(partial(_ATTENTION[spec.layout], replace(options, return_lse=True)))
        return partial(_by_query if spec.op == "tree" else _ATTENTION[spec.layout], options)


def _dense(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    mask = t.mask if t.blocks is None else t.blocks.expanded(t.q.shape[1], t.k.shape[1], t.q.shape[2])
    result, lse = _attend(t.q, t.k, t.v, options, t.sinks, mask, t.alibi_slopes)
    result, lse = _connected(result, lse, t)
    return result if t.out is None else t.out.copy_(result), lse


def _connected(result: Tensor, lse: Tensor | None, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    """The results, connected to the inputs that need gradients. Without queries or keys, these gradients are zeros."""
    inputs = [x for x in (t.q, t.k, t.v) if x.requires_grad]
    if result.requires_grad or not inputs or not torch.is_grad_enabled():
        return result, lse
    # sums of no elements, so that no infinity becomes NaN
    nothing = torch.stack([x[:0].sum() for x in inputs]).sum()
    return result + nothing.to(result.dtype), None if lse is None else lse + nothing.to(lse.dtype)


def _varlen(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    assert t.cu_seqlens_q is not None
    assert t.keys is not None
    result, lse = _without_keys(t.q, t.v.shape[-1], options.return_lse)
    ends_k = pairwise(t.keys.tolist())
    for index, ((a, b), (c, d)) in enumerate(zip(pairwise(t.cu_seqlens_q.tolist()), ends_k, strict=True)):
        if a < b:
            found = _attend_sequence(t.q[None, a:b], t.k[None, c:d], t.v[None, c:d], options, t, index)
            _put(found, result, lse, slice(a, b))
    result, lse = _connected(result, lse, t)
    return result if t.out is None else t.out.copy_(result), lse


def _paged(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    assert t.cu_seqlens_q is not None
    assert t.keys is not None
    assert t.block_table is not None
    q = t.q
    caches = ((t.k, t.k_descale), (t.v, t.v_descale))
    rows = list(pairwise(t.cu_seqlens_q.tolist()))
    lengths = t.keys.tolist()
    if rows == [(0, len(q))]:
        k, v = _keys(caches, t.block_table[0], lengths[0], q.dtype)
        result, lse = _attend_sequence(q[None], k, v, options, t, 0)
        return result[0] if t.out is None else t.out.copy_(result[0]), None if lse is None else lse[0]
    result, lse = _without_keys(q, t.v.shape[-1], options.return_lse)
    alone = t.alibi_slopes is not None or t.blocks is not None
    together = [] if alone else _decoding_together(rows, lengths, options.num_splits)
    if together:
        found, at = _attend_together(options, t, caches, together, max(lengths[b] for b in together))
        _put(found, result, lse, at)
    for b in sorted(set(range(len(rows))) - set(together)):
        start, end = rows[b]
        if start < end:
            k, v = _keys(caches, t.block_table[b], lengths[b], q.dtype)
            found = _attend_sequence(q[None, start:end], k, v, options, t, b)
            _put(found, result, lse, slice(start, end))
    return result if t.out is None else t.out.copy_(result), lse


def _by_query(options: AttentionOptions, t: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    """Paged attention in which each query is computed by itself, over the keys up to its position if the call is causal."""
    assert t.cu_seqlens_q is not None
    assert t.keys is not None
    assert t.block_table is not None
    result, lse = _without_keys(t.q, t.v.shape[-1], options.return_lse)
    caches = ((t.k, t.k_descale), (t.v, t.v_descale))
    causal = options.window_size[1] == 0
    for b, ((start, end), length) in enumerate(zip(pairwise(t.cu_seqlens_q.tolist()), t.keys.tolist(), strict=True)):
        k, v = _keys(caches, t.block_table[b], length, t.q.dtype)
        for row in range(start, end):
            seen = max(length - (end - 1 - row), 0) if causal else length
            found = _attend_sequence(t.q[None, row : row + 1], k[:, :seen], v[:, :seen], options, t, b)
            _put(found, result, lse, slice(row, row + 1))
    return result if t.out is None else t.out.copy_(result), lse


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, t: AttentionTensors, sequence: int
) -> tuple[Tensor, Tensor | None]:
    """`_attend` for one sequence of `t`, whose q, k and v are given as a batch of one."""
    slopes = t.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[sequence]
    mask = None
    if t.blocks is not None:
        mask = t.blocks.of_sequence(sequence).expanded(q.shape[1], k.shape[1], q.shape[2])
    return _attend(q, k, v, options, t.sinks, mask, slopes)


_ATTENTION = {"dense": _dense, "varlen": _varlen, "paged": _paged}


def _decoding_together(rows: Sequence[tuple[int, int]], lengths: Sequence[int], num_splits: int) -> list[int]:
    """The sequences with one query for which one call together costs less than a call for each.

    Together they are padded to the longest of them, which may cost more. With a fixed number of splits, the result of a
    sequence must not depend on the others, so each has a separate call.
    """
    single = [b for b, (start, end) in enumerate(rows) if end - start == 1 and lengths[b] > 0]
    longest = max((lengths[b] for b in single), default=0)
    if num_splits or len(single) == 1 or longest * len(single) > 2 * sum(lengths[b] for b in single) + 4096:
        return []
    return single


def _attend_together(
    options: AttentionOptions, t: AttentionTensors, caches: Caches, sequences: Sequence[int], longest: int
) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """One call for sequences with one query each -> (out, lse) and their rows in q.

    Positions past the end of a sequence read its first key and are masked.
    """
    assert t.cu_seqlens_q is not None
    assert t.keys is not None
    assert t.block_table is not None
    left = options.window_size[0]
    page_size = t.k.shape[1]
    index = torch.tensor(sequences, device=t.q.device)
    used = t.keys[index, None]
    position = torch.arange(longest, device=t.q.device)[None]
    seen = (position < used) & (position >= (used - 1 - left if left >= 0 else 0))
    if options.attention_chunk:
        seen &= position >= (used - 1) // options.attention_chunk * options.attention_chunk
    position = torch.where(position < used, position, 0)
    pages = t.block_table[index].long().gather(1, position // page_size)
    k, v = (_read(cache, (pages, position % page_size), descale, t.q.dtype) for cache, descale in caches)
    at = t.cu_seqlens_q[index].long()
    unlimited = replace(options, window_size=(-1, -1), attention_chunk=0)
    return _attend(t.q[at][:, None], k, v, unlimited, t.sinks, seen[:, None, None]), at


def _store_kv(tensors: StoreTensors) -> None:
    k = tensors.k
    v = tensors.v
    k_cache = tensors.k_cache
    v_cache = tensors.v_cache
    k_descale = tensors.k_descale
    slot_mapping = tensors.slot_mapping
    if k.device.type == "cpu" and len(k) <= FEW_TOKENS and k_descale is None:
        for token, slot in enumerate(slot_mapping.tolist()):  # cheaper than indexing with tensors
            if slot >= 0:
                place = divmod(slot, k_cache.shape[1])
                k_cache[place] = k[token]
                v_cache[place] = v[token]
        return
    owned = slot_mapping >= 0
    slots = slot_mapping[owned]
    page = slots // k_cache.shape[1]
    position = slots % k_cache.shape[1]
    for x, cache, descale in ((k, k_cache, k_descale), (v, v_cache, tensors.v_descale)):
        x = x[owned]
        if descale is not None:
            x = (x.float() / descale[:, None]).clamp(-448.0, 448.0)  # e4m3fn saturates here; its cast would give NaN
        cache[page, position] = x.to(cache.dtype)


def _keys(caches: Caches, pages: Tensor, length: int, dtype: torch.dtype) -> list[Tensor]:
    """The first `length` keys and values of the sequence in these pages, (1, length, heads, dim) each; views if the pages
    follow one another in the cache."""
    numbers = pages.tolist()[: -(-length // caches[0][0].shape[1])]
    in_a_row = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    index: Any = slice(numbers[0], numbers[-1] + 1) if in_a_row else pages[: len(numbers)]
    return [_read(cache, (index,), descale, dtype).flatten(0, 1)[None, :length] for cache, descale in caches]


def _read(cache: Tensor, index: tuple[Any, ...], descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if descale is None:
        return cache.index_select(0, index[0]) if len(index) == 1 and isinstance(index[0], Tensor) else cache[index]
    # float8 tensors cannot be indexed on every device, but their bytes can
    return (cache.view(torch.uint8)[index].view(cache.dtype).float() * descale[:, None]).to(dtype)


def _without_keys(q: Tensor, head_dim_v: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out and lse of packed queries that see no key, such as rows past the last sequence."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((q.shape[1], q.shape[0]), _NEG_INF, dtype=dtype) if return_lse else None
    return q.new_zeros(*q.shape[:2], head_dim_v), lse


def _put(found: tuple[Tensor, Tensor | None], result: Tensor, lse: Tensor | None, at: slice | Tensor) -> None:
    """Copy what `_attend` returned for a batch to its packed rows."""
    out, out_lse = found
    result[at] = out.flatten(0, 1)
    if lse is not None and out_lse is not None:
        lse[:, at] = out_lse.transpose(0, 1).flatten(1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    sinks: Tensor | None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q, k, v (batch, seqlen, heads, dim) -> out in the same layout, and lse (batch, heads, seqlen_q) if the options ask for
    it."""
    seqlen_q = q.shape[1]
    seqlen_k = k.shape[1]
    if q.numel() == 0 or seqlen_k == 0:
        return _attend_nothing(q, v.shape[-1], options, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    left, right = options.window_size
    chunk = options.attention_chunk
    offset = seqlen_k - seqlen_q
    if right >= 0 and seqlen_q == 1:
        right = -1  # the last query sees up to the last key, so there is nothing to hide
    implicit = left < 0 and (right < 0 or (right == 0 and offset == 0)) and not chunk and alibi_slopes is None
    forms_scores = options.softcap or _adds_in_any_order(q, options)
    if implicit and (mask is None or right < 0) and (not forms_scores or seqlen_q <= CHUNK):
        # one call is enough: it holds no score matrix, or only that of one row chunk
        bias = None if mask is None else _as_bias(mask, q)
        out, one_lse = _one_call(q, k, v, options, right == 0, sinks, bias)
        return out.transpose(1, 2), one_lse
    outs = []
    lses = []
    for start in range(0, seqlen_q, CHUNK):
        end = min(start + CHUNK, seqlen_q)
        first = (start + offset) // chunk * chunk if chunk else 0 if left < 0 else start + offset - left
        first = min(max(first, 0), seqlen_k - 1)
        last = seqlen_k if right < 0 else max(min(end + offset + right, seqlen_k), first + 1)
        i = torch.arange(start, end, device=q.device)[:, None] + offset
        j = torch.arange(first, last, device=q.device)[None, :]
        keep = torch.ones(end - start, last - first, dtype=torch.bool, device=q.device)
        if left >= 0:
            keep &= j >= i - left
        if right >= 0:
            keep &= j <= i + right
        if chunk:
            keep &= j >= i // chunk * chunk
        bias = _as_bias(keep[None, None], q)
        if mask is not None:
            bias = bias + _as_bias(_slice(_slice(mask, 2, start, end), 3, first, last), q)
        if alibi_slopes is not None:  # at least float32, because 16 bits are too few for large distances
            slopes = alibi_slopes.to(torch.promote_types(q.dtype, torch.float32)).view(-1, q.shape[1], 1, 1)
            bias = bias - slopes * (i - j).abs()
        o, o_lse = _one_call(q[:, :, start:end], k[:, :, first:last], v[:, :, first:last], options, False, sinks, bias)
        outs.append(o)
        if o_lse is not None:
            lses.append(o_lse)
    return torch.cat(outs, dim=2).transpose(1, 2), torch.cat(lses, dim=2) if options.return_lse else None


def _attend_nothing(
    q: Tensor, head_dim_v: int, options: AttentionOptions, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`_attend` without queries or without keys, where torch's operators divide by zero."""
    out = q.new_zeros(*q.shape[:-1], head_dim_v)
    if not options.return_lse:
        return out, None
    shape = (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_full(shape, _NEG_INF, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, lse if sinks is None else lse.copy_(sinks.to(lse.dtype)[None, :, None].expand_as(lse))


def _slice(mask: Tensor, dim: int, start: int, end: int) -> Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, end - start)


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    # the CPU's operator takes a float32 bias with 16-bit queries; the other operators need q's dtype
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, _NEG_INF)


def _one_call(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, causal: bool, sinks: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One operator on tensors (batch, heads, seqlen, dim): a square causal call or an additive bias, never both."""
    scale = options.softmax_scale
    hidden = None
    if bias is not None:
        # A row that sees no key has no softmax. It is computed as if it saw every key, and corrected below.
        hidden = (bias == _NEG_INF).all(dim=-1, keepdim=True)
        bias = bias.masked_fill(hidden, 0.0)
    uses_lse = options.return_lse or sinks is not None
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    bias_grad = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    exact_bias = bias is not None and bias.dtype != q.dtype
    forms_scores = options.softcap or bias_grad or _adds_in_any_order(q, options)
    if forms_scores or ((uses_lse or exact_bias) and (wants_grad or q.device.type != "cpu")):
        # No fused operator has softcap, or computes gradients of a mask or through lse. Only the CPU's operator returns lse and
        # takes a bias whose dtype is not q's.
        out, lse = _with_scores(q, k, v, scale, causal, options.softcap, bias)
    elif q.device.type == "cpu":
        if wants_grad and q.dtype.itemsize == 2 and k.shape[1] < q.shape[1]:
            # Where query heads share keys, the operator adds up their gradients in q's dtype. Autograd adds them in float32.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out, lse = _fused_cpu(q, k, v, scale, causal, bias)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=True)
        return (out if hidden is None else out.masked_fill(hidden, 0.0)), None
    if hidden is not None:
        lse = lse.masked_fill(hidden.expand(*lse.shape, 1)[..., 0], _NEG_INF)
        out = out.masked_fill(hidden, 0.0)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[None, :, None]
        # A softmax with one more logit is the softmax without it, times the share of the other logits. A row without any key
        # and a sink of -inf gives -inf - -inf; its output is 0 already.
        is_empty = (lse == _NEG_INF) & (sink == _NEG_INF)
        share = torch.sigmoid((lse - sink).masked_fill(is_empty, 0.0))
        out = (out * share[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse if options.return_lse else None


def _adds_in_any_order(q: Tensor, options: AttentionOptions) -> bool:
    """Whether gradients have to be reproducible, and those of the device's fused operators would not be."""
    return options.deterministic and q.device.type != "cpu"


def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    # the operator assumes that the last dimension is contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dim = q.shape[-1]
    dim_v = v.shape[-1]
    if dim != dim_v:  # the operator takes one head size; padding with zeros changes neither the scores nor the kept columns
        q, k, v = (F.pad(x, (0, max(dim, dim_v) - x.shape[-1])) for x in (q, k, v))
    if bias is not None:
        bias = bias.expand(-1, -1, q.shape[2], k.shape[2])
    operator: Any = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out if out.shape[-1] == dim_v else out[..., :dim_v], lse


def _with_scores(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The equation, with the score matrix in memory."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    s = (q.to(dtype) @ keys.mT) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(dtype)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), _NEG_INF)
    lse = torch.logsumexp(s, dim=-1)
    return (torch.softmax(s, dim=-1) @ values).to(q.dtype), lse
