"""The arrays of a step whose sequences form groups that share leading pages: see `PrefixGroups` and `CommonPrefixes`.

    arrays = group_arrays(batch.groups, slots)          # on the host, in addition to those of batch_arrays.py
    paged = with_groups(paged, fields, table, page_size)             # on the device

All sizes depend only on the number of sequences. So a captured graph serves any groups, and the warm-up compiles the kernels of
every step that runs without a graph. Left out: which sequences form groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.scheduler.prefix_groups import MAX_MEMBERS
from fa_serve.engine.scheduler.scheduled_batch import PrefixGroup
from fa_serve.hf import PagedBatch
from fa_serve.hf.adapter.common_prefix import CommonPrefixes

Arrays = dict[str, NDArray[Any]]


def group_arrays(groups: Sequence[PrefixGroup], slots: NDArray[np.int64]) -> Arrays:
    """The fields of a step with these groups. slots: slots of the step's sequences, members of groups first"""
    ends = np.cumsum([0, *(group.size for group in groups)], dtype=np.int32)
    pages = np.array([group.pages for group in groups], dtype=np.int32)
    fields = group_padding(len(slots))
    fields["shared_pages"][: ends[-1]] = np.repeat(pages, np.diff(ends))
    fields["group_pages"][: len(pages)] = pages
    fields["group_slots"][: len(pages)] = slots[ends[:-1]]
    fields["group_ends"][: len(ends)] = ends
    fields["group_ends"][len(ends) :] = ends[-1]
    return fields


def group_padding(batch: int) -> Arrays:
    """The fields of a step of `batch` sequences in which no group has a member."""
    groups = max(batch // 2, 1)
    return {
        "group_ends": np.zeros(groups + 1, dtype=np.int32),
        "group_pages": np.zeros(groups, dtype=np.int32),
        "group_slots": np.zeros(groups, dtype=np.int64),
        "shared_pages": np.zeros(batch, dtype=np.int32),
    }


def with_groups(paged: PagedBatch, fields: Mapping[str, Tensor], table: BlockTable, page_size: int) -> PagedBatch:
    """The same batch with the groups that the fields name, if they name any."""
    if "group_ends" not in fields:
        return paged
    common = CommonPrefixes.of_step(
        paged.block_table,
        paged.seqused_k,
        group_table=table.rows(fields["group_slots"], paged.block_table.shape[1]),
        group_ends=fields["group_ends"],
        group_pages=fields["group_pages"],
        shared_pages=fields["shared_pages"],
        page_size=page_size,
        max_seqlen_q=MAX_MEMBERS,
    )
    return replace(paged, common=common)
