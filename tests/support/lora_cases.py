"""Adapters of one product with random weights, a batch of tokens that take them, and the result in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.engine.runner.lora_arrays import tile_arrays
from fa_serve.launching.plans import PlanTable
from fa_serve.ops.lora import row_product
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS, PAGE_RANKS, LoraBatch, LoraWeights
from fa_serve.ops.triton_ops import TritonOps


@dataclass(frozen=True)
class LoraCase:
    """slots: that of each token, -1 for none. ranks: of the adapter in each slot. plain: (slot, part) without an adapter"""

    slots: tuple[int, ...]
    ranks: tuple[int, ...] = (4, 16, 40)
    widths: tuple[int, ...] = (48, 16, 16)
    k: int = 96
    norm: bool = False
    bias: bool = False
    dora: bool = False
    plain: tuple[int, int] = (0, 1)
    block_rows: int = 16
    padding: int = 2


def make_case(case: LoraCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, LoraWeights, LoraBatch, ops.Norm | None, Tensor]:
    """y, x, weights, batch, norm and the bias of the base. Memory of no adapter is NaN."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    total = len(case.slots)
    parts = len(case.widths)
    n = sum(case.widths)
    extra = case.bias + case.dora
    counts = [-(-(rank + extra) // PAGE_RANKS) for rank in case.ranks]
    order = torch.randperm(sum(counts) + 1, generator=draw).tolist()
    a = torch.full((len(order), parts, PAGE_RANKS, case.k), torch.nan, dtype=dtype)
    b = torch.full((len(order), PAGE_RANKS, n), torch.nan, dtype=dtype)
    pages = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    scales = torch.rand(len(counts), parts, generator=draw) + 0.5
    ones = torch.full((len(counts), parts), -1, dtype=torch.int32)
    factors = ones.clone()
    for slot, (rank, count) in enumerate(zip(case.ranks, counts, strict=True)):
        own = [order.pop() for _ in range(count)]
        pages[slot, :count] = torch.tensor(own)
        rows_a = torch.zeros(parts, count * PAGE_RANKS, case.k, dtype=dtype)
        rows_b = torch.zeros(count * PAGE_RANKS, n, dtype=dtype)
        rows_a[:, :rank] = randn(parts, rank, case.k) / case.k**0.5
        rows_b[: rank + extra] = randn(rank + extra, n)
        if case.bias:
            ones[slot] = rank
        if case.dora:
            factors[slot] = rank + extra - 1
        a[own] = rows_a.view(parts, count, PAGE_RANKS, case.k).transpose(0, 1)
        b[own] = rows_b.view(count, PAGE_RANKS, n)
    if parts > case.plain[1]:
        scales[case.plain] = 0.0
    rows, tiles = tile_arrays(np.array(case.slots), case.block_rows)
    tiles = np.concatenate([tiles, np.zeros((case.padding, 3), dtype=np.int32)])
    batch = LoraBatch(
        torch.from_numpy(rows),
        torch.from_numpy(tiles),
        torch.tensor(case.slots, dtype=torch.int32),
        pages,
        torch.tensor(counts, dtype=torch.int32),
        case.block_rows,
    )
    norm = ops.Norm(randn(case.k), 1e-5, 1.0) if case.norm else None
    counters = torch.zeros(LORA_COUNTERS, COUNTER_WORDS, dtype=torch.int64)
    weights = LoraWeights(a, b, scales, ones, factors, counters, case.widths)
    return randn(total, n), randn(total, case.k), weights, batch, norm, randn(n)


def exact_result(
    case: LoraCase, y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, norm: ops.Norm | None, bias: Tensor
) -> Tensor:
    """The result in float64, token by token, as `LoraWeights` says."""
    y, x, bias = y.double(), x.double(), bias.double()
    if norm is not None:
        x = ops.rms_norm(x, ops.Norm(norm.weight.double(), norm.eps, norm.offset))
    for token, slot in enumerate(case.slots):
        column = 0
        for part, width in enumerate(case.widths):
            columns = slice(column, column + width)
            column += width
            scale = float(weights.scales[slot, part])
            if slot < 0 or scale == 0.0:
                continue
            pages = batch.pages[slot, : int(batch.num_pages[slot])].long()
            a = weights.a[pages, part].double().flatten(0, 1)
            b = weights.b[pages][:, :, columns].double().flatten(0, 1)
            u = a @ x[token]
            if case.bias:
                u[weights.ones[slot, part]] = 1.0
            delta = scale * (u @ b)
            if case.dora:
                delta += (y[token, columns] - bias[columns]) * b[weights.factors[slot, part]]
            y[token, columns] += delta
    return y


def exact_product(
    case: LoraCase,
    y: Tensor,
    x: Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    norm: ops.Norm | None,
    bias: Tensor,
    weight: Tensor,
    activation: str | None,
    alpha: float | None,
) -> Tensor:
    """The result of `ops.linear_lora` in float64. alpha: y is the residual to which alpha times the product is added"""
    given = x.double()
    if norm is not None:
        given = ops.rms_norm(given, ops.Norm(norm.weight.double(), norm.eps, norm.offset))
    base = given @ weight.double().t() + bias.double()
    out = exact_result(case, base, x, weights, batch, norm, bias)
    if activation is not None:
        out = ops.act_and_mul(out, activation)
    return out if alpha is None else y.double() + alpha * out


def base_weight(case: LoraCase, dtype: torch.dtype) -> Tensor:
    """The weights of the product."""
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(sum(case.widths), case.k, generator=draw) / case.k**0.5).to(dtype)


def merged_product(case: LoraCase, given: tuple[Any, ...], weight: Tensor, extras: dict[str, Any]) -> Tensor:
    """What Triton's kernels compute. extras: "activation", and "residual", to which half of the product is added"""
    y, x, weights, batch, norm, bias = given
    residual = y.clone() if "residual" in extras else None
    options = (norm, extras.get("activation"), residual, 0.5 if residual is not None else 1.0)
    return TritonOps().linear_lora(x, weight, bias, weights, batch, *options)


def choose_ahead(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """One token is multiplied by A in a launch before its product, or in the launch of it, with and without a gate."""
    monkeypatch.setattr(row_product, "PLANS", PlanTable())
    monkeypatch.setattr(row_product, "plan_lora_row", partial(row_product.plan_lora_row, ahead=ahead))
