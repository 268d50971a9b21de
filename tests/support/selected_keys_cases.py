"""Packed queries behind a paged cache, and what an indexer and token-sparse attention compute for them, in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class PagedQueries(NamedTuple):
    """Sequences of a step. Pages are not in order, and what no sequence holds is NaN.

    lengths: (queries, keys) of each sequence; behind: rows behind the last sequence
    """

    lengths: list[tuple[int, int]]
    behind: int
    page_size: int
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor

    @staticmethod
    def of(lengths: list[tuple[int, int]], page_size: int, behind: int = 0, device: str = "cpu") -> PagedQueries:
        most = max(-(-keys // page_size) for _, keys in lengths)
        order = torch.randperm(most * len(lengths), generator=torch.Generator().manual_seed(3))
        table = order.view(len(lengths), most).int()
        for row, (_, keys) in enumerate(lengths):
            table[row, -(-keys // page_size) :] = 1 << 30  # these are never read
        ends = torch.tensor([0, *itertools.accumulate(queries for queries, _ in lengths)], dtype=torch.int32)
        used = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
        return PagedQueries(lengths, behind, page_size, table.to(device), used.to(device), ends.to(device))

    @property
    def total(self) -> int:
        return sum(queries for queries, _ in self.lengths) + self.behind

    @property
    def num_pages(self) -> int:
        return self.block_table.numel()

    @property
    def places(self) -> dict[str, Tensor | int]:
        """The arguments of `ops.select_slots` but the tensors of numbers."""
        return {
            "block_table": self.block_table,
            "seqused_k": self.seqused_k,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": max(queries for queries, _ in self.lengths),
            "max_seqlen_k": max(keys for _, keys in self.lengths),
        }

    def slots_of(self, sequence: int, count: int) -> Tensor:
        """The slots of the first keys of a sequence."""
        place = torch.arange(count, device=self.block_table.device)
        return self.block_table[sequence, place // self.page_size].long() * self.page_size + place % self.page_size

    def cache(self, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
        """(num_pages, page_size, heads, dim), random where a sequence has keys and NaN elsewhere."""
        device = self.block_table.device
        pages = torch.full((self.num_pages * self.page_size, heads, dim), torch.nan, dtype=dtype, device=device)
        for sequence, (_, keys) in enumerate(self.lengths):
            pages[self.slots_of(sequence, keys)] = numbers(keys, heads, dim, dtype=dtype, seed=seed + sequence, device=device)
        return pages.view(self.num_pages, self.page_size, heads, dim)

    def best_slots(self, q: Tensor, cache: Tensor, weights: Tensor, topk: int) -> list[set[int]]:
        """What `ops.select_slots` chooses, for each query."""
        flat = cache.flatten(0, 1)[:, 0].double()
        found: list[set[int]] = []
        for sequence, (queries, keys) in enumerate(self.lengths):
            for query in range(queries):
                slots = self.slots_of(sequence, keys - queries + query + 1)
                row = len(found)
                score = weights[row].double() @ torch.relu(q[row].double() @ flat[slots].T)
                best = score.topk(min(topk, len(slots))).indices
                found.append(set(slots[best].tolist()))
        return found + [set()] * self.behind


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random numbers that do not depend on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def sparse_reference(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, softmax_scale: float, sinks: Tensor | None = None
) -> Tensor:
    """`ops.sparse_attention` in float64, query by query."""
    keys, values = (x.flatten(0, 1).double() for x in (k, v))
    groups = q.shape[1] // k.shape[2]
    rows = []
    for query, row in zip(q.double(), slots, strict=True):
        chosen = row[row >= 0].long()
        own_keys, own_values = (x[chosen].repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query, own_keys) * softmax_scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        p = torch.softmax(scores, dim=1)[:, : len(chosen)]
        rows.append(torch.einsum("hn,nhd->hd", p, own_values))
    return torch.stack(rows)
