"""Rotary position embedding with the signatures of flash-attn's `layers.rotary` and `ops.triton.rotary`, in plain PyTorch.

    q = apply_rotary_emb(q, cos, sin, interleaved=False, seqlen_offsets=cache_seqlens)

It computes in float32, rounds once, is differentiable, and the host reads nothing from the device. Source: Su et al. 2021,
arXiv:2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim elements of each head.

    x:              (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens`
    cos, sin:       (positions, rotary_dim / 2)
    interleaved:    pairs are elements 0 and 1, 2 and 3, ...; else element i and i + rotary_dim / 2
    inplace:        write the result into x, and return x
    seqlen_offsets: the position of each sequence's first row, an int or (batch,)
    cu_seqlens:     (batch + 1,), int32: where each packed sequence begins; max_seqlen is not needed
    """
    positions = row_positions(x, seqlen_offsets, cu_seqlens)
    rotated = rotate(x, cos, sin, positions, interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`apply_rotary_emb` with the signature of flash-attn's `ops.triton.rotary`; `conjugate` rotates back."""
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def row_positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each row of x: (seqlen,) or (batch, seqlen) for a dense batch, (total,) for packed sequences."""
    if cu_seqlens is None:
        position = torch.arange(x.shape[1], device=x.device)
        return position + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    sequence = sequence_of_rows(x, cu_seqlens)
    position = torch.arange(x.shape[0], device=x.device) - cu_seqlens[sequence]
    return position + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


def sequence_of_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sequence that each row of x (total, ...) belongs to, (total,); rows after the last sequence count as part of it."""
    row = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens[1:-1].contiguous(), row, right=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., seqlen, heads, head_dim) at positions (..., seqlen), which are clamped to the rows of cos and sin."""
    width = 2 * cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    positions = positions.clamp(max=cos.shape[0] - 1)
    c, s = (table[positions].to(wide)[..., None, :] for table in (cos, sin))
    turned = x[..., :width].to(wide)
    if interleaved:
        first, second = turned.reshape(*turned.shape[:-1], -1, 2).unbind(-1)
        parts = torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        parts = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    parts = parts.to(x.dtype)
    return parts if width == x.shape[-1] else torch.cat((parts, x[..., width:]), dim=-1)
