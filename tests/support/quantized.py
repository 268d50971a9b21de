"""Random quantised weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from fa_serve.ops.products.quantised.weight import FLOAT8, QuantizedWeight, pack_int4


def int4_weight(
    n: int,
    k: int,
    *,
    group_size: int,
    zeros: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    groups = -(-k // group_size)
    return QuantizedWeight(
        data=pack_int4(torch.randint(0, 16, (n, k), generator=draw, dtype=torch.uint8)),
        scales=((torch.rand(n, groups, generator=draw) + 0.5) / 32).to(dtype),
        group_size=group_size,
        width=k,
        zeros=torch.randint(0, 16, (n, groups), generator=draw, dtype=torch.uint8) if zeros else None,
        columns=torch.randperm(k, generator=draw).int() if act_order else None,
    )


def float8_weight(n: int, k: int, *, group_size: int, input_scale: float | None = None, seed: int = 0) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    return QuantizedWeight(
        data=(torch.randn(n, k, generator=draw) * 64).to(FLOAT8),
        scales=(torch.rand(n, -(-k // group_size), generator=draw) + 0.5) / 512,
        group_size=group_size,
        width=k,
        input_scale=None if input_scale is None else torch.tensor([input_scale]),
    )


def float4_weight(n: int, k: int, *, seed: int = 0) -> QuantizedWeight:
    """mxfp4: e2m1 numbers with a scale of e8m0 for 32 columns."""
    draw = torch.Generator().manual_seed(seed)
    return QuantizedWeight(
        data=pack_int4(torch.randint(0, 16, (n, k), generator=draw, dtype=torch.uint8)),
        scales=torch.randint(119, 123, (n, -(-k // 32)), generator=draw, dtype=torch.uint8),
        group_size=32,
        width=k,
    )


def on_gpu(weight: QuantizedWeight) -> QuantizedWeight:
    names = ("data", "scales", "zeros", "columns", "input_scale")
    return replace(weight, **{n: None if (x := getattr(weight, n)) is None else x.cuda() for n in names})
