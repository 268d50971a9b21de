"""Adapters in plain PyTorch, for devices without kernels. The host reads the tiles of a step.

The sums are computed in float32 or wider, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.ops_backend import Norm


def torch_add_lora(
    y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, norm: Norm | None, bias: Tensor | None
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.add_lora`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    for slot, entries in _entries_by_slot(batch).items():
        rows = batch.rows[entries].long()
        pages = batch.pages[slot, : int(batch.num_pages[slot])].long()
        given = x[rows].to(wide)
        if norm is not None:
            given = torch.nn.functional.rms_norm(given, (x.shape[1],), norm.weight.to(wide) + norm.offset, norm.eps)
        column = 0
        for part, width in enumerate(weights.widths):
            scale = float(weights.scales[slot, part])
            columns = slice(column, column + width)
            column += width
            if scale == 0.0:
                continue
            a = weights.a[pages, part].reshape(-1, x.shape[1]).to(wide)
            b = weights.b[pages, :, columns].reshape(len(a), width).to(wide)
            u = given @ a.t() * scale
            one = int(weights.ones[slot, part])
            factor = int(weights.factors[slot, part])
            if one >= 0:
                u[:, one] = scale
            before = y[rows, columns].to(wide)
            delta = u @ b
            if factor >= 0:
                base = before if bias is None else before - bias[columns].to(wide)
                delta = delta + base * b[factor]
            y[rows, columns] = (before + delta).to(y.dtype)
    return y


def _entries_by_slot(batch: LoraBatch) -> dict[int, Tensor]:
    """For each slot that has rows: the indices of its entries in `LoraBatch.rows`."""
    found: dict[int, list[Tensor]] = {}
    for slot, first, count in batch.tiles.tolist():
        if count and slot >= 0:
            found.setdefault(slot, []).append(torch.arange(first, first + count))
    return {slot: torch.cat(parts) for slot, parts in found.items()}
