"""What the warps of the backward kernel for wide heads agree on: its variant, its buffers and its barriers.

Q, K, V and dO have two parts in shared memory, of 128 columns and of the rest, because the sizes of Gluon's tensors are powers
of two and 192 is not. Each part is an operand of products by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.backward.tiles import WIDE_BLOCK_N, BackwardTileConfig

FIRST_PART = gl.constexpr(128)
"""Columns of the first part of Q, K, V and dO."""
FIRST_COLUMNS: int = FIRST_PART.value
SLOTS_OF_SCORES = gl.constexpr(2)
"""Blocks of P and of dS in shared memory. With two, one warpgroup may be a block ahead of the other."""


@dataclass(frozen=True)
class WideBackwardVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    tiles:  the stages; a block has 64 queries
    d1:     columns of the second part of Q and K, 64 or 128
    dv1:    columns of the second part of V and dO; 0 if there is none, as in DeepSeek's heads of 192 and 128
    varlen, has_left, has_right, softcap: as in `HopperBackwardVariant`
    """

    tiles: BackwardTileConfig
    d1: int
    dv1: int
    varlen: bool
    has_left: bool
    has_right: bool
    softcap: bool

    def __post_init__(self) -> None:
        assert self.tiles.block_m == 64, "P of more than 64 queries does not fit in registers together with dV"

    @property
    def block_n(self) -> int:
        return WIDE_BLOCK_N

    @property
    def width(self) -> int:
        """Columns of the sum of dQ."""
        return FIRST_COLUMNS + self.d1

    @property
    def value_products(self) -> int:
        """Products of dV in a block, one for each part."""
        return 2 if self.dv1 else 1

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of transposed scores [64 keys, 64 queries] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])

    @property
    def first_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the first part of dK and dV [64 keys, 128], and of dQ [64 queries, 128]."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, FIRST_COLUMNS, 16])

    @property
    def second_key_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the second part of dK and dQ, [64, d1]."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.d1, 16])

    @property
    def second_value_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the second part of dV, [64, dv1]; without a second part, the layout of the first part."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.dv1 or FIRST_COLUMNS, 16])


class WideBackwardDescriptors(NamedTuple):
    """How the copy engine sees each tensor. Names that end in 1 are second parts, or first parts again if there are none."""

    q: gl.tensor
    q1: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    v1: gl.tensor
    dout: gl.tensor
    dout1: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    dk: gl.tensor
    dk1: gl.tensor
    dv: gl.tensor
    dv1: gl.tensor


class WideBackwardMemory(NamedTuple):
    """The buffers of a thread block. Names that end in 1 are second parts, or first parts again if there are none.

    q, dout:    (stages, 64 rows, 128), and (stages, 64 rows, d1 or dv1)
    lse, delta: (stages, 1, 64), float32: statistics of the rows in each stage of q and of dout
    k, v:       (1, 64 rows, 128), and (1, 64 rows, d1 or dv1); dK and dV leave through them
    weights:    (2, 64 keys, 64 queries): P^T of two blocks, times the slope of the softcap
    ds:         (2, 64 keys, 64 queries): dS^T of two blocks
    """

    q: gl.tensor
    q1: gl.tensor
    dout: gl.tensor
    dout1: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    v1: gl.tensor
    weights: gl.tensor
    ds: gl.tensor


class WideBackwardBarriers(NamedTuple):
    """The barriers of a thread block.

    q_full, q_empty, do_full, do_empty: two for each stage of q and dout; k_full and v_full are used once
    weights_full: the weights of a block are in shared memory
    ds_full:      dS of a block is in shared memory, and its weights have been read
    """

    q_full: gl.tensor
    q_empty: gl.tensor
    do_full: gl.tensor
    do_empty: gl.tensor
    k_full: gl.tensor
    v_full: gl.tensor
    weights_full: gl.tensor
    ds_full: gl.tensor
