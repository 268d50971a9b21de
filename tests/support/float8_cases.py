"""Float8 inputs in PyTorch, from the text of `triton.float8_inputs`: an oracle for its kernel, and its stand-in where the
Hopper kernel is emulated. Paged calls whose products are float8, and the largest error of a result."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from fa_serve.testing import cu_seqlens, make_paged, make_qkv

FLOAT8 = torch.float8_e4m3fn
ROWS = 128
BOUND = {"qk8": 0.004, "fp8": 0.03}
"""The error of a result, relative to its norm, beside attention of `dequantized` inputs."""


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


def _packed_rows(x: Tensor, groups: int, bounds: list[int]) -> Tensor:
    """Packed rows with gaps, (1, groups * ROWS, heads, dim)."""
    padded = torch.full((1, groups * ROWS, *x.shape[1:]), float("nan"), dtype=x.dtype)
    for b, (first, end) in enumerate(pairwise(bounds)):
        at = (first // ROWS + b) * ROWS
        length = max(-(-(end - first) // ROWS), 1) * ROWS
        padded[0, at : at + length] = 0
        padded[0, at : at + end - first] = x[first:end]
    return padded


def _paged_rows(
    cache: Tensor, groups: int, num_queries: list[int], lengths: list[int], block_table: Tensor, skip_q: int, left: int
) -> Tensor:
    """Rows of a cache as a batch (sequences, groups * ROWS, heads, dim), float64."""
    page_size = cache.shape[1]
    padded = torch.full((len(lengths), groups * ROWS, *cache.shape[2:]), float("nan"), dtype=torch.float64)
    for b, (queries, length) in enumerate(zip(num_queries, lengths, strict=True)):
        if queries <= skip_q:
            continue
        low = max(length - queries - left, 0) if left >= 0 else 0
        padded[b, low // ROWS * ROWS : max(-(-length // ROWS), 1) * ROWS] = 0
        for row in range(low, length):
            padded[b, row] = cache[block_table[b, row // page_size], row % page_size].double()
    return padded


def quantize_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    block_table: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rotation_given: Tensor,
    q8: Tensor,
    k8: Tensor,
    v8: Tensor | None,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    *,
    skip_q: int = 0,
    left: int = -1,
) -> None:
    """Writes what `_quantize_inputs` writes. Groups that it does not write become NaN."""
    dim = q.shape[-1]
    h = rotation(dim)
    assert torch.equal(rotation_given.double(), h)
    queries = q if lengths is None else q[None]
    groups = k_scale.shape[-1]
    if block_table is not None:
        assert lengths is not None
        assert cu_seqlens_q is not None
        num_queries = cu_seqlens_q.diff().tolist()
        keys, values = (_paged_rows(x, groups, num_queries, lengths.tolist(), block_table, skip_q, left) for x in (k, v))
    elif lengths is not None:
        keys, values = (_packed_rows(x, groups, lengths.tolist()) for x in (k, v))
    else:
        keys = k
        values = v
    x = (queries.double() @ h).transpose(1, 2)
    scale = scale_of(x, -1)
    q_scale.copy_(scale / math.sqrt(dim))
    q8.copy_(to_float8(x, scale[..., None]))
    rows = groups * ROWS

    def grouped(x: Tensor) -> Tensor:
        """(batch, heads, groups, ROWS, dim)"""
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1])).transpose(1, 2)
        return x.unflatten(2, (-1, ROWS))

    x = grouped(keys.double() @ h)
    if k_descale is not None:
        x *= k_descale.double()[:, None, None, None]
    scale = scale_of(x, -1, -2)
    k_scale.copy_(scale / math.sqrt(dim))
    k8.copy_(to_float8(x, scale[..., None, None]).flatten(2, 3))
    if v8 is None:
        return
    x = grouped(values.double())
    factor = None if v_descale is None else v_descale.double()[:, None, None, None]
    if v_scale is None:
        v8.copy_((x if factor is None else x * factor).flatten(2, 3))
        return
    if factor is None:
        scale = scale_of(x, -1, -2)
        x = to_float8(x, scale[..., None, None])
    else:
        scale = (x[..., 0, 0] * 0 + 1) * factor[..., 0, 0]  # NaN where no group is
        x = x.float().to(FLOAT8)
    v_scale.copy_(scale)
    # of every 16 keys, 8 h + 2 t + i is stored at 4 t + 2 h + i
    x = x.flatten(2, 3).unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5)
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


def paged_call(
    lengths_q: list[int],
    lengths_k: list[int],
    dim: int,
    float8: bool,
    window: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[dict[str, Any], list[tuple[slice, Tensor, Tensor]]]:
    """Arguments of `attention_paged`, and for each sequence its rows, keys and values as float64 numbers of the cache.

    Pages before a window are given up: their entries of the block table point outside. So do entries past a sequence's end.
    """
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, dim, dtype=dtype))
    v *= torch.linspace(0.1, 20, len(v))[:, None, None].to(dtype)
    k_cache, v_cache, block_table, seqused_k = make_paged(k.split(lengths_k), v.split(lengths_k), 16)
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    descales = {}
    if float8:
        descales = {"k_descale": torch.tensor([0.02, 0.03]), "v_descale": torch.tensor([0.3, 0.4])}
        k_cache, v_cache = (
            (x / d[:, None]).to(torch.float8_e4m3fn) for x, d in zip((k_cache, v_cache), descales.values(), strict=True)
        )
        k, v = (
            (x / d[:, None]).to(torch.float8_e4m3fn).double() * d[:, None]
            for x, d in zip((k, v), descales.values(), strict=True)
        )
    cu_q = cu_seqlens(lengths_q)
    sequences = []
    for b, (keys, values) in enumerate(zip(k.double().split(lengths_k), v.double().split(lengths_k), strict=True)):
        if window[0] >= 0:  # the copies are zero before the first query's window
            hidden = max(lengths_k[b] - lengths_q[b] - window[0], 0)
            keys[:hidden] = values[:hidden] = 0
            block_table[b, : hidden // 128 * 8] = 2**28
        sequences.append((slice(cu_q[b], cu_q[b + 1]), keys[None], values[None]))
    call = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_q,
    }
    lengths = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k), "window_size": window}
    return {name: x.to(device) for name, x in (call | descales).items()} | lengths, sequences


def correct_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter round float32 to float8 as hardware does.

    The interpreter of Triton 3.6 halves a number that it rounds up to a power of two.
    """
    convert = interpreter._convert_float

    def rounded(x: Any, given: tl.dtype, wanted: tl.dtype, rounding: Any) -> Any:
        if (given, wanted) != (tl.float32, tl.float8e4nv):
            return convert(x, given, wanted, rounding)
        clamped = torch.from_numpy(x).clamp(-448, 448)
        return clamped.to(FLOAT8).view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", rounded)
