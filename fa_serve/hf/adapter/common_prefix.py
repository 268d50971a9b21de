"""Cascade attention: keys that several sequences of a decoding step share are read once for all of them.

    common = CommonPrefixes(...)                       # rides along in the PagedBatch of a step
    out = common.attend(q, k_cache, v_cache, cu_seqlens_q=ends, sinks=None, max_seqlen_k=16384)

Sequences with the same leading pages are neighbours in the step and form a group. One call computes the queries of each group
over the pages that its members share. It treats them as queries of one sequence, so each key is read once for all of them.
Another call computes each sequence over the pages after the shared ones. The two results are merged by their lse. This is
exact, because the softmax over a union of disjoint sets of keys follows from the results of the sets and their lse. All lengths
are on the device, so a captured CUDA graph also serves other groups. Left out: which sequences form groups, and whether that
pays (engine/scheduler/common_prefixes.py).

Sources: RelayAttention (Zhu et al. 2024, arXiv:2402.14808), Hydragen (Juravsky et al. 2024, arXiv:2402.05099), and the cascade
inference of FlashInfer (Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.api import attention_paged


@dataclass(frozen=True)
class CommonPrefixes:
    """Groups of sequences that share leading pages, in a step with one query for each sequence. Shapes as in `fa_serve.api`.

    cu_seqlens_q: (groups + 1,) int32: the rows of each group's members; sequences after the last group are in no group
    seqused_k:    (groups,) int32: tokens that the members of a group share, in whole pages; 0 for a group without members
    block_table:  (groups, max_pages) int32: each row starts with the pages that the group shares
    max_seqlen_q: upper bound of the number of members of a group
    own_seqused_k, own_block_table: tokens and pages of each sequence after the shared pages, at least one token
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_seqlen_q: int
    own_seqused_k: Tensor
    own_block_table: Tensor

    @classmethod
    def of_step(
        cls,
        block_table: Tensor,
        seqused_k: Tensor,
        *,
        group_table: Tensor,
        group_ends: Tensor,
        group_pages: Tensor,
        shared_pages: Tensor,
        page_size: int,
        max_seqlen_q: int,
    ) -> CommonPrefixes:
        """The groups of a step.

        block_table:  (batch, max_pages) int32; seqused_k: (batch,) int32, of the step as it would be without groups
        group_table:  (groups, max_pages) int32: the pages of one member of each group
        group_ends:   (groups + 1,) int32, as `cu_seqlens_q`
        group_pages:  (groups,) int32: the number of pages that the members of each group share
        shared_pages: (batch,) int32: the number of pages that each sequence shares with its group; 0 without a group
        """
        width = block_table.shape[1]
        columns = torch.arange(width, device=block_table.device) + shared_pages[:, None]
        return cls(
            cu_seqlens_q=group_ends,
            seqused_k=group_pages * page_size,
            block_table=group_table,
            max_seqlen_q=max_seqlen_q,
            own_seqused_k=seqused_k - shared_pages * page_size,
            # columns past the last page of a sequence are never read
            own_block_table=block_table.gather(1, columns.clamp(max=width - 1)),
        )

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cu_seqlens_q: Tensor, sinks: Tensor | None, **options: Any
    ) -> Tensor:
        """Attention of the queries of a step, (total, num_heads, head_dim) -> (total, num_heads, head_dim_v).

        cu_seqlens_q, sinks, options: arguments of `attention_paged` for the step; a window or chunks are not possible
        """
        own, own_lse = cast(
            "tuple[Tensor, Tensor]",
            attention_paged(
                q,
                k_cache,
                v_cache,
                block_table=self.own_block_table,
                seqused_k=self.own_seqused_k,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=1,
                sinks=sinks,
                return_lse=True,
                **options,
            ),
        )
        common, common_lse = cast(
            "tuple[Tensor, Tensor]",
            attention_paged(
                q,
                k_cache,
                v_cache,
                block_table=self.block_table,
                seqused_k=self.seqused_k,
                cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=self.max_seqlen_q,
                causal=False,
                return_lse=True,
                **options,
            ),
        )
        return ops.merge_attention(own, own_lse, common, common_lse)
