"""A decoding step over one layer in which some sequences share leading pages."""

from __future__ import annotations

from typing import Any

import torch

from fa_serve.api import attention_paged
from fa_serve.hf.adapter.common_prefix import CommonPrefixes
from fa_serve.hf.adapter.paged import PagedBatch

PAGE = 4
PAGES = torch.tensor(
    [
        [7, 3, 9, 0, 0],  # the first three share two pages,
        [7, 3, 1, 4, 0],
        [7, 3, 2, 0, 0],
        [5, 6, 0, 0, 0],  # the next two one,
        [5, 8, 10, 0, 0],
        [11, 0, 0, 0, 0],  # and the last one none
    ],
    dtype=torch.int32,
)
LENGTHS = [9, 14, 12, 5, 10, 3]
SHARED = [2, 2, 2, 1, 1, 0]


def problem(options: dict[str, Any]) -> tuple[PagedBatch, dict[str, Any]]:
    """A step over one layer, and the arguments of its attention."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(12, PAGE, 2, 8, generator=draw) for _ in range(2))
    for row, length in enumerate(LENGTHS):  # what no sequence has written is never read
        if length % PAGE:
            page = PAGES[row, length // PAGE]
            k[page, length % PAGE :] = float("nan")
            v[page, length % PAGE :] = float("nan")
    common = CommonPrefixes.of_step(
        PAGES,
        torch.tensor(LENGTHS, dtype=torch.int32),
        group_table=PAGES[[1, 3, 0]],
        group_ends=torch.tensor([0, 3, 5, 5], dtype=torch.int32),
        group_pages=torch.tensor([2, 1, 0], dtype=torch.int32),
        shared_pages=torch.tensor(SHARED, dtype=torch.int32),
        page_size=PAGE,
        max_seqlen_q=16,
    )
    batch = PagedBatch(
        kv_caches={0: (k, v)},
        slot_mapping=torch.zeros(6, dtype=torch.int64),
        block_table=PAGES,
        seqused_k=torch.tensor(LENGTHS, dtype=torch.int32),
        cu_seqlens_q=torch.arange(7, dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=20,
        common=common,
    )
    q = torch.randn(6, 4, 8, generator=draw)
    given = {"left": -1, "softmax_scale": 0.5, "softcap": 0.0, "sinks": None, **options}
    return batch, {"layer_idx": 0, "q": q, "k": q, "v": q, **given}


def plain(batch: PagedBatch, given: dict[str, Any]) -> torch.Tensor:
    """The same without groups."""
    out = attention_paged(
        given["q"],
        *batch.kv_caches[0],
        block_table=batch.block_table,
        seqused_k=batch.seqused_k,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=1,
        window_size=(given["left"], 0),
        **{name: given[name] for name in ("softmax_scale", "softcap", "sinks")},
        attention_chunk=given.get("attention_chunk", 0),
    )
    assert isinstance(out, torch.Tensor)
    return out
