"""How tensors lie in memory: a plan decides this for tensors that do not exist yet.

    queries = permuted(contiguous((batch, num_heads, seqlen, dim), torch.bfloat16), 0, 2, 1, 3)

This module leaves out which layouts a kernel can address (`hopper.descriptors`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class TensorLayout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorLayout:
    """The layout of a new tensor."""
    return TensorLayout(shape, tuple([math.prod(shape[i:]) for i in range(1, len(shape) + 1)]), dtype)


def permuted(x: TensorLayout, *order: int) -> TensorLayout:
    """The layout of `x.permute(order)`."""
    return TensorLayout(tuple([x.shape[i] for i in order]), tuple([x.strides[i] for i in order]), x.dtype)
