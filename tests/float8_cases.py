"""Float8 inputs of the Hopper kernel in PyTorch, from the text of `float8_inputs`: an oracle for its kernel, and its stand-in
where the Hopper kernel is emulated."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
ROWS = 128


def rotation(dim: int) -> Tensor:
    """H * sqrt(dim), float64: a Hadamard matrix whose rows have the kernel's signs."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.arange(1, dim + 1) * 40503 & 0xFFFF
    x = (x ^ x >> 7) * 30011 & 0xFFFF
    x = (x ^ x >> 9) * 40503 & 0xFFFF
    return matrix * (1 - 2 * (x >> 15))[:, None]


def scale_of(x: Tensor, *dims: int) -> Tensor:
    return (x.abs().amax(dims) / 448).clamp(min=2.0**-60)


def to_float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).float().to(FLOAT8)


def quantize_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor | None,
    q8: Tensor,
    k8: Tensor,
    v8: Tensor | None,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    *numbers: Any,
) -> None:
    """Writes what `_quantize_inputs` writes. Groups that belong to no sequence become NaN."""
    dim = q.shape[-1]
    h = rotation(dim)
    if cu_seqlens_k is None:
        queries = q
        keys = k
        values = v
    else:
        queries = q[None]
        bounds = cu_seqlens_k.tolist()
        groups = k_scale.shape[-1]
        keys, values = (torch.full((1, groups * ROWS, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in (k, v))
        for b, (first, end) in enumerate(pairwise(bounds)):
            at = (first // ROWS + b) * ROWS
            length = max(-(-(end - first) // ROWS), 1) * ROWS
            for padded, x in ((keys, k), (values, v)):
                padded[0, at : at + length] = 0
                padded[0, at : at + end - first] = x[first:end]
    x = (queries.double() @ h).transpose(1, 2)
    scale = scale_of(x, -1)
    q_scale.copy_(scale / math.sqrt(dim))
    q8.copy_(to_float8(x, scale[..., None]))
    rows = k_scale.shape[-1] * ROWS

    def grouped(x: Tensor) -> Tensor:
        """(batch, heads, groups, ROWS, dim)"""
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1])).transpose(1, 2)
        return x.unflatten(2, (-1, ROWS))

    x = grouped(keys.double() @ h)
    scale = scale_of(x, -1, -2)
    k_scale.copy_(scale / math.sqrt(dim))
    k8.copy_(to_float8(x, scale[..., None, None]).flatten(2, 3))
    if v8 is None:
        return
    if v_scale is None:
        v8.copy_(grouped(values).flatten(2, 3))
        return
    x = grouped(values.double())
    scale = scale_of(x, -1, -2)
    v_scale.copy_(scale)
    # of every 16 keys, 8 h + 2 t + i is stored at 4 t + 2 h + i
    x = to_float8(x, scale[..., None, None]).flatten(2, 3).unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5)
    v8.copy_(x.transpose(2, 3))


def dequantized(q: Tensor, k: Tensor, v: Tensor, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers, float64, that the float8 inputs of one sequence (1, seqlen, heads, dim) stand for. q and k are rotated,
    which does not change their products."""
    h = rotation(q.shape[-1]) / math.sqrt(q.shape[-1])
    queries = q.double() @ h
    keys = k.double() @ h
    values = v.double()
    scale = scale_of(queries, -1)[..., None]
    queries = to_float8(queries, scale).double() * scale
    parts = [keys, values] if precision == "fp8" else [keys]
    for x in parts:
        for start in range(0, x.shape[1], ROWS):
            group = x[:, start : start + ROWS]
            scale = scale_of(group, 1, 3)[:, None, :, None]
            group.copy_(to_float8(group, scale).double() * scale)
    return queries, keys, values
