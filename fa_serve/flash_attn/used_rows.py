"""Packed sequences of which only the first rows are used: `seqused_q` and `seqused_k` of FlashAttention-3 and -4.

    used = UsedRows.of(k, cu_seqlens_k, seqused_k)
    out = fa_serve.attention_varlen(q, used.gather(k), used.gather(v), cu_seqlens_k=used.cu_seqlens, ...)

`fa_serve.attention_varlen` takes sequences without gaps, so the used rows are moved to the front. The result has as many rows
as the input, because the host does not know how many are used; the rows after the used rows repeat the first row. Everything is
differentiable, and the host reads nothing from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.flash_attn.rotary import sequence_of_rows


class UsedRows(NamedTuple):
    """Where the used rows are.

    source:     (total,), the given row from which each gathered row is taken
    target:     (total,), the gathered row to which each given row goes; 0 for a row that is not used
    is_used:    (total,) bool, whether a given row is used
    cu_seqlens: (batch + 1,), int32, of the gathered rows
    """

    source: Tensor
    target: Tensor
    is_used: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor, seqused: Tensor) -> UsedRows:
        """x: (total, ...); cu_seqlens: (batch + 1,), int32; seqused: (batch,), int32, at most the length of each sequence."""
        row = torch.arange(x.shape[0], device=x.device)
        starts = torch.nn.functional.pad(seqused.cumsum(0, dtype=torch.int32), (1, 0))
        gathered_sequence = sequence_of_rows(x, starts)
        source = cu_seqlens[gathered_sequence] + row - starts[gathered_sequence]
        sequence = sequence_of_rows(x, cu_seqlens)
        place = row - cu_seqlens[sequence]
        is_used = (place < seqused[sequence]) & (row < cu_seqlens[-1])
        target = torch.where(is_used, starts[sequence] + place, 0)
        return cls(torch.where(row < starts[-1], source, 0), target, is_used, starts)

    def gather(self, x: Tensor) -> Tensor:
        """The used rows of x (total, ...), then repetitions of its first row."""
        return x[self.source]

    def scatter(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Undo `gather`: gathered rows (total, ...) at the places of the given rows, `fill` where a row is not used."""
        is_used = self.is_used.view(-1, *([1] * (rows.dim() - 1)))
        return rows[self.target].masked_fill(~is_used, fill)
