"""The oracle: attention as its equation reads, in plain PyTorch, on any device.

    S = softmax_scale * Q K^T            softcap * tanh(S / softcap) where softcap is on
    S = S + mask, -inf where a key is hidden
    P = exp(S - lse),  lse = log(sum_j exp(S_j) [+ exp(sink)])
    O = P V

It computes in at least float32, and in float64 when given float64. It is slow and holds the whole score matrix on purpose.
Tests compare the other backends with it; those never import it. Left out: everything that is not in the equation.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fa_serve.spec import AttentionSpec


def visible_keys(seqlen_q: int, seqlen_k: int, window_size: tuple[int, int], device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k) bool: key j is visible to query i if i + offset - left <= j <= i + offset + right.

    offset = seqlen_k - seqlen_q aligns the last query with the last key (the bottom-right corner).
    """
    left, right = window_size
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=device)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        keep &= j >= i - left
    if right >= 0:
        keep &= j <= i + right
    return keep


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q (batch, seqlen_q, heads, head_dim), k and v with num_kv_heads -> out like q in the computing dtype, lse (b, h, q)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    s = softmax_scale * (q @ k.transpose(-1, -2))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.to(dtype)
    s = s.masked_fill(~visible_keys(q.shape[2], k.shape[2], window_size, q.device), float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[None, :, None].expand_as(lse))
    # a row that sees nothing has lse -inf and P = exp(-inf - -inf): it is defined to be 0
    p = torch.exp(s - lse[..., None]).masked_fill(s == float("-inf"), 0.0)
    # finfo.min, by which some hide keys, has no room for the logarithm of a sum: P is 1 then for each of such a row's keys
    p = p / p.sum(dim=-1, keepdim=True).round().clamp(min=1.0)
    return (p @ v).transpose(1, 2), lse


class ReferenceBackend:
    name = "reference"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def forward(self, q, k, v, *, out, return_lse, **options):  # type: ignore[no-untyped-def]
        result, lse = attention_reference(q, k, v, **options)
        return _deliver(result, q, out), lse if return_lse else None

    def forward_varlen(  # type: ignore[no-untyped-def]
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out, return_lse, **options
    ):
        starts_q = cu_seqlens_q.tolist()
        starts_k = cu_seqlens_k.tolist()
        keys = [(k[a:b], v[a:b]) for a, b in itertools.pairwise(starts_k)]
        return self._each_sequence(q, starts_q, keys, v.shape[-1], out, return_lse, options)

    def forward_paged(  # type: ignore[no-untyped-def]
        self,
        q,
        k_cache,
        v_cache,
        *,
        block_table,
        seqused_k,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        k_descale,
        v_descale,
        num_splits,
        out,
        return_lse,
        **options,
    ):
        page_size = k_cache.shape[1]
        keys = []
        for pages, length in zip(block_table.tolist(), seqused_k.tolist(), strict=True):
            used = torch.tensor(pages[: -(-length // page_size)], dtype=torch.long, device=q.device)
            sequence = []
            for cache, descale in ((k_cache, k_descale), (v_cache, v_descale)):
                x = cache[used].flatten(0, 1)[:length].to(torch.promote_types(q.dtype, torch.float32))
                sequence.append(x if descale is None else x * descale.to(x.dtype)[None, :, None])
            keys.append(tuple(sequence))
        return self._each_sequence(q, cu_seqlens_q.tolist(), keys, v_cache.shape[-1], out, return_lse, options)

    def store_kv(self, k, v, k_cache, v_cache, slot_mapping, *, k_descale, v_descale):  # type: ignore[no-untyped-def]
        page_size = k_cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            for x, cache, descale in ((k, k_cache, k_descale), (v, v_cache, v_descale)):
                row = x[token] if descale is None else x[token].float() / descale[:, None]
                if cache.dtype == torch.float8_e4m3fn:
                    row = row.float().clamp(-448, 448)
                cache[slot // page_size, slot % page_size] = row.to(cache.dtype)

    @staticmethod
    def _each_sequence(
        q: Tensor,
        starts: list[int],
        keys: list[tuple[Tensor, Tensor]],
        head_dim_v: int,
        out: Tensor | None,
        return_lse: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        result = torch.zeros(*q.shape[:2], head_dim_v, dtype=dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype, device=q.device)
        for (a, b), (k, v) in zip(itertools.pairwise(starts), keys, strict=True):
            o, sequence_lse = attention_reference(q[a:b][None], k[None], v[None], **options)
            result[a:b], lse[:, a:b] = o[0], sequence_lse[0]
        return _deliver(result, q, out), lse if return_lse else None


def _deliver(result: Tensor, q: Tensor, out: Tensor | None) -> Tensor:
    return result.to(q.dtype) if out is None else out.copy_(result)
