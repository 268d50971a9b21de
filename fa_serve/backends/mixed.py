"""A paged batch in which some sequences decode and others are mid-prompt, each by the kernel made for it.

The lengths are on the device, so both kernels get the whole batch: one takes the sequences whose packed queries fill one tile
of the tensor cores at most, the other the longer ones, and each skips the other's. They write disjoint rows of the same
output, one after the other on the caller's stream. Which kernels these are is the caller's choice: the portable backend has
both, and `api` joins two backends. Left out: running both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The decoding kernel's shortest tile. At 16, its next one, 32 sequences of 4096 keys beside a prompt take 170 us instead of 141
# (32/8 heads of 128, one H200), 197 instead of 142 with 64/8, and alone 135 and 142
_ROWS = 8


def forward_mixed(
    decode: Callable[..., Any],
    forward: Callable[..., Any],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    max_seqlen_q: int,
    out: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as in `fa_serve.attention_paged`, for a cache of q's dtype and no fixed number of splits.

    decode:  leaves sequences with more than its `max_seqlen_q` queries alone
    forward: leaves sequences with up to `skip_q` queries alone; both write `out` and, if it is not None, `lse`
    """
    total_q, num_heads, _ = q.shape
    few = max(1, _ROWS // (num_heads // k_cache.shape[2]))
    q = q if q.stride(2) == 1 else q.contiguous()
    result = q.new_empty(total_q, num_heads, v_cache.shape[3]) if out is None or out.stride(2) != 1 else out
    lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device) if return_lse else None
    shared = {**options, "out": result, "lse": lse, "return_lse": return_lse}
    forward(q, k_cache, v_cache, max_seqlen_q=max_seqlen_q, skip_q=few, **shared)
    decode(q, k_cache, v_cache, max_seqlen_q=few, **shared)
    return (result if out is None or result is out else out.copy_(result)), lse
