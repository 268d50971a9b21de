"""The results of rows that see no key, where a call has no kernel to launch.

    without_keys(out, lse, sinks, cu_seqlens_q)

The rule for every backend is in `fa_serve.api`: out is 0, and lse is the sink, or -inf without sinks. Rows of packed queries
that belong to no sequence have no sink, so their lse is -inf. Kernels apply the rule to the rows past the last sequence with
`triton.primitives.clear_rows`. This module leaves out kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def without_keys(out: Tensor, lse: Tensor | None, sinks: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    """Write the results of a call in which no row sees a key.

    cu_seqlens_q: None for a dense batch, whose rows all belong to a sequence
    """
    out.zero_()
    if lse is None:
        return
    if sinks is None:
        lse.fill_(float("-inf"))
        return
    lse.copy_(sinks.to(torch.float32)[:, None].expand_as(lse))
    if cu_seqlens_q is not None:
        rows = torch.arange(lse.shape[-1], device=lse.device)
        lse.masked_fill_(rows >= cu_seqlens_q[-1], float("-inf"))
