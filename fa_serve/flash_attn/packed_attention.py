"""Attention over packed sequences as flash-attn defines it: `seqused_q` and `seqused_k` count the used rows of each sequence.

    out, lse = attend_packed(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=lengths, options=options, ...)

Everything is differentiable. Left out: keys in a cache (`cached_attention`), and the softmax arguments, which the callers
translate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa_serve import api
from fa_serve.flash_attn.used_rows import UsedRows

Attended = tuple[Tensor, Tensor | None]


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    deterministic: bool,
    options: dict[str, Any],
    return_lse: bool,
) -> Attended:
    """The arguments are those of FlashAttention-3's `flash_attn_varlen_func`.

    Returns out (total_q, num_heads, head_dim_v), and lse (num_heads, total_q) or None.
    """
    if seqused_k is not None:
        used_k = UsedRows.of(k, cu_seqlens_k, seqused_k)
        k = used_k.gather(k)
        v = used_k.gather(v)
        cu_seqlens_k = used_k.cu_seqlens

    def attend(q: Tensor, cu_seqlens_q: Tensor) -> Attended:
        found = api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            deterministic=deterministic,
            return_lse=return_lse,
            **options,
        )
        return found if isinstance(found, tuple) else (found, None)

    return attend_used_queries(q, cu_seqlens_q, seqused_q, attend)


def attend_used_queries(
    q: Tensor, cu_seqlens_q: Tensor, seqused_q: Tensor | None, attend: Callable[[Tensor, Tensor], Attended]
) -> Attended:
    """Call `attend` with the used queries and their cu_seqlens. The rows of other queries are 0, and their lse is -inf."""
    if seqused_q is None:
        return attend(q, cu_seqlens_q)
    used = UsedRows.of(q, cu_seqlens_q, seqused_q)
    out, lse = attend(used.gather(q), used.cu_seqlens)
    return used.scatter(out), None if lse is None else used.scatter(lse.t(), float("-inf")).t()
