"""How the copy engine (TMA) addresses tensors: the strides that it accepts, and the views that a launch encodes.

The copy engine wants a contiguous last dimension, all other strides and the base address at multiples of 16 bytes, and no
expanded dimension. `copy_engine_strides` says whether a layout meets these conditions. `dense_view` and `ragged_view` say how
the kernel sees a tensor: the hardware enforces the bounds of a view, reads zeros beyond them and drops writes there.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.forward.types import RAGGED
from fa_serve.launching.launch import View

_LAYOUTS = {
    (dtype, rank, width): gl.NVMMASharedLayout(min(dtype.itemsize * width, 128), 8 * dtype.itemsize, rank=rank)
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    for rank in (4, 5)
    for width in (16, 32, 64, 128, 256)
    if dtype.itemsize * width >= 32
}

_STATISTICS = gl.NVMMASharedLayout(0, 32, rank=2)


@lru_cache(maxsize=4096)
def copy_engine_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> tuple[int, ...] | None:
    """The strides to encode for a tensor of elements of `itemsize` bytes, or None if the copy engine cannot address it.

    The stride of a dimension of size 1 has no meaning and may be anything; it is replaced by a stride that is accepted.
    """
    unit = 16 // itemsize
    outer = tuple(unit if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True))
    return None if strides[-1] != 1 or any(stride % unit or not stride for stride in outer) else (*outer, 1)


@lru_cache(maxsize=512)
def dense_view(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, heads: int = 1
) -> View:
    """A tensor (batch, seqlen, heads, dim) in boxes of `rows` tokens, `heads` and `width` columns, bounded by its shape."""
    encoded = copy_engine_strides(shape, strides, dtype.itemsize)
    assert encoded is not None
    return View(shape, encoded, (1, rows, heads, width), _LAYOUTS[dtype, 4, width])


@lru_cache(maxsize=512)
def ragged_view(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, heads: int = 1
) -> View:
    """A tensor (total, heads, dim) in boxes of `rows` tokens, `heads` and `width` columns, bounded by the end of each sequence.

    Row r of the sequence [start, start + length) is addressed as (2^30, start + length, 2^30 - length + r): the bound 2^30
    of the third coordinate stops at the sequence's end, and 2^30 times the first stride, 2^34 - stride, cancels the rest
    modulo 2^64 bytes. After Triton's tools/ragged_tma.py.
    """
    encoded = copy_engine_strides(shape, strides, dtype.itemsize)
    assert encoded is not None
    row, head, last = encoded
    bounds = (0x7FFF0000, 0x7FFF0000, RAGGED.value, *shape[1:])
    ragged_strides = ((1 << 34) - row, row, row, head, last)
    return View(bounds, ragged_strides, (1, 1, rows, heads, width), _LAYOUTS[dtype, 5, width])


@lru_cache(maxsize=512)
def statistics_view(shape: tuple[int, ...], rows: int) -> View:
    """Contiguous float32 statistics (..., heads, rows of queries) in boxes of `rows` numbers of one head."""
    width = shape[-1]
    return View((math.prod(shape[:-1]), width), (width, 1), (1, rows), _STATISTICS)


def addressable(x: Tensor, copied: bool) -> Tensor:
    """A contiguous copy if `copied`; else x, or a copy with the same strides if the address of x is unaligned."""
    if copied:
        return x.clone(memory_format=torch.contiguous_format)
    if x.data_ptr() & 15:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return x
