"""Weights and tensors without memory, of any size, to see what would be launched."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.ops.products.quantised.weight import FLOAT8, QuantizedWeight

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """A tensor whose address is `offset` elements."""
    size = 1
    for each in shape:
        size *= each
    return torch.empty(size + offset, dtype=dtype, device="meta")[offset:].view(shape)


def meta_weight(
    values: str,
    n: int,
    k: int,
    group: int = 0,
    *,
    scales: torch.dtype | None = None,
    zeros: bool = False,
    act_order: bool = False,
    input_scale: bool = False,
    offset: int = 0,
) -> QuantizedWeight:
    """group: 0 stands for a scale for each row; offset: of the address of its values, in bytes"""
    group = group or k
    groups = -(-k // group)
    if values == "float8":
        data = meta(n, k, dtype=FLOAT8, offset=offset)
    else:
        data = meta(n, 32 * -(-k // 256), dtype=torch.int32, offset=offset // 4)
    kinds = {"int4": BF16, "float4": torch.uint8, "float8": torch.float32}
    return QuantizedWeight(
        data=data,
        scales=meta(n, groups, dtype=scales or kinds[values]),
        group_size=group,
        width=k,
        zeros=meta(n, groups, dtype=torch.uint8) if zeros else None,
        columns=meta(k, dtype=torch.int32) if act_order else None,
        input_scale=meta(1, dtype=torch.float32) if input_scale else None,
    )
